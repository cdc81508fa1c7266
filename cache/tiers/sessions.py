"""Eviction policies that use what clients know of their sessions.

None is the release's; each changes one rule of its LRU (`cache.tiers.lru`).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cache.tiers.access import RequestAccess
from cache.tiers.lru import LRUTierPolicy
from cache.tiers.places import NO_INTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.tiers.extents import Chunks, ExtentIndex
    from cache.tiers.places import Ints

_SHARED = -1
_LAST_RANK = 2**200
"""Behind all others."""
_NANOSECONDS = 10**9
_RANKS_PER_NANOSECOND = 2**64


class _SessionPolicy(LRUTierPolicy):
    """LRU by request that knows which chunks more than one session uses.

    A request without a hint is a session of its own.
    """

    def _session(self, access: RequestAccess) -> int:
        session = access.session
        return -2 - access.request_id if session is None else session.session_id

    def settles(self, access: RequestAccess) -> bool:
        del access
        return False  # it depends on the chunks where they go

    def accessed(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        super().accessed(chunks, access)
        session = self._session(access)
        shared = [each for each in chunks if each.extent.session != session]
        self._share(shared, access)

    def _share(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        """Note chunks of a request that another session uses, too."""
        del access
        for extent, _ in chunks:
            extent.session = _SHARED

    def inserted(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        super().inserted(chunks, access)
        for extent, _ in chunks:
            extent.session = self._session(access)

    def _settle(
        self,
        chunks: Sequence[Chunks],
        access: RequestAccess,
        rank: int,
        shared_rank: int,
    ) -> None:
        """Rank the chunks of an ended request: its session's own, and shared ones."""
        shared = [each for each in chunks if each.extent.session == _SHARED]
        own = [each for each in chunks if each.extent.session != _SHARED]
        ranked = [each for each in shared if each.extent.owner is access]
        if ranked:
            self._move(ranked, RequestAccess(), shared_rank)
        self._move(own, access, rank)


class PinShared(_SessionPolicy):
    """Chunks that several sessions use (system prompts, documents) are evicted last."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._pinned = RequestAccess()
        self._pinned.rank = _LAST_RANK

    def _share(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        super()._share(chunks, access)
        pinned = self._pinned
        new = [each for each in chunks if each.extent.owner is not pinned]
        self._take_over(new, pinned)

    def finished(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        """Rank the request as LRU does, without its pinned chunks."""
        own = [each for each in chunks if each.extent.owner is not self._pinned]
        super().finished(own, access)


class SessionEnd(_SessionPolicy):
    """Chunks that only an ended session used are evicted first, tail before head.

    Clients say which request is the last of its session.
    """

    def finished(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        session = access.session
        if session is None or session.returns_s < inf:
            super().finished(chunks, access)
        elif access.rank:
            self._settle(chunks, access, -self._next_rank(), self._next_rank())


class NextUse(_SessionPolicy):
    """Chunks that are needed latest are evicted first; clients say when they return.

    An ended request ranks by the time at which its session goes on. Chunks of a session
    that has ended, or that says nothing, are evicted first; chunks that several
    sessions use count as needed at once.
    """

    def finished(self, chunks: Sequence[Chunks], access: RequestAccess) -> None:
        if access.rank:
            session = access.session
            returns_s = inf if session is None else session.returns_s
            rank = self._next_rank() - _LAST_RANK
            if returns_s < inf:
                rank = self._rank_at(access.end_s + returns_s)
            self._settle(chunks, access, rank, self._rank_at(access.end_s))

    def _rank_at(self, wanted_s: float) -> int:
        """Return a rank before those of chunks that are needed sooner."""
        wanted_ns = round(wanted_s * _NANOSECONDS)
        return self._next_rank() - (wanted_ns + 1) * _RANKS_PER_NANOSECOND


class KeepTTL(LRUTierPolicy):
    """Chunks stay `ttl_s` after their use; a store that finds no room then is refused.

    So a working set that is larger than the tier is kept in part, where LRU evicts each
    chunk just before it is needed again.
    """

    ttl_s = 300.0

    def evict(self, num_chunks: int, index: ExtentIndex) -> Ints:
        old: list[RequestAccess] = []
        num_old = 0
        for rank in self._ranks:
            access = self._lists[rank]
            if not access.is_finished:
                continue
            if access.end_s + self.ttl_s > self.now_s:
                break
            old.append(access)
            free = {each.extent for each in access.ranked if not each.extent.holds}
            num_old += sum(len(each) for each in free if each.owner is access)
            if num_old >= num_chunks:
                return self._evict_of(old, num_chunks, index)
        return NO_INTS
