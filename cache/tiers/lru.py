"""Least recently used, by request: the tail of a prompt goes before its head."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from cache.errors import require
from cache.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from collections.abc import Set as AbstractSet

    from cache.tiers.access import RequestAccess


class LRUTierPolicy(TierPolicy):
    """Evicts by the time of a request's first contact while it lives, then of its end.

    A chunk belongs to the request that ranks it. Requests stand in the order of their
    first contact, one that ends goes to the back, and takes with it all chunks that it
    has shown; of a request the tail goes first. So a chunk that is stored late stands
    no further back than the first one of its request.

    ::

        evict <- | ended 3: c b a | ended 1: f e | living 4: h g | <- first contact

    Parameters
    ----------
    capacity
        Chunks of the tier.

    Notes
    -----
    A request lists its chunks by place; entries that belong to others by now, or were
    evicted, are passed over. O(1) a chunk.
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/policies/lru.py``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._owners: dict[int, RequestAccess] = {}
        self._num_contacts = 0
        # Requests that list chunks, by rank, and their ranks, ascending.
        self._lists: dict[int, RequestAccess] = {}
        self._ranks: list[int] = []

    def _next_rank(self) -> int:
        self._num_contacts += 1
        return self._num_contacts

    def accessed(self, keys: Sequence[int], access: RequestAccess) -> None:
        rank = access.rank = access.rank or self._next_rank()
        owners = self._owners
        here = [key for key in keys if owners[key].rank < rank]
        self._take_over(here, access)
        self.inserted(here, access)

    def _take_over(self, keys: Sequence[int], access: RequestAccess) -> None:
        """Rank chunks with a request that were ranked with others."""
        owners = self._owners
        for owner in {owners[key] for key in keys}:
            owner.is_own = False
        owners.update(dict.fromkeys(keys, access))

    def inserted(self, keys: Sequence[int], access: RequestAccess) -> None:
        if not keys:
            return
        self._owners.update(dict.fromkeys(keys, access))
        ranked, positions = access.ranked, access.positions
        if ranked:
            access.is_sorted &= positions[ranked[-1]] < positions[keys[0]]
        elif access.rank not in self._lists:
            self._lists[access.rank] = access
            insort(self._ranks, access.rank)
        ranked += keys

    def finished(self, access: RequestAccess) -> None:
        if not access.rank:
            return
        self._unlist(access)
        if len(access.ranked) < len(access.positions) or not access.is_own:
            owners, keys = self._owners, access.by_place()
            keys = [key for key in keys if key in owners]
            self._take_over([k for k in keys if owners[k] is not access], access)
            access.ranked, access.is_sorted, access.is_own = keys, True, True
        access.rank = self._next_rank()
        if access.ranked:
            self._lists[access.rank] = access
            self._ranks.append(access.rank)

    def _unlist(self, access: RequestAccess) -> None:
        if self._lists.pop(access.rank, None) is not None:
            del self._ranks[bisect_left(self._ranks, access.rank)]

    def evict(self, num_chunks: int, held: Sequence[AbstractSet[int]]) -> list[int]:
        chosen: list[int] = []
        emptied: list[int] = []
        for rank in self._ranks:
            access = self._lists[rank]
            self._take(chosen, num_chunks, access, held)
            if not access.ranked:
                emptied.append(rank)
            if len(chosen) == num_chunks:
                break
        for rank in emptied:
            del self._lists[rank]
        if emptied:
            last = bisect_left(self._ranks, emptied[-1]) + 1
            ranks = self._ranks[:last]
            self._ranks[:last] = [rank for rank in ranks if rank in self._lists]
        return chosen

    def _take(
        self,
        chosen: list[int],
        num_chunks: int,
        access: RequestAccess,
        held: Sequence[AbstractSet[int]],
    ) -> None:
        """Choose from the end of a request's list; those that are held stay in it."""
        owners, keys = self._owners, access.ranked
        if not access.is_sorted:
            own = {key for key in keys if owners.get(key) is access}
            keys = access.ranked = sorted(own, key=access.positions.__getitem__)
            access.is_sorted = True
        kept: list[int] = []
        while keys and len(chosen) < num_chunks:
            first = max(len(keys) - num_chunks + len(chosen), 0)
            lot = keys[: first - 1 if first else None : -1]
            if not access.is_own:
                lot = [key for key in lot if owners.get(key) is access]
            del keys[first:]
            for those in held:
                if not those.isdisjoint(lot):
                    kept += [key for key in lot if key in those]
                    lot = [key for key in lot if key not in those]
            for key in lot:
                del owners[key]
            chosen += lot
        kept.sort(key=access.positions.__getitem__)
        keys += kept

    def check(self, keys: Collection[int]) -> None:
        require(
            self._owners.keys() == set(keys),
            "tier: the ranked chunks are not those that are stored",
        )
        require(
            self._ranks == sorted(self._lists)
            and all(each.rank == rank for rank, each in self._lists.items()),
            "tier: requests do not stand in their order",
        )
        listed = {access: set(access.ranked) for access in self._lists.values()}
        for key, access in self._owners.items():
            require(
                key in listed.get(access, ()),
                "tier: chunk {} is not listed by the request that it belongs to",
                key,
            )
