"""Copies of blocks beside the steps of an engine, to a tier or to another engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.costs.base import StepCost
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.v1.connectors.scheduler import ConnectorScheduler


class Beside(ABC):
    """Stands between an engine and its scheduler, and adds to steps and waits.

    The engine asks it for batches, prices and quiet steps in place of the scheduler
    and the cost model, lets it report between steps and before it waits, and waits no
    longer than until it has something to do by itself.

    Parameters
    ----------
    scheduler
        Says what is copied, and is told what has ended.

    Attributes
    ----------
    wake
        Wakes the engine; it sets this.
    drains
        Whether, as of the latest `may_rest`, there is nothing to form, but outputs of
        steps in flight are to come.
    """

    drains = False

    def __init__(self, scheduler: ConnectorScheduler) -> None:
        self.scheduler = scheduler
        self.wake: Callable[[], object] = nothing

    def join(self, batches: Any) -> None:  # noqa: B027 - most have one step in flight
        """Take note of the steps in flight, where there may be several."""

    def leave(self) -> None:  # noqa: B027 - most share nothing
        """Let go of what engines share: this one is gone."""

    @property
    @abstractmethod
    def has_news(self) -> bool:
        """Whether the step in progress ends with a report."""

    @property
    @abstractmethod
    def asks(self) -> bool:
        """Whether the next call may put something onto the clock."""

    @property
    @abstractmethod
    def awaits(self) -> bool:
        """Whether requests wait for what will end by itself."""

    @property
    def looks_on(self) -> bool:
        """Whether a turn without requests looks after what has not ended yet."""
        return bool(self.scheduler.delayed)

    def may_rest(self, now_s: float) -> bool:
        """Look around for an engine with requests; return whether it can only wait."""
        del now_s
        return False

    @abstractmethod
    def form(self, now_s: float) -> tuple[int, ...]:
        """Report what has ended, form the batch, and begin what it asks for."""

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Do as `form`, and return the batch as an object."""
        shape = cast("tuple[int, int, int, int, int, int]", self.form(now_s))
        return self.scheduler.output(shape)

    @abstractmethod
    def quiet_steps(self, most: int) -> int:
        """Return how many steps nothing is copied beside, or asked for."""

    @property
    def num_held_tokens(self) -> int:
        """Tokens in blocks of requests that do not run."""
        return self.scheduler.num_held_tokens

    def go_on(self, now_s: float) -> bool:
        """Do what is due when quiet steps begin; return whether anything was."""
        del now_s
        return False

    def enter_quietly(  # noqa: B027 - of engines that schedule ahead
        self, begin_s: float, end_s: float
    ) -> None:
        """Let the first of quiet steps begin on the GPU, if anything was due."""

    @abstractmethod
    def batch_total(self, *shape: int) -> float:
        """Return the length of the step that was formed, in seconds."""

    @abstractmethod
    def step(self, shape: BatchShape) -> StepCost:
        """Do as `batch_total`, in parts."""

    @abstractmethod
    def report(self, now_s: float) -> None:
        """Tell the scheduler what has ended, as far as an engine has seen it by now."""

    @abstractmethod
    def rest(self, now_s: float) -> None:
        """Do what an engine does before it waits."""

    @abstractmethod
    def wake_s(self, now_s: float) -> float:
        """Return when an engine that waits from now on has something to do."""


def nothing(*arguments: object) -> None:
    """Do nothing."""
    del arguments
