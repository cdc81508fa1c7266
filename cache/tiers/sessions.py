"""Eviction policies that use what clients know of their sessions.

None is the release's; each changes one rule of its LRU (`cache.tiers.lru`).
"""

from __future__ import annotations

from bisect import insort
from math import inf
from typing import TYPE_CHECKING

from cache.errors import require
from cache.tiers.access import RequestAccess
from cache.tiers.lru import LRUTierPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from collections.abc import Set as AbstractSet

_SHARED = -1
_LAST_RANK = 2**200
"""Behind all others."""
_NANOSECONDS = 10**9
_RANKS_PER_NANOSECOND = 2**64


class _SessionPolicy(LRUTierPolicy):
    """LRU by request that knows which chunks more than one session uses.

    A request without a hint is a session of its own.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._sessions: dict[int, int] = {}

    def _note(self, keys: Iterable[int], access: RequestAccess) -> list[int]:
        """Note the session of each chunk; return those that others use, too."""
        session = access.session
        number = -2 - access.request_id if session is None else session.session_id
        shared: list[int] = []
        for key in keys:
            if self._sessions.setdefault(key, number) != number:
                self._sessions[key] = _SHARED
                shared.append(key)
        return shared

    def accessed(self, keys: Sequence[int], access: RequestAccess) -> None:
        super().accessed(keys, access)
        self._note(keys, access)

    def inserted(self, keys: Sequence[int], access: RequestAccess) -> None:
        super().inserted(keys, access)
        self._note(keys, access)

    def evict(self, num_chunks: int, held: Sequence[AbstractSet[int]]) -> list[int]:
        chosen = super().evict(num_chunks, held)
        for key in chosen:
            del self._sessions[key]
        return chosen

    def _rank_with(self, access: RequestAccess, rank: int, keys: Sequence[int]) -> None:
        """Rank an ended request with the chunks of `keys`, in the order of places."""
        self._unlist(access)
        owners = self._owners
        self._take_over([key for key in keys if owners[key] is not access], access)
        access.ranked, access.is_sorted, access.is_own = list(keys), True, True
        access.rank = rank
        if keys:
            self._lists[rank] = access
            insort(self._ranks, rank)

    def _settle(self, access: RequestAccess, rank: int, shared_rank: int) -> None:
        """Rank the chunks of an ended request: its session's own, and shared ones."""
        owners, sessions = self._owners, self._sessions
        shown = [key for key in access.by_place() if key in owners]
        shared = [k for k in shown if sessions[k] == _SHARED and owners[k] is access]
        self._rank_with(access, rank, [k for k in shown if sessions[k] != _SHARED])
        if shared:
            heir = RequestAccess()
            heir.positions.update((key, access.positions[key]) for key in shared)
            self._rank_with(heir, shared_rank, shared)

    def check(self, keys: Collection[int]) -> None:
        super().check(keys)
        require(
            self._sessions.keys() == set(keys),
            "tier: the chunks of sessions are not those that are stored",
        )


class PinShared(_SessionPolicy):
    """Chunks that several sessions use (system prompts, documents) are evicted last."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._pinned = RequestAccess()
        self._pinned.rank = _LAST_RANK

    def _note(self, keys: Iterable[int], access: RequestAccess) -> list[int]:
        shared = super()._note(keys, access)
        positions, pinned, owners = access.positions, self._pinned, self._owners
        new = [key for key in shared if owners[key] is not pinned]
        if new:
            pinned.positions.update((key, positions.get(key, 0)) for key in new)
            self._take_over(new, pinned)
            super(_SessionPolicy, self).inserted(new, pinned)
            pinned.is_sorted = False
        return shared

    def finished(self, access: RequestAccess) -> None:
        """Rank the request as LRU does, without its pinned chunks."""
        if access.rank:
            owners, pinned = self._owners, self._pinned
            own = [
                key
                for key in access.by_place()
                if key in owners and owners[key] is not pinned
            ]
            self._rank_with(access, self._next_rank(), own)

    def evict(self, num_chunks: int, held: Sequence[AbstractSet[int]]) -> list[int]:
        chosen = super().evict(num_chunks, held)
        for key in chosen:
            self._pinned.positions.pop(key, None)
        return chosen


class SessionEnd(_SessionPolicy):
    """Chunks that only an ended session used are evicted first, tail before head.

    Clients say which request is the last of its session.
    """

    def finished(self, access: RequestAccess) -> None:
        session = access.session
        if session is None or session.returns_s < inf:
            super().finished(access)
        elif access.rank:
            self._settle(access, -self._next_rank(), self._next_rank())


class NextUse(_SessionPolicy):
    """Chunks that are needed latest are evicted first; clients say when they return.

    An ended request ranks by the time at which its session goes on. Chunks of a session
    that has ended, or that says nothing, are evicted first; chunks that several
    sessions use count as needed at once.
    """

    def finished(self, access: RequestAccess) -> None:
        if access.rank:
            session = access.session
            returns_s = inf if session is None else session.returns_s
            rank = self._next_rank() - _LAST_RANK
            if returns_s < inf:
                rank = self._rank_at(access.end_s + returns_s)
            self._settle(access, rank, self._rank_at(access.end_s))

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

    def evict(self, num_chunks: int, held: Sequence[AbstractSet[int]]) -> list[int]:
        owners = self._owners
        living: set[int] = set()
        num_old = 0
        for rank in self._ranks:
            access = self._lists[rank]
            own = {key for key in access.ranked if owners.get(key) is access}
            if not access.is_finished:
                living |= own
            elif access.end_s + self.ttl_s > self.now_s:
                break
            else:
                num_old += len(own.difference(*held))
            if num_old >= num_chunks:
                return super().evict(num_chunks, [*held, living])
        return []
