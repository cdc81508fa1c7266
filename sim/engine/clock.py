"""The simulated clock: a SimPy environment that keeps absolute times exact."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

import simpy
from simpy.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Clock(simpy.Environment):
    """A SimPy environment that knows whose turn it is within an instant.

    Attributes
    ----------
    turn
        Priority of what happens now, or happened before at this instant: it never falls
        within one, though processes begin with the least.
    """

    turn: float = ARRIVAL_PRIORITY

    def __init__(self, initial_time: float = 0.0) -> None:
        super().__init__(initial_time)
        self._last = Event(self)

    def next_s(self) -> float:
        """Return when something happens next, in seconds."""
        queue = self._queue
        while queue and not queue[0][3].callbacks:
            heappop(queue)  # an end that comes sooner now
        return queue[0][0] if queue else inf

    def run_to(self, time_s: float, priority: float) -> None:
        """Let all happen until a time, and at that up to a priority."""
        queue: list[Any] = self._queue
        if not queue or queue[0][:2] > (time_s, priority):
            self._now, self.turn = time_s, priority
            return
        last = self._last
        heappush(queue, (time_s, priority, next(self._eid), last))
        while True:
            now_s, turn, _, event = heappop(queue)
            if now_s > self._now or turn > self.turn:
                self.turn = turn
            self._now = now_s
            if event is last:
                return
            callbacks, event.callbacks = event.callbacks, None
            for callback in callbacks:
                callback(event)
            if not (event._ok or hasattr(event, "_defused")):
                raise event._value

    def step(self) -> None:
        if self._queue:
            time_s, turn, *_ = self._queue[0]
            if time_s > self._now or turn > self.turn:
                self.turn = turn
        super().step()


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
        # What Environment.schedule does, with a time in place of a delay.
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
    queue: list[Any] = env._queue
    if queue and queue[0][0] <= time_s:
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
