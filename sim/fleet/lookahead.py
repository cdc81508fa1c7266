"""Engines on clocks of their own, run as far as their router needs to know.

::

    AtArrivals       before a request is dealt out, each engine is run up to it
    BetweenScrapes   requests of a span are dealt out, then each engine takes the span
                     at once, then the router reads metrics
    ByEnds           before a request is dealt out, engines of which one may have ended
                     by then are run; the others stay behind

An engine that is run finds its own data at hand, and is not run for what others do.
"""

from __future__ import annotations

from functools import partial
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Any, cast

from sim.engine.clock import (
    ARRIVAL_PRIORITY,
    SCRAPE_PRIORITY,
    STEP_PRIORITY,
    At,
    advance,
    next_multiple,
)
from sim.fleet.apart import EnginesApart

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import simpy

    from sim.engine.clock import Clock, LoneClock
    from sim.engine.loop import Engine
    from sim.fleet.balancer import Load
    from sim.fleet.engines import Router
    from sim.fleet.scrapes import Hearer
    from sim.scheduler.request import Request


class DealtEngines(EnginesApart):
    """Engines that are handed requests before they are run up to their arrivals.

    Parameters
    ----------
    env
        The clock of the run, which the router knows.
    engines
        Each on a clock of its own, which stays behind.
    router
        Where requests go.
    requests
        In order of arrival.
    """

    env: Clock

    def __init__(
        self,
        env: Clock,
        engines: Sequence[Engine],
        router: Router,
        requests: Iterable[Request],
    ) -> None:
        self._requests = iter(requests)
        self._last_s = 0.0
        self._next_look_s = 0.0
        self._clocks = [cast("LoneClock", engine.env) for engine in engines]
        self._dealt: list[list[Request]] = [[] for _ in engines]
        self._enders = [partial(self._ended, i, None) for i in range(len(engines))]
        super().__init__(env, engines, router, ())

    def next_look_s(self) -> float:
        """Return when the router looks at engines next, in seconds."""
        return self._next_look_s

    def _run_all(self, time_s: float, priority: float) -> None:
        """Run all engines up to a look at them."""
        self._next_look_s = time_s
        for place, clock in enumerate(self._clocks):
            if self._dealt[place]:
                self._take_in(place)
            clock.run_to(time_s, priority)

    def _deal(self, request: Request) -> int:
        """Choose where a request goes, which will be handed over; return where."""
        place = self.router.choose(request)
        self._last_s = request.arrival_s
        self._places[request.request_id] = place
        request.on_end = self._enders[place]
        self._dealt[place].append(request)
        return place

    def _take_in(self, place: int) -> None:
        """Hand an engine what was dealt to it, at the times at which that came."""
        engine, clock = self.engines[place], self._clocks[place]
        for request in self._dealt[place]:
            clock.run_to(request.arrival_s, ARRIVAL_PRIORITY)
            engine.submit(request)
        self._dealt[place].clear()

    def _finish(self) -> Generator[simpy.Event, Any, None]:
        """Run all engines to their ends, and the clock of the run to the last."""
        self._next_look_s = inf
        for place, clock in enumerate(self._clocks):
            self._take_in(place)
            clock.run_to(self._last_s, ARRIVAL_PRIORITY)
            self.engines[place].close_arrivals()
            clock.run_out()
        yield At(self.env, max(self._end_s, self.env.now), STEP_PRIORITY)


class AtArrivals(DealtEngines):
    """`DealtEngines` of a router that looks at all of them when a request comes."""

    def _drive(self) -> Generator[simpy.Event, Any, None]:
        for request in self._requests:
            self._run_all(request.arrival_s, ARRIVAL_PRIORITY)
            if self._stop_requested:
                break
            advance(self.env, request.arrival_s)
            self._deal(request)
        yield from self._finish()


class BetweenScrapes(DealtEngines):
    """`DealtEngines` of a router that knows metrics, and nothing of ends.

    Metrics are read as `sim.fleet.scrapes.Scrapes` does: at multiples of the router's
    interval, but for pauses without a request in flight.

    Parameters
    ----------
    env, engines, router, requests
        See `DealtEngines`.
    loads
        Reads the metrics.
    looks
        Whether the router looks at engines when a request comes, too.
    """

    def __init__(
        self,
        env: Clock,
        engines: Sequence[Engine],
        router: Router,
        requests: Iterable[Request],
        loads: Callable[[], Sequence[Load]],
        *,
        looks: bool,
    ) -> None:
        self._loads = loads
        self._looks = looks
        super().__init__(env, engines, router, requests)

    def _drive(self) -> Generator[simpy.Event, Any, None]:
        env, router = self.env, cast("Hearer", self.router)
        request = next(self._requests, None)
        while request is not None and not self._stop_requested:
            since_s = env.now if self._places else max(request.arrival_s, env.now)
            read_s = next_multiple(router.interval_s, since_s)
            while request is not None and request.arrival_s <= read_s:
                if self._looks:
                    self._run_all(request.arrival_s, ARRIVAL_PRIORITY)
                advance(env, request.arrival_s)
                self._deal(request)
                request = next(self._requests, None)
            if request is None:
                break
            self._run_all(read_s, SCRAPE_PRIORITY)
            yield At(env, read_s, SCRAPE_PRIORITY)
            router.hear(self._loads())
        yield from self._finish()


class ByEnds(DealtEngines):
    """`DealtEngines` of a router that knows what it sent, and what has ended.

    For each engine a time is kept before which none of its requests ends: of its next
    event or, if it was handed a request since, of the end of the step in progress then.
    """

    def _drive(self) -> Generator[simpy.Event, Any, None]:
        env, engines, dealt = self.env, self.engines, self._dealt
        clocks = self._clocks
        at_s = [0.0] * len(engines)
        soonest = [(0.0, place) for place in range(len(engines))]  # some are void
        for request in self._requests:
            now_s = request.arrival_s
            while soonest[0][0] < now_s:
                time_s, place = soonest[0]
                if time_s == at_s[place]:
                    if dealt[place]:
                        self._take_in(place)
                    clock = clocks[place]
                    clock.run_to(time_s, SCRAPE_PRIORITY)
                    time_s = at_s[place] = clock.next_s
                    heapreplace(soonest, (time_s, place))
                else:
                    heappop(soonest)
            if self._stop_requested:
                break
            advance(env, now_s)
            place = self._deal(request)
            engine = engines[place]
            time_s = inf  # in a step in full: its next event
            if engine.may_reject(request):
                self._take_in(place)
                time_s = clocks[place].next_s
            elif engine.stretch is not None:
                time_s = engine.stretch.end_of_step(now_s)
            elif engine.is_waiting:
                time_s = now_s
            if time_s < at_s[place]:
                at_s[place] = time_s
                heappush(soonest, (time_s, place))
        yield from self._finish()
