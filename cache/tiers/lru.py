"""Least recently used, by request: the tail of a prompt goes before its head."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from cache.errors import require
from cache.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from cache.tiers.access import RequestAccess

Rank = tuple[int, int]
"""Count of contacts, and negative place in the request; the smallest goes first."""

_FEWEST_ENTRIES = 64  # of the heap; fewer are never sorted out


class LRUTierPolicy(TierPolicy):
    """Evicts by the time of a request's first contact while it lives, then of its end.

    All that a request stores or finds has one number while it lives, and is ordered by
    its place: so a chunk that is stored late stands no further back than the first one.
    At its end every chunk that it has shown gets a number of its own, tail first.

    Parameters
    ----------
    capacity
        Chunks of the tier.

    Notes
    -----
    Evictable chunks stand in a heap; entries whose chunk has another rank by now, or is
    not evictable, are passed over and now and then sorted out. O(log n) each.
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/policies/lru.py``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ranks: dict[int, Rank] = {}
        self._evictable: set[int] = set()
        self._heap: list[tuple[Rank, int]] = []
        self._num_contacts = 0

    def _rank_of(self, access: RequestAccess) -> int:
        if not access.rank:
            self._num_contacts += 1
            access.rank = self._num_contacts
        return access.rank

    def accessed(self, keys: Iterable[int], access: RequestAccess) -> None:
        rank, ranks, positions = self._rank_of(access), self._ranks, access.positions
        for key in keys:
            here = (rank, -positions[key])
            if key in ranks and ranks[key] < here:
                self._set(key, here)

    def inserted(self, key: int, access: RequestAccess) -> None:
        self._ranks[key] = (self._rank_of(access), -access.positions[key])

    def mark_evictable(self, key: int) -> None:
        self._evictable.add(key)
        self._push(key)

    def pin(self, key: int) -> None:
        self._evictable.remove(key)

    def finished(self, access: RequestAccess) -> None:
        for key in access.from_tail():
            if key in self._ranks:
                self._num_contacts += 1
                self._set(key, (self._num_contacts, 0))

    def _set(self, key: int, rank: Rank) -> None:
        self._ranks[key] = rank
        if key in self._evictable:
            self._push(key)

    def _push(self, key: int) -> None:
        heappush(self._heap, (self._ranks[key], key))
        if len(self._heap) > max(_FEWEST_ENTRIES, 2 * len(self._evictable)):
            self._heap = [(self._ranks[key], key) for key in self._evictable]
            heapify(self._heap)

    def evict(self, num_chunks: int, protected: AbstractSet[int]) -> list[int] | None:
        heap, ranks, evictable = self._heap, self._ranks, self._evictable
        chosen: dict[int, Rank] = {}
        kept: list[tuple[Rank, int]] = []
        while heap and len(chosen) < num_chunks:
            entry = heappop(heap)
            rank, key = entry
            if key not in evictable or ranks[key] != rank or key in chosen:
                continue
            if key in protected:
                kept.append(entry)
            else:
                chosen[key] = rank
        is_short = len(chosen) < num_chunks
        if is_short:
            kept += [(rank, key) for key, rank in chosen.items()]
        for entry in kept:
            heappush(heap, entry)
        if is_short:
            return None
        for key in chosen:
            evictable.remove(key)
            del ranks[key]
        return list(chosen)

    def check(self, evictable: Mapping[int, bool]) -> None:
        require(
            self._ranks.keys() == evictable.keys(),
            "tier: the ranked chunks are not those that are stored",
        )
        require(
            self._evictable == {key for key, may_go in evictable.items() if may_go},
            "tier: the evictable chunks are not those that nothing reads or writes",
        )
        entries = set(self._heap)
        for key in self._evictable:
            require(
                (self._ranks[key], key) in entries,
                "tier: evictable chunk {} does not stand in the heap at its rank",
                key,
            )
