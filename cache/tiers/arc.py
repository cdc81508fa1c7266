"""Adaptive replacement: chunks used once and chunks used again, with their ghosts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from cache.errors import require
from cache.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from cache.tiers.access import RequestAccess

Keys = OrderedDict[int, None]


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
        self._lists = self._once, self._again
        self._evictable: set[int] = set()
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

    def store_missed(self, keys: Sequence[int]) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        for key in reversed(keys):
            if key in once:
                step = max(1, len(again) / len(once))
                self._target = min(self._target + step, self.capacity)
                once.move_to_end(key)
            elif key in again:
                step = max(1, len(once) / len(again))
                self._target = max(self._target - step, 0)
                again.move_to_end(key)

    def inserted(self, key: int, access: RequestAccess) -> None:
        del access
        self._once[key] = None
        self._once_ghosts.pop(key, None)
        self._again_ghosts.pop(key, None)

    def mark_evictable(self, key: int) -> None:
        self._evictable.add(key)

    def pin(self, key: int) -> None:
        self._evictable.remove(key)

    def finished(self, access: RequestAccess) -> None:
        once, again, reused = self._once, self._again, access.reused
        for key in access.from_tail():
            if key in reused:
                if key in once:
                    del once[key]
                    again[key] = None
                elif key in again:
                    again.move_to_end(key)
            elif key in access.inserted:
                if key in once:
                    once.move_to_end(key)
                elif key in again:
                    again.move_to_end(key)

    def evict(self, num_chunks: int, protected: AbstractSet[int]) -> list[int] | None:
        once, again = (self._free_of(keys, protected) for keys in self._lists)
        num_once, least = len(self._once), int(self._target)
        chosen: list[tuple[int, bool]] = []
        for _ in range(num_chunks):
            key = next(once, None) if num_once >= least else None
            is_once = key is not None
            if key is None:
                key = next(again, None)
            if key is None:
                key = next(once, None)
                is_once = True
            if key is None:
                return None
            num_once -= is_once
            chosen.append((key, is_once))
        for key, is_once in chosen:
            self._evictable.remove(key)
            if is_once:
                del self._once[key]
                self._once_ghosts[key] = None
            else:
                del self._again[key]
                self._again_ghosts[key] = None
        for ghosts in (self._once_ghosts, self._again_ghosts):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
        return [key for key, _ in chosen]

    def _free_of(
        self, keys: Iterable[int], protected: AbstractSet[int]
    ) -> Iterator[int]:
        """Yield those that may go, from the old end."""
        return (k for k in keys if k in self._evictable and k not in protected)

    def check(self, evictable: Mapping[int, bool]) -> None:
        lists = (self._once, self._again, self._once_ghosts, self._again_ghosts)
        keys = [key for each in lists for key in each]
        require(
            len(keys) == len(set(keys)),
            "tier: a chunk stands in two of T1, T2, B1 and B2",
        )
        require(
            self._once.keys() | self._again.keys() == evictable.keys(),
            "tier: T1 and T2 are not the chunks that are stored",
        )
        require(
            self._evictable == {key for key, may_go in evictable.items() if may_go},
            "tier: the evictable chunks are not those that nothing reads or writes",
        )
        require(
            0 <= self._target <= self.capacity
            and max(len(self._once_ghosts), len(self._again_ghosts)) <= self.capacity,
            f"tier: a target of {self._target}, {len(self._once_ghosts)} and "
            f"{len(self._again_ghosts)} ghosts, with {self.capacity} chunks",
        )
