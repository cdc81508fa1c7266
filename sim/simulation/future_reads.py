"""Who will look for which prompt block: what the clairvoyant policy knows."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from cache.tokens import SegmentTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import RequestSpec


class WorkloadReads:
    """The full prompt blocks that each request of a workload looks for.

    Read when first asked: it costs a hash for each block, and memory for those that
    several requests share.
    """

    def __init__(self, specs: Sequence[RequestSpec], block_size: int) -> None:
        self._specs = specs
        self._block_size = block_size

    def readers(self, content: int) -> Sequence[int]:
        """Return the requests that look for a block, ascending; of one alone, none."""
        return self._readers.get(content, ())

    def contents(self, request_id: int) -> Sequence[int]:
        """Return the blocks that a request looks for and shares with others."""
        return self._contents.get(request_id, ())

    @cached_property
    def _contents(self) -> dict[int, list[int]]:
        shared = self._shared
        return {
            spec.request_id: [c for c in self._reads(spec) if c in shared]
            for spec in self._specs
        }

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for request_id, contents in self._contents.items():
            for content in contents:
                readers.setdefault(content, []).append(request_id)
        return readers

    @property
    def _shared(self) -> set[int]:
        """Blocks that more than one request looks for."""
        seen: set[int] = set()
        shared: set[int] = set()
        for spec in self._specs:
            for content in self._reads(spec):
                (shared if content in seen else seen).add(content)
        return shared

    def _reads(self, spec: RequestSpec) -> list[int]:
        """Return what V1 looks for: of a prompt known whole, not its last block."""
        contents: list[int] = []
        num_blocks = (spec.num_prompt_tokens - 1) // self._block_size
        tokens = SegmentTokens(spec.prompt, spec.output_segment)
        tokens.extend_block_hashes(contents, num_blocks, self._block_size)
        return contents
