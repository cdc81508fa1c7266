"""Least recently used, by request: the tail of a prompt goes before its head."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import require
from cache.tiers.places import column_of, in_order_of_tokens
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
        access.rank_anew(rank)
        self._take_over(chunks, access)

    def evict(self, num_chunks: int, index: ExtentIndex) -> Ints:
        ranked = map(self._lists.__getitem__, self._ranks)
        return self._evict_of(ranked, num_chunks, index)

    def _evict_of(
        self, ranked: Iterable[RequestAccess], num_chunks: int, index: ExtentIndex
    ) -> Ints:
        """Give up chunks of these requests, which stand by rank, and have as many."""
        chosen: list[Ints] = []
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
        return column_of(chosen)

    def _take(
        self,
        chosen: list[Ints],
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
        if len(access.groups) > 1:
            return self._take_of_groups(chosen, num_chunks, access, index)
        ranked = access.ranked
        if not access.is_sorted:
            ranked.sort(key=_position)
            access.is_sorted = True
        return self._take_last(chosen, num_chunks, ranked, access, index)

    def _take_of_groups(
        self,
        chosen: list[Ints],
        num_chunks: int,
        access: RequestAccess,
        index: ExtentIndex,
    ) -> int:
        """Do as `_take`, with the groups' chunks in the order of their tokens."""
        by_group: dict[int, list[Chunks]] = {}
        for chunks in access.ranked:
            if chunks.extent.owner is access:
                by_group.setdefault(chunks.extent.keys.group, []).append(chunks)
        ends: list[Ints] = []
        groups: list[int] = []
        for group, own in by_group.items():
            own.sort(key=_position)
            last = _last_ends(own, num_chunks)
            ends += last
            groups += [group] * sum(map(len, last))
        order = in_order_of_tokens(
            groups, column_of(ends), is_settled=access.is_settled
        )[:num_chunks]
        taken = np.asarray(groups)[order]
        ids = np.empty(len(order), np.int64)
        for group, own in by_group.items():
            places = np.flatnonzero(taken == group)
            if len(places):
                of_group: list[Ints] = []
                self._take_last(of_group, len(places), own, access, index)
                ids[places] = column_of(of_group)
        access.ranked = [chunks for own in by_group.values() for chunks in own]
        access.groups = {group for group, own in by_group.items() if own}
        access.is_sorted = False
        chosen.append(ids)
        return len(ids)

    @staticmethod
    def _take_last(
        chosen: list[Ints],
        num_chunks: int,
        ranked: list[Chunks],
        access: RequestAccess,
        index: ExtentIndex,
    ) -> int:
        """Choose the last ones of a list that stands by position."""
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
            chosen.append(gone.ids[::-1])
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


def _last_ends(ranked: Sequence[Chunks], num_chunks: int) -> list[Ints]:
    """Return the tokens that the last free chunks end before, the last chunk first."""
    ends: list[Ints] = []
    for extent, position in reversed(ranked):
        if not num_chunks:
            break
        if not extent.holds:
            stop = position + len(extent)
            number = min(len(extent), num_chunks)
            ends.append(np.arange(stop, stop - number, -1) * extent.keys.chunk_tokens)
            num_chunks -= number
    return ends


def _owner(extent: Extent) -> Owner:
    assert extent.owner is not None
    return extent.owner
