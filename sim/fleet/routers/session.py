"""A router that keeps a conversation on one engine."""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Final

from sim.fleet.routers.counting import CountingRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from sim.scheduler.request import Request

NUM_POINTS: Final = 160
"""Of each engine on the ring, so that engines get like shares."""


class Session(CountingRouter):
    """The engine that a session's key falls to on a ring (consistent hashing).

    With an engine more, only the sessions that it takes over move; those of one that is
    not ready go to the next ones on the ring. A request without a
    session goes to the engine with the fewest in flight.

    Parameters
    ----------
    num_engines
        Places to choose from.
    session_of
        Returns the key of a request's session, or None.
    """

    def __init__(
        self, num_engines: int, session_of: Callable[[Request], Hashable | None]
    ) -> None:
        super().__init__(num_engines)
        self._session_of = session_of
        points = sorted(
            (_point(f"engine {place}, point {number}"), place)
            for place in range(num_engines)
            for number in range(NUM_POINTS)
        )
        self._points = [point for point, _ in points]
        self._owners = [place for _, place in points]

    def _pick(self, request: Request) -> int:
        session = self._session_of(request)
        if session is None:
            return self._least_loaded(self.places)
        index = bisect_right(self._points, _point(f"session {session}"))
        owners = chain(self._owners[index:], self._owners)
        return next(place for place in owners if place in self.places)


def _point(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
