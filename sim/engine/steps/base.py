"""The base of all ways of taking steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sim.engine.beside import nothing
from sim.engine.sampling import NEVER
from sim.errors import CostError
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import simpy

    from sim.costs.base import CostModel, StepCost
    from sim.engine.beside import Beside
    from sim.engine.clock import Clock
    from sim.engine.common_prefix import CommonPrefixes
    from sim.engine.listeners import StepListener
    from sim.engine.pace import Pace
    from sim.engine.pipeline import StepInFlight
    from sim.engine.steps.vain import VainSteps
    from sim.results.recording.recorder import Recorder
    from sim.scheduler.base import Preemption, Scheduler, SchedulerOutput
    from sim.scheduler.request import Request

T = TypeVar("T")


class ByCount(dict[int, T]):
    """Values by a number of requests or decodes, each made when first asked for."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make

    def __missing__(self, number: int) -> T:
        made = self[number] = self._make(number)
        return made


class Owner(Protocol):
    """The parts of an engine that its steps need; see `sim.engine.loop.Engine`."""

    env: Clock
    scheduler: Any
    cost_model: CostModel
    recorder: Recorder
    sample: Any
    calendar: Any
    listeners: list[StepListener]
    beside: Beside | None
    pace: Pace | None
    prefixes: CommonPrefixes | None
    batches: Any
    vain_steps: VainSteps
    is_alone: bool
    keeps_costs: bool
    num_unread: int

    def leave(self, request: Request) -> None:
        """Record and announce the end of a request that got no answer."""
        ...


class Steps(ABC):
    """A way of taking steps, one by one and in stretches.

    ::

        take      the scheduler forms a batch, the cost model says when the step ends,
                  and both go into the log
        appear    when it has ended: tokens, and requests that got their last one

    A subclass is a way: by shapes of batches (`ClockedSteps`, and `AheadSteps` with one
    in flight) or by batches as objects (`WholeSteps`, with several in flight
    `FlightSteps`, with sequence groups on a clock `GroupSteps`).

    Parameters
    ----------
    owner
        The engine.

    Attributes
    ----------
    due_steps
        The first of it is the step before which no decode on a clock ends.
    quiet
        `sim.engine.steps.single.QuietSteps`, which takes stretches, if there may be
        some.
    takes_stretches, drains
        As of the latest `look`: whether quiet steps may be taken at once, and whether
        nothing is formed and only outputs are waited for.
    tells_quiet
        Whether `appear` is to be called after quiet steps that end no request, too.
    shape
        Of the batch that was formed.
    num_later_steps
        Steps in flight behind the one whose tokens have appeared.
    """

    due_steps: Sequence[int] = (NEVER,)
    quiet: Any = None
    takes_stretches = False
    drains = False
    tells_quiet = True
    num_later_steps = 0

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._scheduler = owner.scheduler
        self._calendar = owner.calendar
        self._pace = owner.pace
        self._batches = owner.batches
        self._prefixes = owner.prefixes
        self._log = log = owner.recorder.steps
        self._ends_late = owner.pace is not None
        self._packed: list[bytes] = []  # with others, until the end of a step is known
        self._log_end: Callable[[float], object] = nothing
        if owner.pace is None:
            self._packed, self._log_end = log.packed, log.ends_s.append
        self.shape: Any = ()
        self._batch: SchedulerOutput | None = None

    def look(self) -> Steps:
        """Look around, as others had their turn; return the way for what is next."""
        return self

    @abstractmethod
    def take(self, step: int, now_s: float) -> float:
        """Form the batch of a step, and write it down; return when the next may be.

        Raises
        ------
        CostError
            If it takes no finite time of more than zero (invariant 3).
        """

    def take_with_others(
        self, step: int, now_s: float
    ) -> Generator[simpy.Event, Any, float]:
        """Do as `take` in an engine that is told when its steps end.

        A step is written down when its end is known: none is, if the run ends before.
        """
        self.take(step, now_s)
        row, log, pace = self._packed.pop(), self._log, self._pace
        self._note_if_empty(step)
        shape = BatchShape(*self.shape)
        if self._batches is None:
            assert pace is not None
            self._keep((yield from pace.end(shape)))
            log.packed.append(row)
            log.ends_s.append(self._owner.env.now)
        else:  # it is the queue that writes, when the step begins
            beside = self._owner.beside
            has_requests = any(queue_lengths(self._scheduler)) or (
                beside is not None and beside.looks_on
            )
            yield from self._batches.turn(
                step, row, shape, self._batch, has_requests=has_requests
            )
        self._note(step, now_s)
        end_s = self._owner.env.now
        return self._enter(step, now_s, end_s)

    @abstractmethod
    def _keep(self, cost: StepCost) -> None:
        """Take the cost of a step that others say."""

    @abstractmethod
    def _note(self, step: int, now_s: float) -> None:
        """Take down of a step what its row does not say."""

    def _enter(self, step: int, now_s: float, end_s: float) -> float:
        """Let a step that ends then be in flight, if there may be some.

        Returns
        -------
        float
            When the next one may be formed, in seconds.
        """
        del step, now_s
        return end_s

    @abstractmethod
    def appear(self, step: int, end_s: float) -> list[Request]:
        """Let tokens appear that are there by now; return the requests that they end.

        The scheduler has released them.
        """

    def ends_unseen(self, step: int) -> bool:
        """Whether surely no request ends with a step that was formed."""
        del step
        return False

    def drain(self, now_s: float) -> float:
        """Take the oldest output in flight; return when it is there."""
        return self._take(self._batches.pop(now_s))

    def drained(self) -> Generator[simpy.Event, Any, float]:
        """Wait for the oldest output in flight; return when it is there."""
        return self._take((yield from self._batches.drained()))

    def _take(self, oldest: StepInFlight) -> float:
        """Take an output; return when it is there."""
        return oldest.end_s

    def settle(self) -> None:  # noqa: B027 - most have nothing to write
        """Write down how far decodes on a clock came."""

    def end(self) -> None:
        """End a run: requests show what they have."""
        self.settle()

    # -- what ways share ------------------------------------------------------

    def _check_length(self, now_s: float, end_s: float) -> None:
        """Refuse a step that does not end later than it begins, unless others say."""
        if not (now_s < end_s < inf or self._ends_late):
            raise no_length(self._owner.cost_model, BatchShape(*self.shape), now_s)

    @abstractmethod
    def _output(self) -> SchedulerOutput:
        """Return the batch that was formed as an object."""

    def _note_if_empty(self, step: int) -> None:
        """Note a step without tokens, unless what is to come may change that."""
        if self.shape[0] or self.shape[3]:
            if self._pace is not None:  # others' wave took it on
                self._owner.vain_steps.note_tokens()
            return
        output, owner = self._output(), self._owner
        owner.is_alone = False
        if not (
            output.ignored
            or (owner.beside is not None and owner.beside.has_news)
            or self._brings_news(output)
        ):
            owner.vain_steps.note_empty(step, is_stuck=output.stuck)

    def _brings_news(self, output: SchedulerOutput) -> bool:
        """Whether the step in flight may let requests go on that cannot now.

        Not if the last that ran has given up its prompt amid chunks: no token of it is
        in flight, for which it would have waited, and so it would go on for ever.
        """
        batches, given_up = self._batches, output.preemptions
        if batches is None or not batches.computes:
            return False
        return not (output.stuck and given_up) or any(
            each.num_tokens_lost >= each.request.num_tokens for each in given_up
        )

    def _note_preemptions(
        self, step: int, now_s: float, preemptions: Sequence[Preemption]
    ) -> None:
        owner, vain_steps = self._owner, self._owner.vain_steps
        owner.recorder.preempted(step, now_s, preemptions)
        self._calendar.forget_preempted(preemptions, step)
        vain_steps.note_preemptions(preemptions)
        if vain_steps.is_due:
            owner.is_alone = False

    def _show(
        self, step: int, now_s: float, cost: StepCost, output: SchedulerOutput
    ) -> None:
        """Tell of a step what its row does not say."""
        owner = self._owner
        if owner.keeps_costs:
            self._log.costs.append(cost)
        for listener in owner.listeners:
            listener.scheduled(step, now_s, cost, output, self._scheduler)
        for request in output.ignored:
            owner.leave(request)

    def is_unfinished(self) -> bool:
        """Whether there are requests that will get on, if only by waiting.

        A core reads its queue when a turn begins: what has come since is not known.
        """
        owner, scheduler = self._owner, self._scheduler
        beside = owner.beside
        if owner.vain_steps.are_vain and not (beside is not None and beside.awaits):
            return False
        return sum(queue_lengths(scheduler)) > owner.num_unread

    def _has_work(self) -> bool:
        """Whether a batch may be formed, or an empty step is taken with others."""
        pace = self._pace
        return any(queue_lengths(self._scheduler)) or (
            pace is not None and pace.is_running
        )


def no_length(cost_model: CostModel, shape: BatchShape, now_s: float) -> CostError:
    """Return the refusal of a step of this shape that begins now."""
    total_s = cost_model.step(shape).total_s
    return CostError(
        f"a step must take a finite time of more than zero (invariant 3): the cost "
        f"model says {total_s} s at {now_s} s; mend its parameters"
    )


def queue_lengths(scheduler: Scheduler) -> tuple[int, int, int]:
    """Return how many requests run, wait and are swapped."""
    return scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped


def forms_itself(scheduler: Scheduler) -> bool:
    """Whether it keeps a decode clock, and no subclass redefines what it passes by."""
    passed_by = {"admission_error", "cache_usage", "schedule", "update"}
    for kind in type(scheduler).__mro__:
        if "form" in vars(kind):
            return True
        if not passed_by.isdisjoint(vars(kind)):
            return False
    return False
