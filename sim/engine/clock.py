"""The simulated clock: a SimPy environment that keeps absolute times exact."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from heapq import heappush
from math import inf, nextafter
from typing import TYPE_CHECKING, Any, Protocol

import simpy
from simpy.events import Event

from sim.errors import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

ARRIVAL_PRIORITY = 0
"""Arrivals come before a step that ends at the same instant, ..."""
STEP_PRIORITY = 1
"""... so that the next scheduler call sees them, whatever created the events."""
SCRAPE_PRIORITY = 2
"""Loads of engines are read when the steps of an instant have begun."""


def step_priority(place: int) -> float:
    """Return the priority of steps that end at one of several engines.

    Those of one instant end in the order of their engines, and before anything that
    follows from them: SimPy's own events have `STEP_PRIORITY`.
    """
    return STEP_PRIORITY - 1 / (place + 2)


def next_multiple(interval_s: float, time_s: float) -> float:
    """Return the first multiple of an interval after a time, in seconds."""
    number = int(time_s // interval_s) + 1  # of a division it might be one too many
    while number * interval_s <= time_s:
        number += 1
    return number * interval_s


class Wakeable(Protocol):
    """Something that waits, and may have to go on."""

    def succeed(self) -> object:
        """Let it go on now."""
        ...


class Clock(simpy.Environment):
    """A SimPy environment that knows whose turn it is within an instant.

    Attributes
    ----------
    turn
        Priority of what happens now, or happened before at this instant: it never falls
        within one, though processes begin with the least.
    is_lone
        Whether it is a `LoneClock`.
    """

    turn: float = ARRIVAL_PRIORITY
    is_lone = False

    def __init__(self, initial_time: float = 0.0) -> None:
        super().__init__(initial_time)  # SimPy's own is an int, as results would show

    def run(self, until: float | Event | None = None) -> Any:
        try:
            return super().run(until)
        except EngineDiedError as error:
            if error.at_s is None:  # not by another clock
                error.at_s = self.now
            raise

    def next_turn_s(self) -> float:
        """Return when others have their turn next, in seconds."""
        queue = self._queue
        return queue[0][0] if queue else inf

    def at(self, time_s: float, priority: float) -> Event:
        """Return an event that happens at an absolute time; see `At`."""
        return At(self, time_s, priority)

    def sooner(self, event: Event, time_s: float, priority: float) -> Event:
        """Let those that wait for an event of `at` wait for a sooner one."""
        new = At(self, time_s, priority)
        new.callbacks, event.callbacks = event.callbacks, []
        return new

    def wait(self, until_s: float) -> tuple[Wakeable, Event]:
        """Return an event of a time, or never, and what lets it happen now."""
        wake = self.event()
        if until_s == inf:
            return wake, wake
        return wake, wake | At(self, until_s, ARRIVAL_PRIORITY)

    def step(self) -> None:
        if self._queue:
            time_s, turn, *_ = self._queue[0]
            if time_s > self._now or turn > self.turn:
                self.turn = turn
        super().step()


class LoneClock(Clock):
    """The clock of one process, which is run as far as others need to know.

    One process waits for one thing at a time, so that nothing has to be queued. While
    it runs, nothing is handed to it.

    Attributes
    ----------
    next_s
        When something happens next, in seconds.
    """

    is_lone = True

    def __init__(self) -> None:
        super().__init__()
        self.next_s = 0.0  # it begins
        self._next_priority: float = ARRIVAL_PRIORITY
        self._limit_s = inf
        self._go_on: Callable[[], Event]
        self._done = self._unqueued = self.event()

    def process(self, generator: Generator[Event, Any, Any]) -> Event:  # type: ignore[override]
        """Take the only process; return what happens at its end."""
        self._go_on = generator.__next__
        return self._done

    def next_turn_s(self) -> float:
        """Return until when it may go for now, in seconds."""
        return self._limit_s

    def at(self, time_s: float, priority: float) -> Event:
        self.next_s, self._next_priority = time_s, priority
        return self._unqueued

    def sooner(self, event: Event, time_s: float, priority: float) -> Event:
        self.next_s, self._next_priority = time_s, priority
        return event

    def wait(self, until_s: float) -> tuple[Wakeable, Event]:
        return self, self.at(until_s, STEP_PRIORITY)

    def succeed(self) -> None:
        """Let the process go on now that waits by `wait`."""
        self.next_s, self._next_priority = self._now, STEP_PRIORITY

    def run_to(self, time_s: float, priority: float) -> None:
        """Let all happen until a time, and at that up to a priority."""
        if self.next_s <= time_s:
            limit_s = time_s if priority < STEP_PRIORITY else nextafter(time_s, inf)
            self._limit_s = limit_s
            while self.next_s < time_s or (
                self.next_s == time_s and self._next_priority <= priority
            ):
                self._go()
            self._limit_s = inf
        if time_s > self._now:
            self._now, self.turn = time_s, priority
        elif time_s == self._now and priority > self.turn:
            self.turn = priority

    def run_out(self) -> None:
        """Let all happen."""
        while self.next_s < inf:
            self._go()

    def _go(self) -> None:
        """Let the process have its turn."""
        now_s, turn = self.next_s, self._next_priority
        if now_s < self._now:
            raise ValueError(f"the clock never goes back: now {self._now}, got {now_s}")
        if now_s > self._now or turn > self.turn:
            self._now, self.turn = now_s, turn
        self.next_s = inf
        try:
            self._go_on()
        except EngineDiedError as error:
            error.at_s = self._now
            raise
        except StopIteration:
            self._done.succeed()
            self.step()


class At(Event):
    """An event that happens at an absolute time.

    SimPy's `Timeout` takes a delay, and ``now + (t - now)`` differs from ``t`` in the
    last bit about one time in eight; a trace's arrival would drift.

    Parameters
    ----------
    env
        The clock.
    time_s
        When it happens, in seconds, not before now.
    priority
        Order among events of one instant, smaller first.

    Raises
    ------
    ValueError
        If `time_s` lies in the past or is not a number (invariant 3).
    """

    def __init__(self, env: simpy.Environment, time_s: float, priority: float) -> None:
        if not time_s >= env._now:
            raise ValueError(f"the clock never goes back: now {env._now}, got {time_s}")
        self.env = env
        self.callbacks: Any = []
        self._value: Any = None
        self._ok = True
        # As Environment.schedule does, with a time in place of a delay.
        queue: list[Any] = env._queue
        heappush(queue, (time_s, priority, next(env._eid), self))


def happen(event: Event, time_s: float, priority: float, value: object) -> None:
    """Let an event that was made without a time happen at an absolute one."""
    if not time_s >= event.env._now:
        raise ValueError(
            f"the clock never goes back: now {event.env._now}, got {time_s}"
        )
    event._ok, event._value = True, value
    queue: list[Any] = event.env._queue
    heappush(queue, (time_s, priority, next(event.env._eid), event))


def advance(env: Clock, time_s: float) -> bool:
    """Move the clock to `time_s` without an event, if no event comes first.

    For a process that has nothing to wait for until then.

    Returns
    -------
    bool
        Whether the clock has moved. If not, wait for ``At(env, time_s, ...)``.

    Raises
    ------
    ValueError
        If `time_s` lies in the past or is not a number (invariant 3).
    """
    if not time_s >= env._now:
        raise ValueError(f"the clock never goes back: now {env._now}, got {time_s}")
    if env.next_turn_s() <= time_s:
        return False
    env._now, env.turn = time_s, ARRIVAL_PRIORITY
    return True


@contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Spare the loop the search for cycles: it makes objects, and no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
