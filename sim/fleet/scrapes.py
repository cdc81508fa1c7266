"""Loads of engines, as a router scrapes them at its interval."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from sim.engine.clock import SCRAPE_PRIORITY, At, next_multiple
from sim.fleet.balancer import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import simpy

    from sim.engine.loop import Engine


def load_of(engine: Engine) -> Load:
    """Return the load of an engine, as the steps that have begun left it."""
    scheduler: Any = engine.scheduler
    stretch = engine.stretch
    if stretch is not None and getattr(scheduler, "foresees_usage", False):
        usage = scheduler.usage_after(stretch.num_begun())
    else:
        usage = scheduler.cache_usage().kv_cache_usage
    return Load(scheduler.num_waiting, scheduler.num_running, usage)


class Hearer(Protocol):
    """A router that reads metrics of its engines now and then."""

    interval_s: float
    """Between two reads, in seconds."""

    def hear(self, loads: Sequence[Load]) -> None:
        """Take the metrics of all engines, as they are at this moment."""
        ...


class Scrapes:
    """Tells a router the loads of all engines, at multiples of its interval.

    It pauses while nothing can change: with no request in flight, and with nothing on
    the clock that could move one.

    Parameters
    ----------
    env
        The clock.
    router
        The router that hears the loads.
    loads
        Reads the load of all engines, in their order.
    is_idle
        Whether no request is in flight.
    all_scrapes
        Of all routers of the fleet, which move no request either.

    Attributes
    ----------
    next_s
        When loads are read next, in seconds; ``inf`` during a pause.
    """

    def __init__(
        self,
        env: simpy.Environment,
        router: Hearer,
        loads: Callable[[], Sequence[Load]],
        is_idle: Callable[[], bool],
        all_scrapes: Sequence[Scrapes] = (),
    ) -> None:
        self.env = env
        self.next_s = inf
        self._router = router
        self._loads = loads
        self._is_idle = is_idle
        self._all_scrapes = all_scrapes
        self._submitted: simpy.Event | None = None
        env.process(self._run())

    def wake(self) -> None:
        """End a pause, as a request has been submitted."""
        if self._submitted is not None:
            self._submitted.succeed()
            self._submitted = None
            self._plan()

    def _plan(self) -> None:
        self.next_s = next_multiple(self._router.interval_s, self.env.now)

    def _run(self) -> Generator[simpy.Event, None, None]:
        env = self.env
        while True:
            if self._is_idle() or len(env._queue) <= self._num_others():
                self.next_s, self._submitted = inf, env.event()
                yield self._submitted
            else:
                self._plan()
            yield At(env, self.next_s, SCRAPE_PRIORITY)
            self._router.hear(self._loads())

    def _num_others(self) -> int:
        """Return how many others wait on the clock."""
        others = (each for each in self._all_scrapes if each is not self)
        return sum(each.next_s < inf for each in others)
