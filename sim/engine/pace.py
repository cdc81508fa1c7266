"""The common pace of engines that step together."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any, Protocol

from sim.costs.base import StepCost

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import simpy

    from sim.results.recording.step_log import StepLog
    from sim.scheduler.batch import BatchShape


class Pace(Protocol):
    """Says when the steps of an engine end, in place of its cost model."""

    @property
    def is_running(self) -> bool:
        """Whether an engine with nothing to do takes an empty step."""
        ...

    def begin(self, wake: Callable[[], None]) -> None:
        """Take how the engine is woken while it waits for something to do."""
        ...

    def batch_queue(self, log: StepLog) -> Any:
        """Return the queue of an engine that schedules ahead; see `AheadRank`."""
        ...

    def end(self, shape: BatchShape) -> Generator[simpy.Event, Any, StepCost]:
        """Wait for the end of a step that begins now; return what it cost."""
        ...

    def rests(self) -> bool:
        """Note that an engine has nothing to do for good; return whether none has.

        If not, it waits: the others may need it for another step.
        """
        ...

    def close(self) -> None:
        """Note that all engines get no more requests, and end when they have none."""
        ...

    def turned(self, *, has_work: bool) -> Generator[simpy.Event, Any, None]:
        """Do what follows a turn of the engine core, before its next call."""
        ...


class Unpriced:
    """The cost model of an engine that is told when its steps end."""

    def step(self, shape: BatchShape) -> StepCost:
        """Return a length that is not known yet."""
        del shape
        return StepCost(nan)

    def describe(self) -> dict[str, Any]:
        return {}
