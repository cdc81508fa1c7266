"""Prefix caches written down plainly: every block by itself, nothing clever."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations
from typing import TYPE_CHECKING

from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import Segment


def request(
    prompt: Sequence[Segment], num_output_tokens: int = 1, output_segment: int = 1
) -> RequestSpec:
    return RequestSpec(0, 0.0, tuple(prompt), num_output_tokens, output_segment)


def blocks_of(
    spec: RequestSpec, block_size: int, *, prompts_only: bool = False
) -> tuple[list[int], int]:
    """Return the identity of each full block, and how many may be hits."""
    num_new = 0 if prompts_only else spec.num_output_tokens - 1
    segments = (*spec.prompt, (spec.output_segment, num_new))
    tokens = [(segment, i) for segment, length in segments for i in range(length)]
    blocks: list[int] = []
    before = 0
    for end in range(block_size, len(tokens) + 1, block_size):
        before = hash((before, tuple(tokens[end - block_size : end])))
        blocks.append(before)
    return blocks, (spec.num_prompt_tokens - 1) // block_size


Path = tuple[list[int], int]


def plain_lru_hits(paths: Sequence[Path], size: int) -> int:
    """Return the blocks found by an LRU cache of `size` blocks."""
    cache: OrderedDict[int, None] = OrderedDict()  # the least recent first
    num_hits = 0
    for blocks, num_readable in paths:
        for block in blocks[:num_readable]:
            if block not in cache:
                break
            num_hits += 1
        for block in reversed(blocks):  # the tail is freed first
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    return num_hits


def plain_infinite_hits(paths: Sequence[Path]) -> int:
    """Return the blocks found if nothing is ever evicted."""
    seen: set[int] = set()
    num_hits = 0
    for blocks, num_readable in paths:
        for block in blocks[:num_readable]:
            if block not in seen:
                break
            num_hits += 1
        seen.update(blocks)
    return num_hits


def best_hits(paths: Sequence[Path], size: int) -> int:
    """Return the most blocks that any policy finds, by trying all that it could keep.

    After a request the cache may hold any `size` of the blocks that it held before or
    that the request has.
    """
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks, num_readable in paths:
        after: dict[frozenset[int], int] = {}
        for kept, num_hits in best.items():
            found = 0
            for block in blocks[:num_readable]:
                if block not in kept:
                    break
                found += 1
            choice = kept | set(blocks)
            for held in combinations(sorted(choice), min(size, len(choice))):
                key = frozenset(held)
                after[key] = max(after.get(key, 0), num_hits + found)
        best = after
    return max(best.values())
