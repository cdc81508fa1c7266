"""Prefix sharing: hits of an infinite, instantly filled cache of prompts.

Requests in order of arrival, and of each prompt the leading blocks that an earlier
*prompt* had already. Generated text is not added, and a prompt may be found whole:
these are the figures that traces are described with, a little above and beside those
of an engine, for which see `workloads.analysis.prefix_curve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workloads.analysis.paths import runs
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec, Segment


@dataclass(frozen=True, slots=True)
class SharingStatistics:
    """Leading blocks of prompts that an earlier prompt had."""

    unit: str
    """Kind of block: full blocks, or the trace's own pieces, the last one partial."""
    block_size: int
    """Tokens of a block."""
    num_blocks: int
    num_distinct_blocks: int
    num_hit_blocks: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_requests: int
    num_requests_hit: int
    """Requests with at least one block found."""

    @property
    def block_hit_rate(self) -> float:
        return self.num_hit_blocks / max(self.num_blocks, 1)

    @property
    def token_hit_rate(self) -> float:
        return self.num_hit_tokens / max(self.num_prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Sharing of a workload, with the tokens that each request finds.

    Parameters
    ----------
    statistics
        Of all.
    hit_tokens
        Tokens found of each prompt, int64 of shape ``(n,)``.
    """

    statistics: SharingStatistics
    hit_tokens: NDArray[np.int64]


def own_block_size(requests: Sequence[RequestSpec]) -> int | None:
    """Return the tokens of the pieces in which a trace names its prompts.

    None unless each prompt is cut into pieces of one size, the last one at most that,
    as Mooncake's hash ids are; and of the prompts at least one has several pieces.
    """
    if isinstance(requests, RequestColumns):
        return None
    size = next((r.prompt[0][1] for r in requests if len(r.prompt) > 1), None)
    if size is None:
        return None
    for request in requests:
        *whole, (_, last) = request.prompt
        if last > size or any(length != size for _, length in whole):
            return None
    return size


def sharing_by_pieces(requests: Sequence[RequestSpec], block_size: int) -> Sharing:
    """Return the sharing by the trace's own pieces, partial last ones included."""
    found = _Infinite("pieces of the trace, the last one partial", block_size)
    for request in requests:
        found.add(_pieces(request.prompt), request.num_prompt_tokens)
    return found.sharing()


def sharing_by_blocks(requests: Sequence[RequestSpec], block_size: int) -> Sharing:
    found = _Infinite("full blocks", block_size)
    for request in requests:
        path = runs(request.prompt, block_size)
        found.add(path, request.num_prompt_tokens)
    return found.sharing()


def _pieces(prompt: tuple[Segment, ...]) -> Iterator[tuple[int, int]]:
    key = 0
    for segment in prompt:
        key = hash((key, *segment))
        yield key, 1


class _Infinite:
    """A cache without limit: how far each run is known."""

    def __init__(self, unit: str, block_size: int) -> None:
        self.unit, self.block_size = unit, block_size
        self.known: dict[int, int] = {}
        self.num_blocks = self.num_hit_blocks = self.num_prompt_tokens = 0
        self.hit_tokens: list[int] = []

    def add(self, path: Iterator[tuple[int, int]], num_prompt_tokens: int) -> None:
        known, num_hits, is_hit = self.known, 0, True
        for key, num_blocks in path:
            self.num_blocks += num_blocks
            so_far = known.get(key, 0)
            if is_hit:
                num_hits += min(so_far, num_blocks)
                is_hit = so_far >= num_blocks
            if so_far < num_blocks:
                known[key] = num_blocks
        self.num_hit_blocks += num_hits
        self.num_prompt_tokens += num_prompt_tokens
        self.hit_tokens.append(min(num_hits * self.block_size, num_prompt_tokens))

    def sharing(self) -> Sharing:
        hit_tokens = np.array(self.hit_tokens, dtype=np.int64)
        statistics = SharingStatistics(
            unit=self.unit,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_distinct_blocks=sum(self.known.values()),
            num_hit_blocks=self.num_hit_blocks,
            num_prompt_tokens=self.num_prompt_tokens,
            num_hit_tokens=int(hit_tokens.sum()),
            num_requests=len(hit_tokens),
            num_requests_hit=int((hit_tokens > 0).sum()),
        )
        return Sharing(statistics, hit_tokens)
