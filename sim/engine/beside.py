"""Copies of blocks beside the steps of an engine, to a tier or to another engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

from sim.scheduler.v1.connectors.base import TransferReport

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


class ReportedSteps(Beside):
    """Steps beside which workers move blocks, and report what has ended.

    ::

        a call          what has ended is reported; the batch is formed; what it asks
                        for begins
        before a wait   the same without a batch, for requests that have ended
    """

    def form(self, now_s: float) -> tuple[int, ...]:
        self.report(now_s)
        shape = self.scheduler.form(now_s)
        self.begin(now_s)
        return shape

    def report(self, now_s: float) -> None:
        self.tell(self.taken(now_s))

    def rest(self, now_s: float) -> None:
        self.tell(self.taken_to_rest(now_s))
        if self.scheduler.has_ended_requests:
            self.scheduler.form_nothing()
            self.begin_to_rest(now_s)
        self.tell(self.rested(now_s))

    def tell(self, report: TransferReport | None) -> None:
        """Tell the scheduler what has ended, if anything has."""
        if report is not None:
            self.scheduler.receive(report)

    @abstractmethod
    def taken(self, now_s: float) -> TransferReport | None:
        """Take note of what has ended and was seen by now; None for nothing."""

    @abstractmethod
    def begin(self, now_s: float) -> None:
        """Begin what the latest call asks for."""

    def taken_to_rest(self, now_s: float) -> TransferReport | None:
        """Do as `taken` before a wait."""
        return self.taken(now_s)

    @abstractmethod
    def begin_to_rest(self, now_s: float) -> None:
        """Do as `begin` for a call that formed no step."""

    @abstractmethod
    def rested(self, now_s: float) -> TransferReport | None:
        """Do what is left before a wait, and return what was seen in it."""


def joined_reports(
    one: TransferReport | None, other: TransferReport | None
) -> TransferReport | None:
    """Return the report of two workers, either of which may have none."""
    if one is None or other is None:
        return one or other
    return TransferReport(
        done=[*one.done, *other.done],
        invalid_block_ids=[*one.invalid_block_ids, *other.invalid_block_ids],
        moved=[*one.moved, *other.moved],
        failed=[*one.failed, *other.failed],
        expired=[*one.expired, *other.expired],
    )


def nothing(*arguments: object) -> None:
    """Do nothing."""
    del arguments
