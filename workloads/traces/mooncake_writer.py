"""Writer of Mooncake's format: prompts as hash ids of blocks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads._checks import MAX_TOKENS, whole
from workloads.columns import RequestColumns
from workloads.traces.writing.losses import losses, num_quoting, num_sharing
from workloads.traces.writing.scaling import scaled
from workloads.traces.writing.sessions_in_lines import chain_losses, links

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.spec import RequestSpec, Segment

_Run = tuple[int, int, int]
"""``(segment_id, first token, num_tokens)``."""


@dataclass(frozen=True, slots=True)
class MooncakeTraceWriter:
    """Writer of Mooncake's format, with ``session_id`` and ``delay`` for follow-ups.

    A block's hash id stands for its text: blocks of equal text have the same id. If
    every segment is a block (a Mooncake trace is so), the ids are those of the
    segments; otherwise they count up.

    Parameters
    ----------
    block_tokens
        Prompt tokens that one hash id stands for.

    Raises
    ------
    WorkloadError
        If ``block_tokens`` is no integer or below 1.
    """

    block_tokens: int = 512

    def __post_init__(self) -> None:
        remedy = "give a number of tokens, 512 in the published traces"
        whole("block_tokens", self.block_tokens, 1, MAX_TOKENS, remedy)

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        """Return what the format cannot hold; see `TraceWriter`."""
        kept = ("prefixes", "sessions", "chains")
        lines = losses(requests, kept)
        if isinstance(requests, RequestColumns):
            return lines
        if num := num_quoting(requests):
            lines.insert(
                0, f"that {num} prompts quote what was generated for another request"
            )
        if num_sharing(requests) and not self._keeps_ids(requests):
            lines.insert(
                0, f"shared text that is no block of {self.block_tokens} tokens"
            )
        return lines + chain_losses(requests, links(requests))

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        """Yield the lines of the file; see `TraceWriter`."""
        ids = _BlockIds(self.block_tokens, self._keeps_ids(requests))
        for request, link in zip(requests, links(requests), strict=True):
            entry: dict[str, Any] = {}
            if not link.follows:
                entry["timestamp"] = scaled(request.arrival_s, 1000)
            entry["input_length"] = request.num_prompt_tokens
            entry["output_length"] = request.num_output_tokens
            entry["hash_ids"] = ids.of(request.prompt)
            if link.session_id is not None:
                entry["session_id"] = str(link.session_id)
            if link.follows:
                entry["delay"] = scaled(request.delay_s, 1000)
            yield json.dumps(entry) + "\n"

    def _keeps_ids(self, requests: Sequence[RequestSpec]) -> bool:
        """Whether every segment is a block, the last ones of prompts at most."""
        if isinstance(requests, RequestColumns):
            return False
        size = self.block_tokens
        return all(
            all(segment % 2 == 0 and num == size for segment, num in prompt[:-1])
            and prompt[-1][0] % 2 == 0
            and prompt[-1][1] <= size
            for prompt in (request.prompt for request in requests)
        )


class _BlockIds:
    """Hash ids of blocks by their text."""

    def __init__(self, block_tokens: int, keep: bool) -> None:
        self._block_tokens = block_tokens
        self._keep = keep
        self._ids: dict[tuple[tuple[int, ...], ...], int] = {}

    def of(self, prompt: tuple[Segment, ...]) -> list[int]:
        """Return the hash ids of a prompt."""
        if self._keep:
            return [segment // 2 for segment, _ in prompt]
        return [
            self._ids.setdefault(_text_of(block), len(self._ids))
            for block in _blocks(prompt, self._block_tokens)
        ]


def _text_of(block: list[_Run]) -> tuple[tuple[int, ...], ...]:
    """Return a key that blocks share as far as both reach.

    How long the last run is does not matter: a block that ends earlier is the beginning
    of the other.
    """
    return (*block[:-1], block[-1][:2])


def _blocks(prompt: tuple[Segment, ...], size: int) -> Iterator[list[_Run]]:
    """Yield the runs of each block of a prompt."""
    block: list[_Run] = []
    room = size
    for segment, num_tokens in prompt:
        first = 0
        while first < num_tokens:
            num = min(room, num_tokens - first)
            block.append((segment, first, num))
            first, room = first + num, room - num
            if not room:
                yield block
                block, room = [], size
    if block:
        yield block
