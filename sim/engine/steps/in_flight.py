"""Steps of which some are in flight when the next one is formed."""

from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING

from sim.costs.pricing import decode_ends_of
from sim.engine.sampling import running_order
from sim.engine.steps.base import no_length
from sim.engine.steps.single import ClockedSteps, QuietSteps, WholeSteps
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.engine.pipeline import StepInFlight
    from sim.engine.sampling import AheadCalendar
    from sim.engine.steps.base import Owner, Steps
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request


class FlightSteps(WholeSteps):
    """`WholeSteps` with several of them in flight."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._of_step = 0

    def look(self) -> Steps:
        self.drains = not self._has_work()
        return self

    def _end_s(self, now_s: float, total_s: float) -> float:
        end_s: float = self._batches.end_s(now_s, self.shape, total_s)
        return end_s

    def _enter(self, step: int, now_s: float, end_s: float) -> float:
        batches = self._batches
        batches.push(step, self._output(), end_s)
        return self._take(batches.pop_if_full(now_s, self._scheduler))

    def _take(self, oldest: StepInFlight) -> float:
        self._of_step, self._batch, end_s, _ = oldest
        return end_s

    def appear(self, step: int, end_s: float) -> list[Request]:
        self.num_later_steps = step - self._of_step - self._batches.num_unwritten
        return super().appear(self._of_step, end_s)


class AheadSteps(ClockedSteps):
    """`ClockedSteps` of which one is in flight while the next one is formed."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._batch_total = _unknown  # when a step ends is for the queue to say
        self._ends_late = True
        self._end_step = getattr(owner.scheduler, "end_step", None)
        self._shows = False

    def _quiet_steps(self, most: Callable[[int], int]) -> QuietSteps:
        scheduler, model, log = self._scheduler, self._owner.cost_model, self._log
        decode_ends = decode_ends_of(model) if self._pace else self._batches.decode_ends
        quiet = AheadQuietSteps(
            *(scheduler.clock, scheduler.tables, most, scheduler.advance),
            *(decode_ends, model, self._owner.recorder),
        )
        quiet.log_ends = log.turns_s.extend
        quiet.calendar = self._calendar
        return quiet

    def look(self) -> Steps:
        self.drains = not self._has_work()
        self.takes_stretches = self._may_stretch()
        owner, beside = self._owner, self._owner.beside
        asks = beside is not None and beside.asks
        self._shows = bool(owner.listeners) or owner.keeps_costs or asks
        return self

    def take(self, step: int, now_s: float) -> float:
        self._batch = None
        super().take(step, now_s)
        has_requests = bool(self._running or self._waiting)
        entered: tuple[float, float, float] = self._batches.enter(
            now_s, self.shape, has_requests
        )
        _, end_s, turn_s = entered
        if self._pace is not None:
            return end_s
        if not now_s < end_s < inf:
            raise no_length(self._owner.cost_model, BatchShape(*self.shape), now_s)
        self._log_end(end_s)
        scheduler, shape = self._scheduler, self.shape
        if (
            scheduler.preemptions
            or scheduler.passed_over
            or scheduler.set_aside
            or not (shape[0] or shape[3])
            or self._shows
        ):
            self._note(step, now_s)
        return turn_s

    def _output(self) -> SchedulerOutput:
        if self._batch is None:  # failed loads are in one output only
            self._batch = super()._output()
        return self._batch

    def _note(self, step: int, now_s: float) -> None:
        owner, scheduler = self._owner, self._scheduler
        if scheduler.preemptions:
            self._note_preemptions(step, now_s, scheduler.preemptions)
        if scheduler.passed_over:
            self._calendar.wait(scheduler.passed_over, step)
        if scheduler.set_aside:
            self._calendar.set_aside(scheduler.set_aside)
            scheduler.set_aside = []
        if self._shows:
            cost = owner.cost_model.step(BatchShape(*self.shape))
            self._show(step, now_s, cost, self._output())
            if owner.beside is not None:
                owner.is_alone = False
        if self._pace is None:
            self._note_if_empty(step)

    def appear(self, step: int, end_s: float) -> list[Request]:
        calendar, scheduler = self._calendar, self._scheduler
        if self._end_step is not None:
            self._end_step()
        if calendar.begun:
            calendar.note_first_tokens(end_s)
        finished: list[Request] = []
        if calendar.aside:
            set_aside = calendar.arrive(step, end_s)
            scheduler.note_known(set_aside)
            finished = [each for each in set_aside if each.status.is_finished]
        if step == self.due_steps[0]:
            known, limited = calendar.pop_known(end_s)
            finished += known
            if limited:
                scheduler.take_off(limited)
        if scheduler.completing:
            scheduler.begin_decoding(calendar.begin(scheduler.completing, step))
        if finished:
            finished.sort(key=running_order)
            scheduler.update(finished)
            self.num_later_steps = 1 - self._batches.num_unwritten
        return finished


class AheadQuietSteps(QuietSteps):
    """`QuietSteps` at the first end of which tokens in flight appear.

    Attributes
    ----------
    calendar
        Is told of that end, which a router may ask for before the last one.
    """

    may_meet = True
    calendar: AheadCalendar

    def take(
        self,
        step: int,
        num_steps: int,
        now_s: float,
        until_s: float,
        ends_s: list[float] | None = None,
    ) -> list[float]:
        ends_s = super().take(step, num_steps, now_s, until_s, ends_s)
        if self.calendar.begun:
            self.calendar.note_first_tokens(ends_s[0])
        return ends_s


def _unknown(*shape: int) -> float:
    """Return no length."""
    del shape
    return nan
