"""Least recently used, by request: the tail of a prompt goes before its head."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from cache.errors import require
from cache.tiers.places import column_of
from cache.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from cache.tiers.access import RequestAccess
    from cache.tiers.extents import Chunks, Extent, ExtentIndex, Owner
    from cache.tiers.places import Ints

_position = attrgetter("position")


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
    A request lists its chunks; those that belong to others by now, or were evicted,
    are passed over.
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/policies/lru.py``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._num_contacts = 0
        # Requests that list extents, by rank; the ranks ascend.
        self._lists: dict[int, RequestAccess] = {}
        self._ranks: list[int] = []

    def _next_rank(self) -> int:
        self._num_contacts += 1
        return self._num_contacts

    def accessed(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        rank = access.rank = access.rank or self._next_rank()
        earlier = [each for each in chunks if _owner(each.extent).rank < rank]
        self._take_over(earlier, access)

    def inserted(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        self._take_over(chunks, access)

    def _take_over(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        """Rank chunks with a request, which has a rank."""
        if chunks and not access.ranked:
            self._enlist(access)
        for each in chunks:
            each.extent.owner, each.extent.position = access, each.position
            access.list(each)

    def _enlist(self, access: RequestAccess) -> None:
        self._lists[access.rank] = access
        insort(self._ranks, access.rank)

    def _unlist(self, access: RequestAccess) -> None:
        if self._lists.pop(access.rank, None) is not None:
            del self._ranks[bisect_left(self._ranks, access.rank)]

    def settles(self, access: RequestAccess) -> bool:
        there = [each for each in access.ranked if each.extent.owner is not None]
        if sum([len(each.extent) for each in there]) < access.num_shown:
            return False  # some are gone, or cut
        if not access.is_sorted:
            there.sort(key=_position)
        if access.rank:
            self._move(there, access, self._next_rank())
        return True

    def finished(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        if access.rank:
            self._move(chunks, access, self._next_rank())

    def _move(self, chunks: Sequence[Chunks], access: RequestAccess, rank: int) -> None:
        """Rank a request anew, with these chunks, which stand by position."""
        self._unlist(access)
        access.rank, access.ranked, access.is_sorted = rank, [], True
        self._take_over(chunks, access)

    def evict(self, num_chunks: int, index: ExtentIndex) -> Ints:
        ranked = map(self._lists.__getitem__, self._ranks)
        return self._evict_of(ranked, num_chunks, index)

    def _evict_of(
        self, ranked: Iterable[RequestAccess], num_chunks: int, index: ExtentIndex
    ) -> Ints:
        """Give up chunks of these requests, which stand by rank, and have as many."""
        chosen: list[Extent] = []
        emptied: list[RequestAccess] = []
        for access in ranked:
            num_chunks -= self._take(chosen, num_chunks, access, index)
            if not access.ranked:
                emptied.append(access)
            if not num_chunks:
                break
        for access in emptied:
            del self._lists[access.rank]
        if emptied:
            last = bisect_left(self._ranks, emptied[-1].rank) + 1
            ranks = self._ranks[:last]
            self._ranks[:last] = [rank for rank in ranks if rank in self._lists]
        return column_of([extent.ids[::-1] for extent in chosen])

    def _take(
        self,
        chosen: list[Extent],
        num_chunks: int,
        access: RequestAccess,
        index: ExtentIndex,
    ) -> int:
        """Choose from the end of a request's list; those that are held stay in it.

        Returns
        -------
        int
            How many.
        """
        ranked = access.ranked
        if not access.is_sorted:
            ranked.sort(key=_position)
            access.is_sorted = True
        kept: list[Chunks] = []
        num_missing = num_chunks
        while ranked and num_missing:
            chunks = ranked.pop()
            extent = chunks.extent
            if extent.owner is not access:
                continue  # another request ranks it by now, or it is gone
            if extent.holds:
                kept.append(chunks)
                continue
            gone = index.take_out(extent, extent.stop - num_missing)
            if gone is extent:
                extent.owner = None
            else:
                ranked.append(chunks)
            chosen.append(gone)
            num_missing -= len(gone)
        ranked += reversed(kept)
        return num_chunks - num_missing

    def check(self, extents: Collection[Extent]) -> None:
        require(
            self._ranks == sorted(self._lists)
            and all(each.rank == rank for rank, each in self._lists.items()),
            "tier: requests do not stand in their order",
        )
        ranked = {
            each.extent
            for access in self._lists.values()
            for each in access.ranked
            if each.extent.owner is access
        }
        require(
            ranked == set(extents),
            "tier: a chunk is not listed by the request that it belongs to",
        )


def _owner(extent: Extent) -> Owner:
    assert extent.owner is not None
    return extent.owner
