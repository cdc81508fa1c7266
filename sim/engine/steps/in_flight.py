"""Steps of which some are in flight when the next one is formed."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

from sim.costs.pricing import decode_ends_of
from sim.engine.sampling import running_order
from sim.engine.steps.base import ByCount
from sim.engine.steps.single import ClockedSteps, QuietSteps, WholeSteps
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sim.engine.ahead import HostQueue
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
        beside = self._owner.beside
        self.drains = not self._has_work() or (beside is not None and beside.drains)
        return self

    def _end_s(self, now_s: float, total_s: float) -> float:
        end_s: float = self._batches.end_s(now_s, self.shape, total_s)
        return end_s

    def _enter(self, step: int, now_s: float, end_s: float) -> float:
        batches, output = self._batches, self._output()
        if output.is_known:
            assert self._cost is not None
            self._of_step, told_s = step, now_s + self._cost.total_s
            batches.note_known(told_s)
            return told_s
        batches.push(step, output, end_s)
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
        self._shows = False
        self.num_later_steps = 1
        end_step = getattr(owner.scheduler, "end_step", None)
        if end_step is not None:
            self.tells_quiet = True
            self.appear = partial(self._appear_beside, end_step)  # type: ignore[method-assign]
        self._hosts: Mapping[int, tuple[float, int]] = ByCount(_never_hidden)
        if owner.pace is None:
            self._batch_total = self._batches.total_s
            if self._batches.beside is None:  # its copies add to each step
                self._hosts = self._batches.hosts
        self._prepare_s = getattr(owner.cost_model, "prepare_s", 0.0)

    def _quiet_steps(self, most: Callable[[int], int]) -> QuietSteps:
        scheduler, model = self._scheduler, self._owner.cost_model
        quiet = AheadQuietSteps(
            *(scheduler.clock, scheduler.tables, most, scheduler.advance),
            *(decode_ends_of(model), model, self._owner.recorder),
        )
        quiet.calendar, quiet.batches = self._calendar, self._batches
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
        scheduler, shape = self._scheduler, self._formed(step, now_s)
        batches = self._batches
        turn_s: float = batches.steady_s
        host_s, hidden_ns = self._hosts[shape[0] + shape[2]]
        end_s = inf
        if now_s + host_s <= turn_s:
            batch_total, log_end = self._batch_total, self._log_end
            end_s = turn_s + (batch_total(*shape) - self._prepare_s)
        if turn_s < end_s < inf:
            batches.steady_s = end_s
            batches.hidden_ns += hidden_ns
            log_end(end_s)
        else:
            turn_s = batches.enter(now_s, shape, self._running or self._waiting)
        if (
            scheduler.preemptions
            or scheduler.passed_over
            or scheduler.set_aside
            or self._shows
            or not (shape[0] or shape[3])
        ) and self._pace is None:
            self._note(step, now_s)
        return turn_s

    def ends_unseen(self, step: int) -> bool:
        del step
        return False

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

    def _appear_beside(
        self, end_step: Callable[[], object], step: int, end_s: float
    ) -> list[Request]:
        end_step()
        return AheadSteps.appear(self, step, end_s)

    def appear(self, step: int, end_s: float) -> list[Request]:
        calendar, scheduler = self._calendar, self._scheduler
        if calendar.begun:
            calendar.note_first_tokens(end_s)
        finished: list[Request] = []
        if calendar.aside:
            set_aside = calendar.arrive(step, end_s)
            scheduler.note_known(set_aside)
            finished = [each for each in set_aside if each.status.is_finished]
        if step == self.due_steps[0]:
            limited = calendar.pop_known(end_s, finished)
            if limited:
                scheduler.take_off(limited)
        if scheduler.completing:
            scheduler.begin_decoding(calendar.begin(scheduler.completing, step))
        if finished:
            if len(finished) > 1:
                finished.sort(key=running_order)
            scheduler.update(finished)
            if self._pace is not None:
                self.num_later_steps = 1 - self._batches.num_unwritten
        return finished


class AheadQuietSteps(QuietSteps):
    """`QuietSteps` at the first end of which tokens in flight appear.

    A step is in flight when they have been taken: `take` returns the latest turn.

    Attributes
    ----------
    batches
        The steps in flight.
    calendar
        Is told of the first end, which a router may ask for before the last one.
    """

    batches: HostQueue
    calendar: AheadCalendar
    _planned: list[float]  # the ends of steps, as `ends_s` found them

    def ends_s(
        self, step: int, num_steps: int, now_s: float, until_s: float
    ) -> list[float]:
        """Return the turns of steps that are taken later.

        There are none where the host is not hidden: such steps are taken one by one.
        """
        clock, batches = self._clock, self.batches
        self._note_queue()
        num_decodes, oldest_s = clock.num_decodes, batches.steady_s
        context = clock.num_base_tokens + num_decodes * step
        host_s, _, ends_of = batches.quiet[num_decodes]
        self._planned = []
        if now_s + host_s <= oldest_s:
            self._planned = ends_of(context, num_steps, oldest_s, until_s)
        if not self._planned:
            return []
        if self.calendar.begun:  # a router may ask amid the turns
            self.calendar.note_first_tokens(oldest_s)
        return [oldest_s, *self._planned[:-1]]

    def take(
        self,
        step: int,
        num_steps: int,
        now_s: float,
        until_s: float,
        ends_s: list[float] | None = None,
    ) -> tuple[int, float]:
        clock, batches, calendar = self._clock, self.batches, self.calendar
        beside = self.beside
        if beside is not None and not beside.go_on(now_s):
            beside = None
        num_decodes, oldest_s = clock.num_decodes, batches.steady_s
        context = clock.num_base_tokens + num_decodes * step
        host_s, hidden_ns, ends_of = batches.quiet[num_decodes]
        if ends_s is not None:
            ends_s = self._planned[: len(ends_s)]
        else:
            self._note_queue()
            if now_s + host_s <= oldest_s:
                ends_s = ends_of(context, num_steps, oldest_s, until_s)
        if ends_s:
            log_ends = self._log_ends
            log_ends(ends_s)
            num_steps = len(ends_s)
            batches.hidden_ns += hidden_ns * num_steps
            batches.steady_s = ends_s[-1]
            turn_s = ends_s[-2] if num_steps > 1 else oldest_s
            if beside is not None:
                beside.enter_quietly(oldest_s, ends_s[0])
        else:
            turns_s = batches.take_late(num_decodes, context, num_steps, now_s, until_s)
            num_steps, turn_s = len(turns_s), turns_s[-1]
            oldest_s, *ends_s = turns_s
        if calendar.begun:
            calendar.note_first_tokens(oldest_s)
        self._go_on(step, now_s, num_decodes, context, num_steps)
        if self.note_begins is not None:
            self.note_begins([now_s, oldest_s, *ends_s][:num_steps])
        return num_steps, turn_s


def _never_hidden(num_requests: int) -> tuple[float, int]:
    """Return the seconds of the host in a step behind which it cannot hide."""
    del num_requests
    return inf, 0
