"""Adaptive replacement: chunks used once and chunks used again, with their ghosts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import require
from cache.tiers.places import column_of, in_order_of_tokens
from cache.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.extents import Chunks, Extent, ExtentIndex
    from cache.tiers.places import Ints, Lot

Numbers = OrderedDict[int, int]
"""Chunks by number, and their runs, in order."""


class ARCTierPolicy(TierPolicy):
    """Two lists of chunks, and the keys that were lately evicted from each.

    ::

        T1  stored once                 --evicted-->  B1
        T2  read by a later request     --evicted-->  B2

    A request that has to store what B1 remembers lets T1 grow, what B2 remembers lets
    it shrink. Reading settles at a request's end: until then a chunk stays where it is.

    Parameters
    ----------
    capacity
        Chunks of the tier, and most keys of each list of ghosts.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/policies/arc.py``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once, self._again = Numbers(), Numbers()
        self._once_ghosts, self._again_ghosts = Numbers(), Numbers()
        self._target: float = 0.0

    def sizes(self) -> tuple[int, int, int, int, float]:
        """Return the sizes of T1, T2, B1, B2, and the size that T1 is to have."""
        return (
            len(self._once),
            len(self._again),
            len(self._once_ghosts),
            len(self._again_ghosts),
            self._target,
        )

    def store_missed(self, lots: Sequence[Lot], access: RequestAccess) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        missed = [key for lot in lots for key in lot.numbers()]
        new = [key for key in missed if key not in access.missed]
        access.missed.update(new)
        for key in reversed(new):
            if key in once:
                step = max(1, len(again) / len(once))
                self._target = min(self._target + step, self.capacity)
                once.move_to_end(key)
            elif key in again:
                step = max(1, len(once) / len(again))
                self._target = max(self._target - step, 0)
                again.move_to_end(key)

    def reused(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        # What it has stored itself is no use of what others left.
        keys = _keys_of(chunks)
        access.reused.update(key for key in keys if key not in access.inserted)

    def inserted(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        keys = _keys_of(chunks)
        access.inserted.update(keys)
        for key, run in zip(keys, _runs_of(chunks), strict=True):
            self._once[key] = run
            self._once_ghosts.pop(key, None)
            self._again_ghosts.pop(key, None)

    def finished(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        once, again, reused = self._once, self._again, access.reused
        for key in _last_first(chunks):
            if key in reused:
                if key in once:
                    again[key] = once.pop(key)
                elif key in again:
                    again.move_to_end(key)
            elif key in access.inserted:
                if key in once:
                    once.move_to_end(key)
                elif key in again:
                    again.move_to_end(key)

    def evict(self, num_chunks: int, index: ExtentIndex) -> Ints:
        once, again = _free_ones(self._once, index), _free_ones(self._again, index)
        num_once, least = len(self._once), int(self._target)
        chosen: list[tuple[int, bool]] = []
        gone: list[tuple[int, int]] = []
        for _ in range(num_chunks):
            key = next(once, None) if num_once >= least else None
            is_once = key is not None
            if key is None:
                key = next(again, None)
            if key is None:
                key = next(once)
                is_once = True
            num_once -= is_once
            chosen.append((key, is_once))
        for key, is_once in chosen:
            chunks, ghosts = (
                (self._once, self._once_ghosts)
                if is_once
                else (self._again, self._again_ghosts)
            )
            gone.append((key, chunks.pop(key)))
            ghosts[key] = 0
        for ghosts in (self._once_ghosts, self._again_ghosts):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
        return index.cut_out(gone)

    def check(self, extents: Collection[Extent]) -> None:
        lists = (self._once, self._again, self._once_ghosts, self._again_ghosts)
        listed = [key for each in lists for key in each]
        require(
            len(listed) == len(set(listed)),
            "tier: a chunk stands in two of T1, T2, B1 and B2",
        )
        stored = [key for each in extents for key in each.numbers()]
        require(
            sorted([*self._once, *self._again]) == sorted(stored),
            "tier: T1 and T2 are not the chunks that are stored",
        )
        require(
            0 <= self._target <= self.capacity
            and max(len(self._once_ghosts), len(self._again_ghosts)) <= self.capacity,
            f"tier: a target of {self._target}, {len(self._once_ghosts)} and "
            f"{len(self._again_ghosts)} ghosts, with {self.capacity} chunks",
        )


def _keys_of(chunks: Sequence[Chunks]) -> list[int]:
    return [key for each in chunks for key in each.extent.numbers()]


def _last_first(chunks: Sequence[Chunks]) -> list[int]:
    """Return the chunks of an ended request from its tail on."""
    keys = _keys_of(chunks)
    if len({extent.keys.group for extent, _ in chunks}) < 2:
        return keys[::-1]
    groups = [extent.keys.group for extent, _ in chunks for _ in range(len(extent))]
    ends = [
        np.arange(position + 1, position + 1 + len(extent)) * extent.keys.chunk_tokens
        for extent, position in chunks
    ]
    order = in_order_of_tokens(groups, column_of(ends), is_settled=True)
    return [keys[place] for place in order.tolist()]


def _runs_of(chunks: Sequence[Chunks]) -> list[int]:
    """Return the run of each chunk."""
    runs = []
    for extent, _ in chunks:
        keys = extent.keys
        for run in extent.runs():
            piece = keys.pieces[run]
            first = max(keys.starts[piece], extent.first)
            runs += [run] * (min(keys.starts[piece + 1], extent.stop) - first)
    return runs


def _free_ones(numbers: Numbers, index: ExtentIndex) -> Iterator[int]:
    """Yield those that nothing holds."""
    free: set[int] = set()  # of the extent that was met last
    for key, run in numbers.items():
        if key not in free:
            found = index.find(run, key - run)
            assert found is not None
            extent = found[0]
            if extent.holds:
                continue
            free = {*extent.numbers()}
        yield key
