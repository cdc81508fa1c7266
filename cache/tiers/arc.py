"""Adaptive replacement: chunks used once and chunks used again, with their ghosts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import require
from cache.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from cache.tiers.access import RequestAccess
    from cache.tiers.places import Chunks, Ints

Keys = OrderedDict[int, int]
"""Chunks by key, and their places; -1 for those that are gone."""


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
        self._once, self._again = Keys(), Keys()
        self._once_ghosts, self._again_ghosts = Keys(), Keys()
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

    def store_missed(self, keys: Ints, access: RequestAccess) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        new = [key for key in keys.tolist() if key not in access.missed]
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

    def reused(self, chunks: Chunks, access: RequestAccess) -> None:
        # What it has stored itself is no use of what others left.
        keys = chunks.keys.tolist()
        access.reused.update(key for key in keys if key not in access.inserted)

    def inserted(self, chunks: Chunks, access: RequestAccess) -> None:
        keys = chunks.keys.tolist()
        access.inserted.update(keys)
        for key, place in zip(keys, chunks.ids.tolist(), strict=True):
            self._once[key] = place
            self._once_ghosts.pop(key, None)
            self._again_ghosts.pop(key, None)

    def finished(self, chunks: Chunks, access: RequestAccess) -> None:
        once, again, reused = self._once, self._again, access.reused
        for key in reversed(chunks.keys.tolist()):
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

    def evict(self, num_chunks: int, num_holds: Ints) -> Ints:
        once, again = (
            (key for key, place in chunks.items() if not num_holds[place])
            for chunks in (self._once, self._again)
        )
        num_once, least = len(self._once), int(self._target)
        chosen: list[tuple[int, bool]] = []
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
        ids: list[int] = []
        for key, is_once in chosen:
            chunks, ghosts = (
                (self._once, self._once_ghosts)
                if is_once
                else (self._again, self._again_ghosts)
            )
            ids.append(chunks.pop(key))
            ghosts[key] = -1
        for ghosts in (self._once_ghosts, self._again_ghosts):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
        return np.array(ids, np.int64)

    def check(self, ids: Ints) -> None:
        lists = (self._once, self._again, self._once_ghosts, self._again_ghosts)
        listed = [key for each in lists for key in each]
        require(
            len(listed) == len(set(listed)),
            "tier: a chunk stands in two of T1, T2, B1 and B2",
        )
        require(
            sorted([*self._once.values(), *self._again.values()]) == sorted(ids),
            "tier: T1 and T2 are not the chunks that are stored",
        )
        require(
            0 <= self._target <= self.capacity
            and max(len(self._once_ghosts), len(self._again_ghosts)) <= self.capacity,
            f"tier: a target of {self._target}, {len(self._once_ghosts)} and "
            f"{len(self._again_ghosts)} ghosts, with {self.capacity} chunks",
        )
