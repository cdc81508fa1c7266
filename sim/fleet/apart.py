"""Engines that nothing connects but the deal of requests: each with its own clock."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sim.engine.clock import STEP_PRIORITY, At
from sim.fleet.engines import Engines, Router

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import simpy

    from sim.engine.loop import Engine
    from sim.engine.requests import LateRequests
    from sim.scheduler.request import Request

_REQUESTS_AT_ONCE: Final = 32_768
"""About so many requests arrive while one engine runs ahead of the others.

Fewer, and of hundreds of engines each finds its data in memory rather than in the
processor's caches at most of them; more take memory, and are no quicker.
"""


class Deal:
    """Deals requests out in their order; each is drawn when an engine wants one.

    Of those that others are to get, only the rows wait.

    Parameters
    ----------
    requests
        Those of the workload.
    choose
        Of a blind router, which looks at nothing of what it is handed: here a row.
    """

    def __init__(
        self, requests: LateRequests[Any], choose: Callable[[Any], int]
    ) -> None:
        self._rows = iter(requests.rows)
        self._make = requests.make
        self._choose = choose
        self._queues: list[deque[Any]] = []

    def shares(self, num_engines: int) -> list[Iterator[Request]]:
        """Return the requests of each engine."""
        self._queues = [deque() for _ in range(num_engines)]
        return [self._share(place) for place in range(num_engines)]

    def _share(self, place: int) -> Iterator[Request]:
        queues, own = self._queues, self._queues[place]
        rows, make, choose = self._rows, self._make, self._choose
        while True:
            if own:
                yield make(own.popleft())
                continue
            row = next(rows, None)
            if row is None:
                return
            queues[choose(row)].append(row)


class EnginesApart(Engines):
    """Engines that draw their own shares of the requests, span by span of time.

    No engine ever sees another one, so that in which order they are run within a span
    changes nothing; each has its own events, and finds its own data at hand.

    Parameters
    ----------
    env
        The clock of the run, which follows them.
    engines
        Each on a clock of its own, with its share of the requests.
    router
        Deals the requests out.
    arrivals_s
        Of all requests, in order.
    """

    def __init__(
        self,
        env: simpy.Environment,
        engines: Sequence[Engine],
        router: Router,
        arrivals_s: Sequence[float],
    ) -> None:
        self._arrivals_s = arrivals_s
        self._end_s = 0.0
        super().__init__(env, engines, router)
        for engine in engines:
            engine.done.callbacks.append(partial(self._note_end, engine))

    def _all_done(self) -> simpy.Event:
        return self.env.process(self._drive())

    def _spans(self) -> Iterator[float]:
        """Yield until when engines run before others have their turn."""
        times_s = self._arrivals_s
        for number in range(_REQUESTS_AT_ONCE, len(times_s), _REQUESTS_AT_ONCE):
            yield times_s[number]

    def _note_end(self, engine: Engine, _: object) -> None:
        self._end_s = max(self._end_s, engine.env.now)

    def _drive(self) -> Generator[simpy.Event, Any, None]:
        for until_s in self._spans():
            for engine in self.engines:
                if engine.env.now < until_s and not engine.done.triggered:
                    engine.env.run(until=until_s)
            if until_s > self.env.now:
                yield At(self.env, until_s, STEP_PRIORITY)
        for engine in self.engines:
            if not engine.done.processed:
                engine.env.run(until=engine.done)
        yield At(self.env, max(self._end_s, self.env.now), STEP_PRIORITY)
