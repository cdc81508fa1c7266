"""Least recently used, by request: the tail of a prompt goes before its head."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import require
from cache.tiers.places import NO_INTS, Chunks, is_all, is_any, longer
from cache.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cache.tiers.access import RequestAccess
    from cache.tiers.places import Ints, Mask

_POSITION_BITS = 32
_POSITION_MASK = 2**_POSITION_BITS - 1


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
    A request lists its chunks by position, in columns; entries that belong to others by
    now, or were evicted, are passed over. A few operations a lot, whatever its size.
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/policies/lru.py``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # By place: number of the request that ranks the chunk, and below it the chunk's
        # position in the request; 0 for none.
        self._entries = NO_INTS
        self._num_requests = self._num_contacts = 0
        # Requests that list chunks by number, and by rank; the ranks ascend.
        self._requests: dict[int, RequestAccess] = {}
        self._lists: dict[int, RequestAccess] = {}
        self._ranks: list[int] = []

    def _next_rank(self) -> int:
        self._num_contacts += 1
        return self._num_contacts

    def accessed(self, chunks: Chunks, access: RequestAccess) -> None:
        rank = access.rank = access.rank or self._next_rank()
        if not len(chunks.ids):
            return
        owners = self._owners(chunks.ids)
        starts = (owners[1:] != owners[:-1]).nonzero()[0] + 1
        numbers = {int(owners[0]), *owners[starts].tolist()}
        earlier = [each for each in numbers if self._requests[each].rank < rank]
        access.is_whole &= len(earlier) == len(numbers)
        if earlier:
            if len(earlier) < len(numbers):
                chunks = chunks.where(np.isin(owners, earlier))
            self._take_over(earlier, chunks, access)
            self._rank(chunks, access)
            self._list(chunks, access)

    def reach(self, num_places: int) -> None:
        self._entries = longer(self._entries, num_places)

    def _owners(self, ids: Ints) -> Ints:
        """Return the number of the request that ranks each chunk."""
        return self._entries[ids] >> _POSITION_BITS

    def inserted(self, chunks: Chunks, access: RequestAccess) -> None:
        self._rank(chunks, access)
        self._list(chunks, access)

    def _take_over(
        self, numbers: Collection[int], chunks: Chunks, access: RequestAccess
    ) -> None:
        """Note chunks that are ranked with a request, and were with other ones."""
        positions = self._entries[chunks.ids] & _POSITION_MASK
        own_from = max(positions.tolist()) + 1  # of each of them, or before that
        for number in numbers:
            if number == access.number:
                continue
            loser = self._requests[number]
            loser.own_from = max(loser.own_from, own_from)
            if len(numbers) > 1 or loser.is_finished:
                loser.is_whole = False
            elif loser.is_whole:
                loser.lost.append((chunks.ids, positions))

    def _rank(self, chunks: Chunks, access: RequestAccess) -> None:
        access.number = access.number or self._next_number()
        first = access.number << _POSITION_BITS
        self._entries[chunks.ids] = chunks.positions + first

    def _next_number(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def _list(self, chunks: Chunks, access: RequestAccess) -> None:
        """List chunks with the request that ranks them."""
        ranked, positions = access.ranked, chunks.positions
        if ranked:
            access.is_sorted &= bool(ranked[-1][1][-1] < positions[0])
        else:
            self._enlist(access)
        ranked.append((chunks.ids, positions))

    def _enlist(self, access: RequestAccess) -> None:
        self._lists[access.rank] = self._requests[access.number] = access
        insort(self._ranks, access.rank)

    def _unlist(self, access: RequestAccess) -> None:
        if self._lists.pop(access.rank, None) is not None:
            del self._requests[access.number]
            del self._ranks[bisect_left(self._ranks, access.rank)]

    def settles(self, access: RequestAccess, places: Ints) -> bool:
        if not (access.is_whole and access.is_sorted):
            return False
        for ids, positions in access.lost:
            if is_any(places[access.cells[positions]] != ids):
                return False
        for ids, positions in access.lost:
            chunks = Chunks(access.keys[positions], ids, positions)
            self._take_over(set(self._owners(ids).tolist()), chunks, access)
            self._rank(chunks, access)
        access.lost, access.own_from = [], 0
        if access.rank:
            self._unlist(access)
            access.rank = self._next_rank()
            if access.ranked:
                self._enlist(access)
        return True

    def finished(self, chunks: Chunks, access: RequestAccess) -> None:
        if access.rank:
            self._move(chunks, access, self._next_rank())

    def _move(self, chunks: Chunks, access: RequestAccess, rank: int) -> None:
        """Rank a request anew, with these chunks, which stand by position."""
        self._unlist(access)
        access.rank, access.ranked = rank, []
        access.is_sorted, access.own_from = True, 0
        if len(chunks.ids):
            owners = self._owners(chunks.ids)
            is_others = owners != access.number
            if is_any(is_others):
                lost = chunks.where(is_others)
                self._take_over(set(owners[is_others].tolist()), lost, access)
                self._rank(lost, access)
            self._list(chunks, access)

    def evict(self, num_chunks: int, num_holds: Ints) -> Ints:
        ranked = map(self._lists.__getitem__, self._ranks)
        return self._evict_of(ranked, num_chunks, num_holds)

    def _evict_of(
        self, ranked: Iterable[RequestAccess], num_chunks: int, num_holds: Ints
    ) -> Ints:
        """Give up chunks of these requests, which stand by rank, and have as many."""
        chosen: list[Ints] = []
        emptied: list[RequestAccess] = []
        for access in ranked:
            num_chunks -= self._take(chosen, num_chunks, access, num_holds)
            if not access.ranked:
                emptied.append(access)
            if not num_chunks:
                break
        for access in emptied:
            del self._lists[access.rank], self._requests[access.number]
        if emptied:
            last = bisect_left(self._ranks, emptied[-1].rank) + 1
            ranks = self._ranks[:last]
            self._ranks[:last] = [rank for rank in ranks if rank in self._lists]
        return chosen[0] if len(chosen) == 1 else np.concatenate(chosen)

    def _take(
        self,
        chosen: list[Ints],
        num_chunks: int,
        access: RequestAccess,
        num_holds: Ints,
    ) -> int:
        """Choose from the end of a request's list; those that are held stay in it.

        Returns
        -------
        int
            How many.
        """
        access.is_whole = False
        if not access.is_sorted:
            self._own(access)
        kept: list[tuple[Ints, Ints]] = []
        lots = access.ranked
        num_missing = num_chunks
        while lots and num_missing:
            ids, positions = lots.pop()
            if len(ids) and positions[0] < access.own_from:
                is_ranked = self._is_ranked(ids, positions, access)
                ids, positions = ids[is_ranked], positions[is_ranked]
            first = max(len(ids) - num_missing, 0)
            if first:
                lots.append((ids[:first], positions[:first]))
                ids, positions = ids[first:], positions[first:]
            is_free = num_holds[ids] == 0
            if not is_all(is_free):
                kept.append((ids[~is_free], positions[~is_free]))
                ids = ids[is_free]
            self._entries[ids] = 0
            chosen.append(ids[::-1])
            num_missing -= len(ids)
        lots += reversed(kept)
        return num_chunks - num_missing

    def _own(self, access: RequestAccess) -> tuple[Ints, Ints]:
        """Return places and positions of what a request ranks, by position."""
        ranked = access.ranked
        if len(ranked) == 1 and not access.own_from and access.is_sorted:
            return ranked[0]
        if len(ranked) > 1:
            ids = np.concatenate([lot for lot, _ in ranked])
            ranked = [(ids, np.concatenate([places for _, places in ranked]))]
        ids, positions = ranked[0]
        if access.own_from:
            is_ranked = self._is_ranked(ids, positions, access)
            ids, positions = ids[is_ranked], positions[is_ranked]
        if not access.is_sorted:
            order = np.argsort(positions, kind="stable")
            ids, positions = ids[order], positions[order]
            # what it lost and stored again, at the same place, stands there twice
            is_first = np.ones(len(ids), np.bool_)
            is_first[1:] = (ids[1:] != ids[:-1]) | (positions[1:] != positions[:-1])
            ids, positions = ids[is_first], positions[is_first]
        access.is_sorted, access.own_from = True, 0
        access.ranked = [(ids, positions)]
        return ids, positions

    def _is_ranked(self, ids: Ints, positions: Ints, access: RequestAccess) -> Mask:
        """Say which entries of a request's list are its own by now."""
        entries = positions + (access.number << _POSITION_BITS)
        is_ranked: Mask = self._entries[ids] == entries
        return is_ranked

    def check(self, ids: Ints) -> None:
        require(
            np.array_equal(self._entries.nonzero()[0], np.sort(ids)),
            "tier: the ranked chunks are not those that are stored",
        )
        require(
            self._ranks == sorted(self._lists)
            and all(each.rank == rank for rank, each in self._lists.items()),
            "tier: requests do not stand in their order",
        )
        require(
            self._requests == {each.number: each for each in self._lists.values()},
            "tier: requests are not known by their numbers",
        )
        listed: list[Ints] = [NO_INTS]
        for access in self._lists.values():
            for lot, positions in access.ranked:
                is_ranked = self._is_ranked(lot, positions, access)
                require(
                    is_all(is_ranked | (positions < access.own_from)),
                    "tier: request {} lists what it does not rank",
                    access.request_id,
                )
                listed.append(lot[is_ranked])
        require(
            np.array_equal(np.unique(np.concatenate(listed)), np.sort(ids)),
            "tier: a chunk is not listed by the request that it belongs to",
        )
