"""Listeners and observers of the steps of an engine, and of the ends of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sim.engine.sampling import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.costs.base import StepCost
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request

    Observer = Callable[[Any], None]


class StepListener(Protocol):
    """An object that sees every step in full; see `Engine.listeners`."""

    def scheduled(
        self,
        step: int,
        start_s: float,
        cost: StepCost,
        output: SchedulerOutput,
        scheduler: Any,
    ) -> None:
        """See a step, right after its scheduler call."""
        ...

    def ended(self, end_s: float, finished: Sequence[Request], scheduler: Any) -> None:
        """See the output of the oldest step that has none; the finished are released.

        With one step in flight it is that of the latest.
        """
        ...


class Observers:
    """Functions that are called after every so many steps: progress, checks.

    Attributes
    ----------
    next_step
        How many steps are taken when one of them is called next.
    """

    def __init__(self) -> None:
        self._observers: list[tuple[int, Observer]] = []
        self.next_step = NEVER

    def add(self, every_steps: int, observer: Observer, num_steps: int) -> None:
        """Call `observer` after every `every_steps` steps; `num_steps` are taken."""
        self._observers.append((every_steps, observer))
        self._plan(num_steps)

    def call(self, engine: Any) -> None:
        """Call those whose turn it is."""
        num_steps = engine.num_steps
        for every_steps, observer in self._observers:
            if num_steps % every_steps == 0:
                observer(engine)
        self._plan(num_steps)

    def _plan(self, num_steps: int) -> None:
        turns = (num_steps + every - num_steps % every for every, _ in self._observers)
        self.next_step = min(turns, default=NEVER)


def announce(request: Request) -> None:
    """Tell the client of a request that this has left the engine."""
    # Let go of it first: the event holds the request, which would hold the event.
    on_end, request.on_end = request.on_end, None
    assert on_end is not None
    on_end(request)
