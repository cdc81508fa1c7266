"""The step loop of the fast path: stretches of quiet steps at once."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn

from sim.costs.base import BatchShape, pricer_of
from sim.engine.books import may_write_books
from sim.engine.clients import PulledArrivals
from sim.engine.clock import ARRIVAL_PRIORITY, STEP_PRIORITY, At, advance
from sim.engine.loop import MAX_NUM_QUIET_STEPS, run_unseen
from sim.engine.outputs import NEVER, OutputCalendar
from sim.engine.prices import batch_total_of, decode_ends_of
from sim.engine.stepwise import Engine, no_length
from sim.results.recorder import QuietSteps

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    import simpy

    from sim.costs.base import CostModel
    from sim.results.recorder import Recorder
    from sim.scheduler.request import Request
    from sim.scheduler.v1.fast import FastV1Scheduler, Shape

# As QuietSteps(...), without the function that a NamedTuple puts before it.
_stretch: Callable[[Iterable[Any]], QuietSteps] = partial(tuple.__new__, QuietSteps)


class FastEngine(Engine):
    """An engine whose decodes run on the virtual decode clock.

    ::

        quiet steps to come?  --> plan their ends, until the next event of the clock
                                  advance the decodes, record the stretch
        otherwise             --> one step, as `Engine` takes it
        end of the step       --> last tokens by the calendar, first ones of prompts

    While no other event lies before the end of a step, the clock is moved without an
    event of its own.

    Parameters
    ----------
    env, cost_model, recorder, admission_check
        See `sim.engine.stepwise.Engine`.
    scheduler
        A scheduler with a decode clock.
    arrivals
        The workload, if this engine is to pull it; otherwise processes submit it.
    """

    scheduler: FastV1Scheduler
    recorder: Recorder

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: FastV1Scheduler,
        cost_model: CostModel,
        recorder: Recorder,
        *,
        arrivals: PulledArrivals | None = None,
        admission_check: bool = True,
    ) -> None:
        self.arrivals = arrivals or PulledArrivals()
        self.calendar = OutputCalendar()
        self._pricer = pricer_of(cost_model)
        self.batch_total = batch_total_of(cost_model)
        self.decode_ends = decode_ends_of(cost_model)
        self._writes_books = False
        if self._pricer is not None:
            recorder.price_by(self._pricer, cost_model)
            self._writes_books = may_write_books(scheduler, recorder)
        super().__init__(
            env, scheduler, cost_model, recorder, admission_check=admission_check
        )
        if arrivals is not None and arrivals.next_s == inf:
            self._arrivals_closed = True

    # -- the loop -------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, scheduler, arrivals = self.env, self.scheduler, self.arrivals
        running, waiting = scheduler.running, scheduler.waiting
        while not self.stop_requested:
            if self._aborts:
                self._apply_aborts()
            if self._blocked or not (running or waiting):
                if (yield from self._wait_for_work()):
                    continue
                break
            end_s = run_unseen(self) if self._is_unseen() else None
            if end_s is None:
                if self.stop_requested or not (running or waiting):
                    continue
                end_s = self._take_quiet_steps() or self._take_step()
            while arrivals.next_s <= end_s:
                if not advance(env, arrivals.next_s):
                    yield At(env, arrivals.next_s, ARRIVAL_PRIORITY)
                self._pull()
            if not advance(env, end_s):
                yield At(env, end_s, STEP_PRIORITY)
            self._give_tokens(end_s)
        self._settle()

    def _wait_for_work(self) -> Generator[simpy.Event, Any, bool]:
        """Wait for an arrival, or to be woken; return whether the run goes on."""
        if self.arrivals.next_s < inf:
            yield from self._wait_for_arrival()
        elif self._arrivals_closed:
            self.stalled = self._has_requests()
            return False
        else:
            self._wake = self.env.event()
            yield self._wake
        return True

    def _is_unseen(self) -> bool:
        """Whether nobody would see the next step, but for the books."""
        return (
            self._writes_books
            and not self.listeners
            and self.scheduler.tables.observer is None
            and self.next_seen_step() > self.num_steps
        )

    def next_seen_step(self) -> int:
        """Return the next step at whose end somebody looks."""
        step = self.num_steps
        every = (steps - step % steps for steps, _ in self._observers)
        return step + min(every, default=NEVER) - 1

    def _wait_for_arrival(self) -> Generator[simpy.Event, Any, None]:
        """Wait for the next arrival, or for somebody else to wake the engine."""
        env, next_s = self.env, self.arrivals.next_s
        if not advance(env, next_s):
            self._wake = env.event()
            yield self._wake | At(env, next_s, ARRIVAL_PRIORITY)
            self._wake = None
        if env.now >= next_s:
            self._pull()

    def _pull(self) -> None:
        """Take in all that arrive now."""
        arrivals, now_s = self.arrivals, self.env.now
        while arrivals.next_s <= now_s:
            self.submit(arrivals.pop())
        if arrivals.next_s == inf:
            self.close_arrivals()

    def _take_step(self) -> float:
        """Take one step in full, decisions first; return its end."""
        if self.listeners or self._pricer is None:
            return self._take_shown_step()
        step, scheduler = self.num_steps, self.scheduler
        now_s: float = self.env.now
        shape = scheduler.form(now_s)
        total_s = self.batch_total(*shape)
        end_s = now_s + total_s
        if not now_s < end_s < inf:
            raise no_length(total_s, now_s)
        self.recorder.decided(step, now_s, shape, scheduler)
        if scheduler.preemptions:
            self.leave_calendar(step)
        if scheduler.prompts or shape[0]:
            self.num_empty_steps = 0
        else:
            self.note_empty_step(shape)
        return end_s

    def note_empty_step(self, shape: Shape) -> None:
        """Stop asking a scheduler that is stuck; see `Engine`."""
        self._note_progress(self.scheduler.output(shape))

    def _take_shown_step(self) -> float:
        """Do so as `Engine` does, for those who want to see what was decided."""
        output, end_s = self._begin_step()
        if output.preemptions:
            self.leave_calendar(self.num_steps)
        return end_s

    def _take_quiet_steps(self) -> float | None:
        """Take all steps that need no look; return the end of the last, if any."""
        scheduler, step = self.scheduler, self.num_steps
        tables = scheduler.tables
        if self.listeners or tables.observer is not None:
            return None  # somebody wants to see each step, at its time
        most = min(self.calendar.next_step, self.next_seen_step()) - step + 1
        num_steps = scheduler.quiet_steps(min(most, MAX_NUM_QUIET_STEPS))
        if not num_steps:
            return None
        start_s: float = self.env.now
        clock = scheduler.clock
        num_decodes = clock.num_decodes
        num_context_tokens = clock.num_base_tokens + num_decodes * step
        num_free_blocks = tables.num_free_blocks
        num_logical_blocks = tables.num_logical_blocks
        ends_s = self.decode_ends(num_decodes)(
            num_context_tokens, num_steps, start_s, self._next_event_s()
        )
        end_s = ends_s[-1]
        num_steps = len(ends_s)
        if not (ends_s[-2] if num_steps > 1 else start_s) < end_s < inf:
            self.refuse_length(num_context_tokens, [start_s, *ends_s])
        self.recorder.quiet(
            _stretch(
                (
                    step,
                    start_s,
                    ends_s,
                    scheduler.advance(num_steps),
                    num_decodes,
                    len(scheduler.waiting),
                    num_context_tokens,
                    tables.num_usable_blocks - num_free_blocks,
                    num_logical_blocks,
                    tables.num_usable_blocks,
                    scheduler.block_size,
                )
            ),
            self.cost_model,
        )
        self.num_steps = step + num_steps - 1
        self.num_empty_steps = 0
        return end_s

    def _next_event_s(self) -> float:
        """Return when something else happens."""
        event_s: float = self.env.peek()
        next_s = self.arrivals.next_s
        return next_s if next_s < event_s else event_s

    def refuse_length(self, num_context_tokens: int, times_s: list[float]) -> NoReturn:
        """Say that the last of quiet steps takes no time, or all of it.

        Parameters
        ----------
        num_context_tokens
            Of the first.
        times_s
            When it began, and the end of each.
        """
        num_decodes = self.scheduler.clock.num_decodes
        num_context_tokens += (len(times_s) - 2) * num_decodes
        shape = BatchShape(num_decodes, num_context_tokens, 0, 0, 0, 0)
        raise no_length(self.cost_model.step(shape).total_s, times_s[-2])

    # -- outputs --------------------------------------------------------------

    def _give_tokens(self, end_s: float) -> None:
        """Let first and last tokens of the step that ends now appear."""
        step, scheduler, calendar = self.num_steps, self.scheduler, self.calendar
        finished: list[Request] = []
        if step == calendar.next_step:
            finished = calendar.pop(end_s)
        if scheduler.completing:
            going_on, done = calendar.first_tokens(scheduler.completing, step, end_s)
            scheduler.begin_decoding(going_on)
            finished += done
        if finished or self.listeners or self._observers:
            self._close_step(finished, end_s)
        else:
            self.num_steps = step + 1

    def leave_calendar(self, step: int) -> None:
        """Forget when those would have ended that `step` has preempted."""
        for preemption in self.scheduler.preemptions:
            request = preemption.request
            if request.due_step >= 0:
                self.calendar.leave(request)
                request.streaks.append((request.joined_step, step - 1))

    def _withdraw(self, request: Request) -> None:
        super()._withdraw(request)
        if request.due_step >= 0:
            self.calendar.leave(request)

    def _notify(self) -> None:
        self._settle()
        super()._notify()

    def _settle(self) -> None:
        """Write down how far the decodes came, for who looks at them from outside."""
        scheduler = self.scheduler
        for bucket in scheduler.clock.buckets:
            for request in bucket:
                scheduler.clock.settle(request, scheduler.step)
