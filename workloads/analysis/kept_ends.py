"""Hits of an infinite cache where a hit needs more than the blocks of a prefix.

Layers that look back at a window keep the blocks of few tokens, layers with a state
keep the state at few places, and a prefix is found up to such a place only. A release
keeps them where a prompt ends, and where it parted from cached prompts: the first
request of a shared prefix leaves nothing there, the second finds the place and leaves
it, the third is served from it::

    cached   | a a a a a a b b b b |      window or state kept at the end of b
    second   | a a a a a a c c c c |      finds 6 blocks, 0 with a window: keeps both
    third    | a a a a a a d d d d |      finds 6

Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``
(`reachable_block_mask`) and ``kv_cache_coordinator.py`` (`find_longest_cache_hit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import MAX_TOKENS, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.analysis.paths import BlockPaths

Interval = tuple[int, int]
"""Tokens of a path, counted from its root: the first, and the one behind the last."""
Stretch = tuple[int, int, int]
"""``(run, begin, end)``: the part of a run in a path, in tokens from its root."""


@dataclass(frozen=True, slots=True)
class KeptEnds:
    """Hits of requests that come one after the other, and the tokens that they keep.

    Parameters
    ----------
    num_hits
        Blocks found.
    kept_tokens
        Different tokens whose blocks are kept, for each kind of layers.
    """

    num_hits: int
    kept_tokens: tuple[int, ...]


def kept_ends(
    paths: BlockPaths, tail_tokens: Sequence[int], retention_interval: int = 0
) -> KeptEnds:
    """Return the hits of an infinite cache of unlike layers, one of which reads all.

    Parameters
    ----------
    paths
        Of blocks at whose ends hits may end; all blocks, not a sample.
    tail_tokens
        Of each kind of layers that does not keep all: the tokens before the end of a
        hit that must be cached, whole blocks of its own.
    retention_interval
        Tokens after which they are kept in any case; 0 for nowhere.

    Notes
    -----
    O(visits), for tails of a few runs and intervals of many tokens. Where a kind has
    smaller blocks than those of `paths`, requests that part inside one of those may
    share more of its blocks than is counted, and find a little more.
    """
    whole("retention interval", retention_interval, 0, MAX_TOKENS, "give 0 for nowhere")
    size = paths.block_size
    kinds = [_Kind(tail, size) for tail in tail_tokens]
    longest = [0] * paths.num_runs  # blocks of each run that are cached
    num_hits = 0
    for visits in paths.visits():
        path, begin, common, prompt_end = [], 0, 0, 0
        for run, used, readable in visits:
            end = begin + used * size
            path.append((run, begin, end))
            if common == begin:
                common += min(longest[run], readable) * size
            prompt_end += readable * size
            longest[run] = max(longest[run], used)
            begin = end
        found = common_end(kinds, path, common)
        num_hits += found // size
        ends = {prompt_end, common} if common > found else {prompt_end}
        for kind in kinds:
            kind.keep(path, ends, retention_interval)
    return KeptEnds(num_hits, tuple(kind.kept_tokens for kind in kinds))


def common_end(kinds: Sequence[_Kind], path: Sequence[Stretch], end: int) -> int:
    """Return the last place up to `end` at which all kinds have their tails."""
    before = -1
    while end != before:
        before = end
        for kind in kinds:
            end = kind.last_end(path, end)
    return end


class _Kind:
    """Layers that need a tail before the end of a hit."""

    def __init__(self, tail_tokens: int, block_size: int) -> None:
        self._tail = tail_tokens
        self._block_size = block_size
        self._kept: dict[int, list[Interval]] = {}  # of each run, apart and rising

    @property
    def kept_tokens(self) -> int:
        return sum(end - begin for kept in self._kept.values() for begin, end in kept)

    def last_end(self, path: Sequence[Stretch], limit: int) -> int:
        """Return the last block end, `limit` at most, with a whole tail before it.

        A tail that begins with the path is whole, however short.
        """
        first = stop = limit  # of the tokens kept without a gap
        for begin, end in self._backwards(path, limit):
            if end != first:
                stop = end
            first = begin
            found = stop - stop % self._block_size
            if found > first and max(found - self._tail, 0) >= first:
                return found
        return 0

    def _backwards(self, path: Sequence[Stretch], limit: int) -> Iterator[Interval]:
        for run, begin, end in reversed(path):
            if begin >= limit:
                continue
            last = min(end, limit)
            for first, stop in reversed(self._kept.get(run, ())):
                if first < last:
                    yield first, min(stop, last)

    def keep(self, path: Sequence[Stretch], ends: set[int], interval: int) -> None:
        """Keep the tails before some ends, and one of every `interval` tokens.

        The last of these begins, even if the path does not reach its end.
        """
        for end in ends:
            self._add(path, max(end - self._tail, 0), end)
        if not interval or not path:
            return
        last = path[-1][2]
        if interval <= self._tail:
            self._add(path, 0, last)
            return
        for first in range(interval - self._tail, last, interval):
            self._add(path, first, first + self._tail)

    def _add(self, path: Sequence[Stretch], first: int, stop: int) -> None:
        for run, begin, end in reversed(path):
            if end <= first:
                return
            if begin < stop:
                kept = self._kept.setdefault(run, [])
                _join(kept, max(first, begin), min(stop, end))


def _join(kept: list[Interval], begin: int, end: int) -> None:
    """Add an interval to some that are apart and rising; join those that touch."""
    low = 0
    while low < len(kept) and kept[low][1] < begin:
        low += 1
    high = low
    while high < len(kept) and kept[high][0] <= end:
        begin, end = min(begin, kept[high][0]), max(end, kept[high][1])
        high += 1
    kept[low:high] = [(begin, end)]
