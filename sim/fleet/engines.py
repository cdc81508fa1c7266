"""Several engines on one clock, and what stands before them."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import simpy

    from sim.engine.loop import Engine
    from sim.fleet.scrapes import Scrapes
    from sim.scheduler.request import Request
    from workloads.spec import RequestSpec

    OnEnd = Callable[[Request], object]
    Coming = TypeVar("Coming", RequestSpec, Request)


class Router(Protocol):
    """Chooses the engine of each request."""

    def choose(self, request: Request) -> int:
        """Return the place of the engine that a request goes to."""
        ...

    def ended(self, request: Request, place: int) -> None:
        """Take note of the end of a request, whatever that was."""
        ...


class Engines:
    """Engines that serve one workload: each request goes where the router says.

    ::

        client --> router --> engine 0, 1, ... each with a scheduler and a recorder

    It is to clients and to a run what an `Engine` is.

    Parameters
    ----------
    env
        The clock of all.
    engines
        Alike in what they serve.
    router
        Where requests go.

    Attributes
    ----------
    done
        Happens when all of them are done.
    next_arrival_s
        When the next request comes, if `announced` tells.
    next_change_s
        When engines change next, or hand requests on; -inf while that may be any time.
    scrapes
        Tell routers of loads, if they ask for them.
    ended
        By place, engines that others have taken the place of, in order.
    """

    def __init__(
        self, env: simpy.Environment, engines: Sequence[Engine], router: Router
    ) -> None:
        self.env = env
        self.engines = engines
        self.router = router
        self.next_arrival_s = 0.0
        self.next_change_s = inf
        self.scrapes: list[Scrapes] = []
        self.ended: dict[int, list[Engine]] = {}
        self._stop_requested = False
        self._places: dict[int, int] = {}  # of unfinished requests
        self.done: simpy.Event = self._all_done()

    def _all_done(self) -> simpy.Event:
        return self.env.all_of([engine.done for engine in self.engines])

    def submit(self, request: Request) -> None:
        """Hand over a request that arrives now."""
        place = self.router.choose(request)
        self._places[request.request_id] = place
        request.on_end = partial(self._ended, place, request.on_end)
        for scrapes in self.scrapes:
            scrapes.wake()
        self.engines[place].submit(request)

    def _ended(self, place: int, then: OnEnd | None, request: Request) -> None:
        """Tell the router of a request's end, and its client."""
        self._places.pop(request.request_id, None)
        self.router.ended(request, place)
        if then is not None:
            then(request)

    def all_at(self, place: int) -> list[Engine]:
        """Return the engines that were at a place, the present one last."""
        return [*self.ended.get(place, ()), self.engines[place]]

    @property
    def num_steps(self) -> int:
        """Steps of all engines so far."""
        return sum(engine.num_steps for engine in self.engines)

    @property
    def num_in_flight(self) -> int:
        """Requests that were handed over and have not ended."""
        return len(self._places)

    def abort(self, request: Request, reason: str) -> None:
        """Withdraw a request from the engine that has it, if it is unfinished."""
        place = self._places.get(request.request_id)
        if place is not None:
            self.engines[place].abort(request, reason)

    def announced(self, requests: Iterable[Coming]) -> Iterator[Coming]:
        """Yield requests in order of arrival, and keep in mind when the next comes."""
        for request in requests:
            self.next_arrival_s = request.arrival_s
            yield request
        self.next_arrival_s = inf

    def close_arrivals(self) -> None:
        """Say that nothing will arrive any more."""
        for engine in self.engines:
            engine.close_arrivals()

    def observe(self, every_steps: int, observer: Callable[[Engine], None]) -> None:
        """Call `observer` after every `every_steps` steps of the first engine."""
        self.engines[0].observe(every_steps, observer)

    def observe_each(
        self, every_steps: int, observer: Callable[[Engine], None]
    ) -> None:
        """Call `observer` of each engine after every `every_steps` steps of its own."""
        for engine in self.engines:
            engine.observe(every_steps, observer)

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested  # asked at every arrival

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self._request_stop(value=value)

    def _request_stop(self, *, value: bool) -> None:
        self._stop_requested = value
        for engine in self.engines:
            engine.stop_requested = value

    @property
    def stalled(self) -> bool:
        return any(engine.stalled for engine in self.engines)

    @stalled.setter
    def stalled(self, value: bool) -> None:
        for engine in self.engines:
            engine.stalled = value


class Watch(Protocol):
    """Looks at engines at times that it knows before."""

    next_s: float
    """When it looks next, in seconds; in the past while that may be any time."""


def horizon_of(
    engines: Engines,
    watches: Sequence[Watch],
    *,
    heeds_arrivals: bool,
) -> Callable[[], float]:
    """Return a clock of the next moment at which anything may look at an engine.

    Parameters
    ----------
    engines
        Of one clock.
    watches
        All that look at engines.
    heeds_arrivals
        Whether they may look when requests come or are handed on, too.
    """
    env = engines.env
    watch = watches[0] if len(watches) == 1 else None

    def horizon() -> float:
        read_s = (
            min((each.next_s for each in watches), default=inf)
            if watch is None
            else watch.next_s
        )
        if heeds_arrivals:  # and what is handed on, which interrupts others
            read_s = min(read_s, engines.next_change_s)
        if read_s < env.now:  # the end of any request may be the time
            return env.peek()
        return min(engines.next_arrival_s, read_s) if heeds_arrivals else read_s

    return horizon
