"""The step loop: one SimPy process an engine."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from sim.engine.ahead import HostQueue
from sim.engine.beside import nothing
from sim.engine.clock import ARRIVAL_PRIORITY, STEP_PRIORITY, advance, step_priority
from sim.engine.common_prefix import CommonPrefixes
from sim.engine.listeners import Observers, announce
from sim.engine.pace import Unpriced
from sim.engine.pauses import calendar_of
from sim.engine.pipeline import BatchQueue
from sim.engine.sampling import OutputCalendar, Sampler, sample
from sim.engine.steps import way_of
from sim.engine.steps.base import forms_itself, queue_lengths
from sim.engine.steps.vain import VainSteps
from sim.engine.stretch import Stretch
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import simpy

    from sim.costs.base import CostModel
    from sim.engine.beside import Beside
    from sim.engine.clock import Clock, Wakeable
    from sim.engine.listeners import StepListener
    from sim.engine.pace import Pace
    from sim.results.recording.recorder import Recorder
    from sim.scheduler.base import Scheduler

MAX_NUM_QUIET_STEPS = 4096
"""Most steps taken at once: how long an interruption may have to wait."""


class Engine:
    """One serving engine on the simulated clock.

    ::

        arrivals --> scheduler queue
                        |
        a batch, or a stretch of quiet steps -> cost -> clock advances
                        -> tokens appear -> finished requests leave -> next step

    It knows a scheduler and a cost model by their protocols, and no policy by name.

    Parameters
    ----------
    env
        The clock.
    scheduler
        One that keeps a decode clock (`ClockedScheduler`) is asked for stretches.
    cost_model, recorder
        The two other roles.
    arrivals
        The workload in order of arrival, if the engine takes it in itself.
    sample
        Lets the output of a step appear, for schedulers without a decode clock.
    admission_check
        Whether requests that can never be served are rejected on arrival; without
        it they block the queue as they would the real engine's (invariant 7).
    horizon
        Returns a time in seconds before which nothing is submitted or aborted, or
        comes to it from beside: a stretch ends with the first step that ends there or
        later. By default, the next event, or never if it is interruptible.
    stepwise
        Whether every step is taken in full, whatever the scheduler keeps.
    pace
        In place of the cost model, for engines that step together, one by one.
    place
        Of several engines: steps end in this order at one instant, paced ones last.

    Attributes
    ----------
    priority
        Of the ends of its steps among what happens at one instant.
    num_unread
        Requests that came since a turn with other ranks began.
    is_interruptible
        Whether requests may come, or be withdrawn, before the horizon: a stretch then
        ends with the step in progress.
    looks_ahead
        Whether an interruptible engine may go on behind a step that ends no request
        before that has ended: where requests come at `ARRIVAL_PRIORITY` only.
    beside
        What runs beside steps and adds to them; see `sim.engine.offloading`.
    listeners
        Told of every step in full; steps are then taken one by one.
    batches
        Steps in flight, if there may be some.
    stretch
        Quiet steps in progress, not written down.
    stop_requested
        Set it to end the run after the step in progress.
    stalled
        Whether the run ended with a queue that nothing could move any more.
    """

    __slots__ = (  # a row of words: a dict would be a cold line an attribute
        "_actions", "_add_request", "_admission_error", "_arrivals_closed",
        "_num_unquestioned_tokens", "_observers", "_wake", "arrivals", "batches",
        "beside", "calendar", "cost_model", "done", "env", "horizon",
        "is_alone", "is_interruptible", "keeps_costs", "listeners", "looks_ahead",
        "num_steps", "num_unread", "pace", "prefixes", "priority", "recorder", "sample",
        "scheduler", "stalled", "stop_requested", "stretch", "vain_steps",
    )  # fmt: skip

    def __init__(
        self,
        env: Clock,
        scheduler: Scheduler,
        cost_model: CostModel,
        recorder: Recorder,
        *,
        arrivals: Iterable[Request] | None = None,
        sample: Sampler = sample,
        admission_check: bool = True,
        horizon: Callable[[], float] | None = None,
        stepwise: bool = False,
        pace: Pace | None = None,
        beside: Beside | None = None,
        place: int = 0,
    ) -> None:
        self.env, self.scheduler, self.recorder = env, scheduler, recorder
        self.priority = step_priority(place) if pace is None else STEP_PRIORITY
        self.cost_model = cost_model if pace is None else Unpriced()
        self.pace, self.beside = pace, beside
        self.arrivals: Iterable[Request] = arrivals or ()
        self.sample, self.horizon = sample, horizon
        self.is_interruptible = self.looks_ahead = False
        self.num_steps = self.num_unread = 0
        self.listeners: list[StepListener] = []
        self.vain_steps = VainSteps()
        self.is_alone, self.stop_requested, self.stalled = True, False, False
        log = recorder.steps
        most = getattr(scheduler, "max_concurrent_batches", 1)
        is_clocked = forms_itself(scheduler) and not stepwise
        self._admission_error: Callable[[Request], str | None] = (
            scheduler.admission_error if admission_check else nothing
        )
        self._add_request: Callable[[Request], object] = (
            scheduler.add_request if is_clocked else self._hand_over
        )
        self._num_unquestioned_tokens: int = (
            getattr(scheduler, "num_unquestioned_tokens", 0) if is_clocked else 0
        )
        self.batches: Any = (
            None
            if most == 1
            else pace.batch_queue(log)
            if pace is not None
            else HostQueue(cost_model, log)
            if is_clocked
            else BatchQueue(most, cost_model, log)
        )
        log.num_in_flight = getattr(scheduler, "max_awaited_outputs", most - 1)
        self.prefixes = CommonPrefixes.of(self)
        self.calendar: OutputCalendar = getattr(sample, "calendar", None) or (
            calendar_of(scheduler, is_ahead=most > 1)
        )
        prices_columns = log.price_by(self.cost_model)
        self.keeps_costs = not prices_columns and (pace is None or most == 1)
        self._observers, self._arrivals_closed = Observers(), arrivals is not None
        self._actions: list[Callable[[], object]] = []  # between two steps
        self._wake: Wakeable | None = None  # while it waits
        self.stretch: Stretch | None = None
        if beside is not None:
            beside.wake = self._wake_up
            if self.batches is not None:
                beside.join(self.batches)
        if pace is not None:
            pace.begin(self._rouse)
        self.done = env.process(self._run(is_clocked=is_clocked, stepwise=stepwise))

    # -- the client's side ----------------------------------------------------

    def may_reject(self, request: Request) -> bool:
        most = self._num_unquestioned_tokens
        return request.num_prompt_tokens >= most or request.max_num_tokens > most

    @property
    def is_waiting(self) -> bool:
        return self._wake is not None

    def submit(self, request: Request) -> None:
        """Hand over a request that arrives now."""
        self.recorder.arrived(request)
        error = self._admission_error(request) if self.may_reject(request) else None
        if error is None:
            self.num_unread += 1
            self._add_request(request)
            self._wake_up()
        else:
            self._reject(request, error)

    def _hand_over(self, request: Request) -> None:
        """Add it to a queue that the scheduler may have replaced by another."""
        self.scheduler.add_request(request)

    def abort(self, request: Request, reason: str, *, goes_on: bool = False) -> None:
        """Withdraw a request before the next scheduler call, if it is unfinished.

        As in the real engine an abort takes effect between two steps: what the step
        in progress gives the request still counts. One that `goes_on` will be served
        by another engine, and leaves no row here.
        """
        self.between_steps(partial(self._withdraw, request, reason, goes_on=goes_on))

    def between_steps(self, action: Callable[[], object]) -> None:
        """Call `action` when the step in progress has ended."""
        self._actions.append(action)
        self._wake_up()

    def close_arrivals(self) -> None:
        """Say that nothing will arrive any more: the run ends with the last output."""
        self._arrivals_closed = True
        self._wake_up()

    def observe(self, every_steps: int, observer: Callable[[Engine], None]) -> None:
        """Call `observer` after every `every_steps` steps (progress, checks)."""
        self._observers.add(every_steps, observer, self.num_steps)

    observe_each = observe

    # -- the loop -------------------------------------------------------------

    def _run(  # noqa: PLR0912, PLR0915
        self, *, is_clocked: bool, stepwise: bool
    ) -> Generator[simpy.Event, Any, None]:
        """Take steps until the arrivals are closed and nothing is left to do.

        A call costs a hundredth of a request's time in here: hence local variables.
        """
        env, at, next_turn_s = self.env, self.env.at, self.env.next_turn_s
        scheduler: Any = self.scheduler
        pace, horizon, listeners = self.pace, self.horizon, self.listeners
        priority, is_lone = self.priority, env.is_lone
        is_interruptible = self.is_interruptible
        looks_ahead = self.looks_ahead and is_interruptible
        recorder, log = self.recorder, self.recorder.steps
        ends_s, active = log.ends_s, recorder.active
        vain_steps, observers = self.vain_steps, self._observers
        add_request, admission_error = self._add_request, self._admission_error
        num_unquestioned_tokens = self._num_unquestioned_tokens
        running: Any = scheduler.running if is_clocked else ()
        waiting: Any = scheduler.waiting if is_clocked else ()
        ways = way_of(self, is_clocked=is_clocked, stepwise=stepwise)
        due_steps, quiet = ways.due_steps, ways.quiet
        if quiet is not None:
            quiet_steps, quiet_ends, take_quiet = quiet.most, quiet.ends_s, quiet.take
        group_usage, beside = recorder.groups, self.beside
        groups: Any = getattr(scheduler, "groups", None)

        step, now_s = self.num_steps, float(env.now)
        arrivals = iter(self.arrivals)
        upcoming: Any = next(arrivals, None)
        next_s = inf if upcoming is None else upcoming.arrival_s
        while not self.stop_requested:
            if pace is not None:
                yield from pace.turned(has_work=ways.is_unfinished())
                self.num_unread, now_s = 0, env._now
            if vain_steps.is_due:
                ways.settle()
                vain_steps.look(active)
            if self._actions:
                self._act()
            if (
                vain_steps.are_vain
                or not (running or waiting or self._has_requests())
                or (beside is not None and beside.may_rest(env._now))
            ) and (pace is None or not pace.is_running):
                if (
                    next_s == inf
                    and self._arrivals_closed
                    and not (self.beside is not None and self.beside.awaits)
                    and (pace is None or pace.rests())
                ):
                    self.stalled = any(queue_lengths(self.scheduler))
                    break
                yield from self._wait(next_s)
                now_s = env._now
                while upcoming is not None and next_s <= now_s:
                    self.submit(upcoming)
                    upcoming = next(arrivals, None)
                    next_s = inf if upcoming is None else upcoming.arrival_s
                    if upcoming is None:
                        self._wake_up()
                continue
            way = ways.look()
            takes_stretches, drains = way.takes_stretches, way.drains
            take_step, appear, tells_quiet = way.take, way.appear, way.tells_quiet
            look = min(observers.next_step, step + MAX_NUM_QUIET_STEPS)
            event_s = next_turn_s()

            # Until anything else had its turn, what is above cannot have changed.
            self.is_alone = True
            is_unseen = False  # whether the clock stands before the latest step's end
            while self.is_alone:
                # -- what begins now: a stretch of quiet steps, or a step in full
                num_steps = 0
                if takes_stretches:
                    last = due_steps[0] + 1
                    num_steps = quiet_steps((last if last < look else look) - step)
                if num_steps:
                    until_s = next_s if next_s < event_s else event_s
                    if horizon is not None:
                        until_s = min(next_s, horizon())
                    elif is_interruptible:
                        until_s = next_s
                    ends = []
                    if is_interruptible:
                        ends = quiet_ends(step, num_steps, now_s, until_s)
                        if ends and event_s <= ends[-1] < inf:
                            if ends[-1] >= until_s:  # one that is looked at is alone:
                                ends = ends[:-1] or ends  # what it holds is known
                            if is_unseen or (len(ends) > 1 and event_s <= ends[-1]):
                                stretch = Stretch(env, ends, now_s, priority)
                                self._wake = self.stretch = stretch
                                yield stretch.end
                                self._wake = self.stretch = None
                                ends = stretch.ends_s
                                is_unseen, self.is_alone = False, self._stays_alone()
                                event_s = next_turn_s() if self.is_alone else inf
                            if not ends:
                                continue
                        elif not ends and event_s < until_s:
                            until_s = event_s
                    num_steps, end_s = take_quiet(
                        step, num_steps, now_s, until_s, ends or None
                    )
                    step += num_steps - 1
                elif is_unseen:
                    yield at(now_s, priority)
                    is_unseen = self.is_alone = False
                    continue
                elif drains:
                    if pace is None:
                        end_s = way.drain(now_s)
                    else:
                        end_s = yield from way.drained()
                        event_s = inf
                    step -= 1  # none is formed
                    self.is_alone = False
                elif pace is None:
                    end_s = take_step(step, now_s)
                    if not self.is_alone:
                        event_s = next_turn_s()
                else:
                    end_s = yield from way.take_with_others(step, now_s)
                    event_s, self.is_alone = inf, False

                if group_usage is not None and not num_steps:
                    group_usage.note(now_s, groups.num_used_blocks_by_group())

                # -- arrivals until it ends
                while next_s <= end_s:
                    if event_s <= next_s:
                        yield at(next_s, ARRIVAL_PRIORITY)
                        self.is_alone = False
                    env._now = next_s
                    request, upcoming = upcoming, next(arrivals, None)
                    next_s = inf if upcoming is None else upcoming.arrival_s
                    recorder.num_arrived += 1  # as `arrived`, which costs a call
                    active[request.request_id] = request
                    error = (
                        None
                        if request.num_prompt_tokens < num_unquestioned_tokens
                        and request.max_num_tokens <= num_unquestioned_tokens
                        else admission_error(request)
                    )
                    if error is None:
                        add_request(request)
                    else:
                        self._reject(request, error)
                        self.is_alone = False
                    if not self.is_alone:
                        event_s = next_turn_s()
                        if error is None or upcoming is None:
                            vain_steps.end()
                if event_s > end_s:
                    env._now, env.turn = end_s, priority
                elif (
                    looks_ahead
                    and not num_steps
                    and self.is_alone
                    and takes_stretches
                    and step + 1 < look
                    and way.ends_unseen(step)
                ):
                    is_unseen = True
                else:
                    yield at(end_s, priority)
                    self.is_alone = False

                # -- tokens appear, and finished requests leave
                finished: Sequence[Request] = ()
                if not num_steps or step == due_steps[0] or tells_quiet:
                    finished = appear(step, end_s)
                if finished:
                    recorder.finished(finished, way.num_later_steps)
                    if len(ends_s) >= log.chunk_ends or self.stop_requested:
                        log.end_chunk()
                        self.is_alone = False
                if listeners:
                    self.is_alone = False
                    if self.batches is None or self.batches.has_output:
                        for listener in listeners:
                            listener.ended(end_s, finished, scheduler)
                if finished:
                    for request in finished:
                        if request.on_end is not None:
                            announce(request)
                            self.is_alone &= is_lone
                now_s = end_s
                step += 1
                self.num_steps = step
                if step >= look:
                    if step >= observers.next_step:
                        ways.settle()
                        observers.call(self)
                    self.is_alone = False
                if not (running or waiting):
                    break
        if group_usage is not None:
            group_usage.note(now_s, groups.num_used_blocks_by_group())
        ways.end()

    # -- beside the loop ------------------------------------------------------

    def _has_requests(self) -> bool:
        has_outputs = self.batches is not None and self.batches.has_steps
        return has_outputs or any(queue_lengths(self.scheduler))

    def _stays_alone(self) -> bool:
        """Whether requests are all that may have come while it waited."""
        is_disturbed = self._actions or self.stop_requested or self.beside is not None
        return self.env.is_lone and not is_disturbed

    def _wait(self, next_s: float) -> Generator[simpy.Event, Any, None]:
        """Wait for an arrival of its own, for what runs beside, or to be woken."""
        env, beside = self.env, self.beside
        wake_s = inf
        if beside is not None:
            was_closed = self._arrivals_closed
            beside.rest(env.now)
            if self._arrivals_closed and not was_closed:
                return  # what it has reported was the last that others waited for
            wake_s = beside.wake_s(env.now)
        until_s = min(next_s, wake_s)
        if until_s == inf or not advance(env, until_s):
            self._wake, event = env.wait(until_s)
            yield event
            self._wake = None
        if env.now >= wake_s:
            self._wake_up()

    def _wake_up(self) -> None:
        self.vain_steps.end()
        self._rouse()

    def _rouse(self) -> None:
        """Go on, if it waits: a wave of others alone lets no request of its own go."""
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _reject(self, request: Request, error: str) -> None:
        request.reason = error
        request.move_to(RequestStatus.FINISHED_REJECTED)
        self.leave(request)

    def leave(self, request: Request, *, goes_on: bool = False) -> None:
        """Record and announce the end of a request that got no answer."""
        if goes_on:
            self.recorder.moved(request)
        else:
            self.recorder.left(request, self.env.now)
        if request.on_end is not None:
            announce(request)

    def _act(self) -> None:
        if self.beside is not None:
            self.beside.report(self.env.now)
        for action in self._actions:
            action()
        self._actions.clear()

    def _withdraw(self, request: Request, reason: str, *, goes_on: bool) -> None:
        if not request.status.is_finished:
            request.reason = reason
            self.scheduler.abort(request)
            if request.due_step >= 0:
                self.calendar.leave(request)
            self.leave(request, goes_on=goes_on)
