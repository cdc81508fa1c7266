"""The step loop: one SimPy process an engine."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from sim.costs.pricing import batch_total_of, decode_ends_of
from sim.engine.ahead import HostQueue
from sim.engine.clock import ARRIVAL_PRIORITY, STEP_PRIORITY, At, advance
from sim.engine.pace import Unpriced
from sim.engine.pipeline import BatchQueue
from sim.engine.sampling import (
    NEVER,
    AheadCalendar,
    OutputCalendar,
    Sampler,
    running_order,
    sample,
)
from sim.engine.stretch import Stretch
from sim.errors import CostError
from sim.results.step_log import CHUNK_ROWS, pack_facts, pack_formed, pack_stretch
from sim.scheduler.batch import BatchShape
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import simpy

    from sim.costs.base import CostModel, DecodeEnds, StepCost
    from sim.engine.pace import Pace
    from sim.results.recorder import Recorder
    from sim.scheduler.base import ClockedScheduler, Scheduler, SchedulerOutput

MAX_NUM_EMPTY_STEPS = 100_000
"""So many empty steps in a row end a run (invariant 7): a policy may wait for a while,
but not for ever."""

MAX_NUM_QUIET_STEPS = 4096
"""Most steps taken at once: how long an interruption may have to wait."""


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


class Engine:
    """One serving engine on the simulated clock.

    ::

        arrivals --> scheduler queue
                        |
        a batch, or a stretch of quiet steps -> cost -> clock advances
                        -> tokens appear -> finished requests leave -> next step

    It knows a scheduler and a cost model by their protocols, and no policy by name.
    What happens in a step is written into the recorder's log.

    Parameters
    ----------
    env
        The clock.
    scheduler
        One that keeps a decode clock (`ClockedScheduler`) is asked for stretches.
    cost_model, recorder
        The two other roles.
    arrivals
        The workload in order of arrival, if the engine is to take it in itself, one
        request ahead; otherwise processes submit it.
    sample
        Lets the output of a step appear, for schedulers without a decode clock; those
        of sequence groups need theirs.
    admission_check
        Whether requests that can never be served are rejected on arrival; without
        it they block the queue as they would the real engine's (invariant 7).
    horizon
        Returns a time in seconds before which nobody submits or aborts: a stretch ends
        with the first step that ends there or later. By default, the next event of the
        clock.
    stepwise
        Whether every step is taken in full, whatever the scheduler keeps.
    pace
        Says how long steps are and whether empty ones are taken, in place of the cost
        model, for engines that step together; they take their steps one by one.

    Attributes
    ----------
    num_steps
        Steps taken so far.
    is_interruptible
        Whether requests may come, or be withdrawn, before the horizon: a stretch then
        ends with the step in progress. Nothing else of it may be looked at before.
    beside
        What runs beside steps and adds to them; see `sim.engine.offloading`.
    listeners
        Told of every step in full; steps are then taken one by one.
    batches
        Steps in flight, where there may be several; else None.
    stop_requested
        Set it to end the run after the step in progress.
    stalled
        Whether the run ended with a queue that nothing could move any more; happens
        only without the admission check.
    """

    beside: Any = None
    is_interruptible = False

    def __init__(
        self,
        env: simpy.Environment,
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
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.cost_model = cost_model if pace is None else Unpriced()
        self.pace = pace
        self.recorder = recorder
        self.arrivals: Iterable[Request] = arrivals or ()
        self.sample = sample
        self.admission_check = admission_check
        self.horizon = horizon
        self.num_steps = 0
        self.listeners: list[StepListener] = []
        self.stop_requested = False
        self.stalled = False
        most = getattr(scheduler, "max_concurrent_batches", 1)
        self._clocked = (
            cast("ClockedScheduler", scheduler)
            if _forms_itself(scheduler) and not stepwise
            else None
        )
        self.batches = (
            None
            if most == 1
            else pace.batch_queue(recorder.steps)
            if pace is not None
            else BatchQueue(most, cost_model, recorder.steps)
            if self._clocked is None
            else HostQueue(cost_model, recorder.steps)
        )
        self._stepwise = stepwise
        self._decodes: Any = None  # of sequence groups, on a clock
        recorder.steps.num_in_flight = most - 1
        self._calendar = getattr(sample, "calendar", None) or (
            OutputCalendar() if most == 1 else AheadCalendar()
        )
        self._prices_columns = recorder.steps.price_by(self.cost_model)
        self._forms = self._prices_columns or pace is not None
        self._keeps_costs = not self._prices_columns and (pace is None or most == 1)
        self._observers: list[tuple[int, Callable[[Engine], None]]] = []
        self._next_look = NEVER
        self._arrivals_closed = arrivals is not None
        self._blocked = False
        self._num_empty_steps = 0  # in a row, up to the latest one
        self._latest_empty_step = NEVER
        self._actions: list[Callable[[], object]] = []  # between two steps
        self._wake: simpy.Event | Stretch | None = None  # while it waits
        if pace is not None:
            pace.begin(self._wake_up)
        self.done = env.process(self._run())

    # -- the client's side ----------------------------------------------------

    def submit(self, request: Request) -> None:
        """Hand over a request that arrives now."""
        self.recorder.arrived(request)
        error = (
            self.scheduler.admission_error(request) if self.admission_check else None
        )
        if error is None:
            self.scheduler.add_request(request)
            self._wake_up()
        else:
            self._reject(request, error)

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
        self._observers.append((every_steps, observer))
        self._plan_look()

    # -- the loop -------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, Any, None]:  # noqa: PLR0912, PLR0915
        """Take steps until the arrivals are closed and nothing is left to do.

        A request costs some fifteen microseconds in here, and a call of a function a
        hundredth of one, so what is needed in every step stands in local variables,
        and the row of a step is packed in place.
        """
        env = self.env
        scheduler: Any = self.scheduler
        is_clocked = self._clocked is not None
        pace = self.pace
        clocked = cast("ClockedScheduler", scheduler)
        events = env._queue
        calendar: Any = self._calendar
        listeners = self.listeners
        due_steps = calendar.steps
        arrivals = iter(self.arrivals)
        recorder, log = self.recorder, self.recorder.steps
        packed, ends_s = log.packed, log.ends_s
        cost_model = self.cost_model
        batch_total = batch_total_of(cost_model)
        decode_ends = decode_ends_of(cost_model)
        known_ends: dict[int, DecodeEnds] = {}
        horizon, sample, update = self.horizon, self.sample, scheduler.update
        active, add_request = recorder.active, scheduler.add_request
        admission_error = scheduler.admission_error
        if not self.admission_check:
            admission_error = _no_error
        num_unquestioned_tokens = 0
        running: Any = ()
        waiting: Any = ()
        if is_clocked:
            running, waiting = clocked.running, clocked.waiting
            form, quiet_steps = clocked.form, clocked.quiet_steps
            advance_decodes, usage_facts = clocked.advance, clocked.usage_facts
            clock, tables = clocked.clock, clocked.tables
            if pace is not None:  # others may end a step sooner or later
                quiet_steps = _no_steps
            num_unquestioned_tokens = clocked.num_unquestioned_tokens
            num_usable_blocks: int = tables.num_usable_blocks
            log.describe_pool(num_usable_blocks, clocked.block_size)
        beside, schedule, price = self.beside, scheduler.schedule, cost_model.step
        if beside is not None:
            schedule, price = beside.schedule, beside.step
            form, batch_total = beside.form, beside.batch_total
            quiet_steps = beside.quiet_steps
        decodes = self._decodes = self._keep_decodes()
        if decodes is not None:
            quiet_steps, advance_decodes = decodes.quiet_steps, decodes.advance
            clock = tables = decodes
            due_steps = cast("Any", sample).due_steps
            num_usable_blocks = decodes.num_usable_blocks
            log.describe_pool(num_usable_blocks, decodes.block_size, stretches=True)

        batches: Any = self.batches
        ahead: Any = batches if is_clocked else None
        is_one_by_one = is_clocked and batches is None
        log_end: Callable[[float], object] = ends_s.append
        log_ends: Callable[[Any], None] = ends_s.extend
        if batches is not None and pace is not None:
            log_end = _ignore  # others say it, and write the row
        elif ahead is not None:
            decode_ends, log_ends = ahead.decode_ends, log.turns_s.extend
        takes_stretches = forms = drains = False
        group_usage = recorder.groups
        groups: Any = getattr(scheduler, "groups", None)
        note_blocks = log.new_blocks.extend if groups is None else log.facts.extend

        step = self.num_steps
        now_s: float = env.now
        upcoming: Any = next(arrivals, None)
        next_s = inf if upcoming is None else upcoming.arrival_s
        while not self.stop_requested:
            if pace is not None:
                has_work = not self._blocked and any(_queue_lengths(scheduler))
                yield from pace.turned(has_work=has_work)
                now_s = env._now
            if self._actions:
                self._act()
            if (self._blocked or not (running or waiting or self._has_requests())) and (
                pace is None or not pace.is_running
            ):
                if (
                    next_s == inf
                    and self._arrivals_closed
                    and not self._awaits_copies()
                    and (pace is None or pace.rests())
                ):
                    self.stalled = self._has_requests()
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
            if is_one_by_one:
                takes_stretches = not listeners and tables.observer is None
                forms = not (listeners or clocked.moves_blocks)
                forms = forms and self._forms
            elif decodes is not None:
                takes_stretches = self._keeps_decodes(decodes)
                waiting = decodes.scheduler.waiting
            elif batches is not None:  # nothing to form: only outputs to wait for
                drains = not (
                    any(_queue_lengths(scheduler))
                    or (pace is not None and pace.is_running)
                )
                if ahead is not None:
                    takes_stretches = not listeners and tables.observer is None
            look = min(self._next_look, step + MAX_NUM_QUIET_STEPS)
            event_s = events[0][0] if events else inf

            # Until anything else had its turn, what is above cannot have changed.
            is_alone = True
            while is_alone:
                # -- what begins now: a stretch of quiet steps, or a step in full
                output: SchedulerOutput | None = None
                num_steps = 0
                if takes_stretches:
                    last = due_steps[0] + 1
                    num_steps = quiet_steps((last if last < look else look) - step)
                if num_steps:
                    num_decodes = clock.num_decodes
                    context = clock.num_base_tokens + num_decodes * step
                    ends_of = known_ends.get(num_decodes)
                    if ends_of is None:
                        ends_of = known_ends[num_decodes] = decode_ends(num_decodes)
                    num_waiting = len(waiting)
                    if horizon is None:
                        ends = ends_of(
                            context,
                            num_steps,
                            now_s,
                            next_s if next_s < event_s else event_s,
                        )
                    else:
                        until_s = min(next_s, horizon())
                        ends = ends_of(context, num_steps, now_s, until_s)
                        if self.is_interruptible and event_s <= ends[-1] < inf:
                            ends = yield from self._interruptible(ends, until_s)
                            if env._now > now_s:  # they have ended
                                event_s, is_alone = inf, False
                    num_steps, end_s = len(ends), ends[-1]
                    if not (ends[-2] if num_steps > 1 else now_s) < end_s < inf:
                        self._refuse_length(num_decodes, context, [now_s, *ends])
                    packed.append(
                        pack_stretch(
                            step,
                            now_s,
                            num_waiting,
                            num_decodes,
                            context,
                            num_usable_blocks - tables.num_free_blocks,
                            tables.num_logical_blocks,
                            num_steps,
                        )
                    )
                    log_ends(ends)
                    note_blocks(advance_decodes(num_steps))
                    step += num_steps - 1
                elif drains:
                    if pace is None:
                        of_step, output, end_s, _ = batches.pop(now_s)
                    else:
                        of_step, output, end_s, _ = yield from batches.drained()
                        event_s = inf
                    step -= 1  # none is formed
                    is_alone = False
                else:
                    if forms:
                        shape: tuple[int, ...] = form(now_s)
                        total_s = batch_total(*shape)
                        end_s = now_s + total_s
                        preemptions = clocked.preemptions
                    elif ahead is not None:
                        shape = form(now_s)
                        has_requests = bool(running or waiting)
                        total_s, end_s, turn_s = ahead.enter(now_s, shape, has_requests)
                        preemptions = clocked.preemptions
                    else:
                        output = schedule(now_s)
                        shape, preemptions = output.shape, output.preemptions
                        cost = price(output.shape)
                        total_s = cost.total_s
                        end_s = now_s + total_s
                        of_step = step
                        if batches is not None:
                            end_s = batches.end_s(now_s, output.shape, total_s)
                    packed.append(
                        pack_formed(
                            step,
                            now_s,
                            len(running),
                            len(waiting),
                            *shape,
                            *usage_facts(),
                            len(preemptions),
                            clocked.num_recomputed_tokens,
                        )
                        if output is None
                        else _packed(step, now_s, output, scheduler)
                    )
                    if not now_s < end_s < inf:
                        if pace is None:
                            raise _no_length(total_s, now_s)
                        if not (shape[0] or shape[3]):
                            self._note_empty_step(step, output or clocked.output(shape))
                        row = packed.pop()  # none yet, if the run is stopped before
                        whole = output.shape if output else BatchShape(*shape)
                        if batches is None:
                            cost = yield from pace.end(whole)
                            packed.append(row)
                            if output is None:
                                log.costs.append(cost)
                        else:
                            has_requests = any(_queue_lengths(scheduler))
                            yield from batches.turn(
                                step, row, whole, output, has_requests=has_requests
                            )
                        end_s = turn_s = env._now
                        event_s, is_alone = inf, False
                    log_end(end_s)
                    if preemptions:
                        recorder.preempted(step, now_s, preemptions)
                        calendar.forget_preempted(preemptions, step)
                    if forms:
                        if clocked.passed_over:
                            calendar.wait(clocked.passed_over, step)
                        if not (shape[0] or shape[3]) and pace is None:
                            self._note_empty_step(step, clocked.output(shape))
                            is_alone = False
                    elif ahead is not None:
                        if scheduler.set_aside:
                            calendar.set_aside(scheduler.set_aside)
                            scheduler.set_aside = []
                        if listeners or self._keeps_costs:
                            cost = cost_model.step(BatchShape(*shape))
                            self._show(step, now_s, cost, clocked.output(shape))
                        if not (shape[0] or shape[3]) and pace is None:
                            self._note_empty_step(step, clocked.output(shape))
                            is_alone = False
                        end_s = turn_s
                    else:
                        assert output is not None
                        if is_clocked and clocked.passed_over:
                            calendar.wait(clocked.passed_over, step)
                        self._show(step, now_s, cost, output)
                        if pace is None:
                            event_s = events[0][0] if events else inf
                            if not (shape[0] or shape[3]):
                                self._note_empty_step(step, output)
                                is_alone = False
                        if batches is not None:
                            batches.push(step, output, end_s)
                            of_step, output, end_s, _ = batches.pop_if_full(
                                now_s, scheduler
                            )

                if group_usage is not None:
                    if num_steps:
                        by_group = clocked.num_blocks_by_group
                        group_usage.note_all((now_s, *ends[:-1]), by_group)
                    else:
                        group_usage.note(now_s, groups.num_used_blocks_by_group())

                # -- arrivals until it ends
                while next_s <= end_s:
                    if event_s <= next_s:
                        yield At(env, next_s, ARRIVAL_PRIORITY)
                        is_alone = False
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
                        is_alone = False
                    if not is_alone:
                        event_s = events[0][0] if events else inf
                        if error is None or upcoming is None:
                            self._blocked = False
                            self._num_empty_steps = 0
                if event_s <= end_s:
                    yield At(env, end_s, STEP_PRIORITY)
                    is_alone = False
                else:
                    env._now = end_s

                # -- tokens appear
                if is_one_by_one:
                    finished = calendar.pop(end_s) if step == due_steps[0] else []
                    completing = clocked.completing
                    if completing:
                        clocked.begin_decoding(
                            calendar.first_tokens(completing, step, end_s, finished)
                        )
                elif ahead is not None:
                    of_step = step - 1
                    if calendar.begun:
                        calendar.note_first_tokens(ends[0] if num_steps else end_s)
                    finished = (
                        self._appear_ahead(step, end_s)
                        if step == due_steps[0] or calendar.aside
                        else []
                    )
                    if clocked.completing:
                        going_on = calendar.begin(clocked.completing, step)
                        clocked.begin_decoding(going_on)
                else:
                    finished = sample(
                        output, step if batches is None else of_step, end_s
                    )
                    waiting, is_alone = (), False

                # -- finished requests leave
                if finished:
                    if is_clocked and len(finished) > 1:
                        finished.sort(key=running_order)
                    update(finished)
                    recorder.finished(
                        finished,
                        0
                        if batches is None
                        else step - of_step - batches.num_unwritten,
                    )
                    if len(ends_s) >= CHUNK_ROWS or self.stop_requested:
                        log.flush()
                        is_alone = False
                elif not is_clocked:
                    update(finished)
                if listeners:
                    is_alone = False
                    if batches is None or batches.has_output:
                        for listener in listeners:
                            listener.ended(end_s, finished, scheduler)
                if finished:
                    for request in finished:
                        if request.on_end is not None:
                            _announce(request)
                            is_alone = False
                now_s = end_s
                step += 1
                self.num_steps = step
                if step >= look:
                    if step >= self._next_look:
                        self._notify()
                    is_alone = False
                if not (running or waiting):
                    break
        if group_usage is not None:
            group_usage.note(now_s, groups.num_used_blocks_by_group())
        self._settle()
        if self._decodes is not None:
            self._decodes.leave_all()

    # -- beside the loop ------------------------------------------------------

    def _appear_ahead(self, step: int, end_s: float) -> list[Request]:
        """Let last tokens of the step before `step` appear; return what they finish."""
        calendar: Any = self._calendar
        clocked: Any = self._clocked
        finished: list[Request] = []
        if calendar.aside:
            set_aside = calendar.arrive(step, end_s)
            clocked.note_known(set_aside)
            finished = [each for each in set_aside if each.status.is_finished]
        if step == calendar.steps[0]:
            known, limited = calendar.pop_known(end_s)
            finished += known
            if limited:
                clocked.take_off(limited)
        return finished

    def _has_requests(self) -> bool:
        has_outputs = self.batches is not None and self.batches.has_steps
        return has_outputs or any(_queue_lengths(self.scheduler))

    def _awaits_copies(self) -> bool:
        """Whether requests wait for what will end by itself."""
        return False

    def _interruptible(
        self, ends: list[float], until_s: float
    ) -> Generator[simpy.Event, Any, list[float]]:
        """Wait for the end of quiet steps, or for an interruption; return the ends.

        A step that somebody looks at is taken alone: what it holds is then known from
        its beginning on.
        """
        if ends[-1] >= until_s:
            ends = ends[:-1] or ends
        if len(ends) == 1 or self.env.peek() > ends[-1]:
            return ends
        stretch = self._wake = Stretch(self.env, ends)
        yield stretch.end
        self._wake = None
        return stretch.ends_s

    def _wait(self, next_s: float) -> Generator[simpy.Event, Any, None]:
        """Wait for the next arrival of its own, or to be woken."""
        env = self.env
        if next_s < inf and advance(env, next_s):
            return
        wake = self._wake = env.event()
        if next_s < inf:
            yield wake | At(env, next_s, ARRIVAL_PRIORITY)
        else:
            yield wake
        self._wake = None

    def _wake_up(self) -> None:
        self._blocked = False
        self._num_empty_steps = 0
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _reject(self, request: Request, error: str) -> None:
        request.reason = error
        request.move_to(RequestStatus.FINISHED_REJECTED)
        self._leave(request)

    def _leave(self, request: Request, *, goes_on: bool = False) -> None:
        """Record and announce the end of a request that got no answer."""
        if goes_on:
            self.recorder.moved(request)
        else:
            self.recorder.left(request, self.env.now)
        if request.on_end is not None:
            _announce(request)

    def _act(self) -> None:
        for action in self._actions:
            action()
        self._actions.clear()

    def _withdraw(self, request: Request, reason: str, *, goes_on: bool) -> None:
        if not request.status.is_finished:
            request.reason = reason
            self.scheduler.abort(request)
            if request.due_step >= 0:
                self._calendar.leave(request)
            self._leave(request, goes_on=goes_on)

    def _show(
        self, step: int, now_s: float, cost: StepCost, output: SchedulerOutput
    ) -> None:
        """Tell of a step what its row does not say."""
        if self._keeps_costs:
            self.recorder.steps.costs.append(cost)
        for listener in self.listeners:
            listener.scheduled(step, now_s, cost, output, self.scheduler)
        for request in output.ignored:
            self._leave(request)

    def _note_empty_step(self, step: int, output: SchedulerOutput) -> None:
        """Stop asking a scheduler that is stuck, or has nothing to say for too long."""
        if output.ignored or (self.batches is not None and self.batches.computes):
            return
        if self._latest_empty_step != step - 1:
            self._num_empty_steps = 0
        self._latest_empty_step = step
        self._num_empty_steps += 1
        self._blocked = output.stuck or self._num_empty_steps >= MAX_NUM_EMPTY_STEPS

    def _refuse_length(
        self, num_decodes: int, num_context_tokens: int, times_s: list[float]
    ) -> NoReturn:
        """Refuse the last of quiet steps that begin, and end, at these times."""
        num_context_tokens += (len(times_s) - 2) * num_decodes
        shape = BatchShape(num_decodes, num_context_tokens, 0, 0, 0, 0)
        raise _no_length(self.cost_model.step(shape).total_s, times_s[-2])

    def _plan_look(self) -> None:
        step = self.num_steps
        looks = (step + every - step % every for every, _ in self._observers)
        self._next_look = min(looks, default=NEVER)

    def _notify(self) -> None:
        self._settle()
        for every_steps, observer in self._observers:
            if self.num_steps % every_steps == 0:
                observer(self)
        self._plan_look()

    def _settle(self) -> None:
        """Write down how far the decodes came."""
        clocked = self._clocked
        if clocked is not None:
            for bucket in clocked.clock.buckets:
                for request in bucket:
                    clocked.clock.settle(request, clocked.step)
        if self._decodes is not None:
            self._decodes.settle_all()

    def _keep_decodes(self) -> Any:
        """Let a scheduler of sequence groups keep its decodes on a clock, if it can."""
        scheduler: Any = self.scheduler
        keep = getattr(scheduler, "keep_decodes", None)
        if keep is None or not hasattr(self.sample, "due_steps"):
            return None
        if self._stepwise or self.listeners or self.pace is not None:
            return None
        return keep()

    def _keeps_decodes(self, decodes: Any) -> bool:
        """Whether decodes are on the clock still, and nothing hears of their blocks."""
        if self.listeners and self._decodes is not None:
            scheduler: Any = self.scheduler
            scheduler.drop_decodes()
            self._decodes = None
        return self._decodes is not None and not decodes.is_observed


def _forms_itself(scheduler: Scheduler) -> bool:
    """Whether it keeps a decode clock, and no subclass redefines what it passes by."""
    passed_by = {"admission_error", "cache_usage", "schedule", "update"}
    for kind in type(scheduler).__mro__:
        if "form" in vars(kind):
            return True
        if not passed_by.isdisjoint(vars(kind)):
            return False
    return False


def _no_steps(most: int) -> int:
    """Take no quiet steps at once."""
    del most
    return 0


def _no_error(request: Request) -> None:
    """Admit every request."""


def _ignore(end_s: float) -> None:
    """Leave the end of a step to others."""


def _packed(
    step: int, now_s: float, output: SchedulerOutput, scheduler: Scheduler
) -> bytes:
    """Return the row of a step in full."""
    return pack_facts(
        step,
        now_s,
        *_queue_lengths(scheduler),
        *output.shape,
        *scheduler.cache_usage(),
        len(output.preemptions),
        output.num_recomputed_tokens,
        0,
    )


def _queue_lengths(scheduler: Scheduler) -> tuple[int, int, int]:
    return scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped


def _announce(request: Request) -> None:
    # Let go of it first: the event holds the request, which would hold the event.
    on_end, request.on_end = request.on_end, None
    assert on_end is not None
    on_end(request)


def _no_length(total_s: float, now_s: float) -> CostError:
    return CostError(
        f"a step must take a finite time of more than zero (invariant 3): the cost "
        f"model says {total_s} s at {now_s} s; mend its parameters"
    )
