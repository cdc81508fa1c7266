"""The step loop: one SimPy process an engine."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from sim.engine.clock import STEP_PRIORITY, At
from sim.engine.sampling import sample
from sim.errors import CostError
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import simpy

    from sim.costs.base import CostModel, StepCost
    from sim.scheduler.base import Scheduler, SchedulerOutput


MAX_NUM_EMPTY_STEPS = 100_000
"""So many empty steps in a row end a run (invariant 7): a policy may wait for a while,
but not for ever."""


Sampler = Callable[[Any, int, float], list[Request]]
"""From a scheduler's output, the step and its end to the requests it finished."""


class StepRecorder(Protocol):
    """What the engine tells of a run, as it happens."""

    def arrived(self, request: Request) -> None:
        """Take note of an arrival, just before it is queued or rejected."""
        ...

    def step(
        self,
        step: int,
        start_s: float,
        cost: StepCost,
        output: SchedulerOutput,
        scheduler: Scheduler,
    ) -> None:
        """Take note of a step, right after its scheduler call."""
        ...

    def stepped(self, end_s: float, finished: Sequence[Request]) -> None:
        """Take note of the end of the step and of the requests it finished."""
        ...

    def left(self, request: Request, now_s: float) -> None:
        """Take note of a rejected or aborted request."""
        ...


class StepListener(Protocol):
    """Who wants to see every step in full; see `Engine.listeners`."""

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
        """See the end of the step; what it finished has been released."""
        ...


class Engine:
    """One serving engine on the simulated clock.

    ::

        arrivals --> scheduler queue
                        |
        schedule() -> cost -> clock advances -> sample() -> update() -> next step

    It knows a scheduler, a cost model and a recorder by their protocols, and no
    policy by name.

    Parameters
    ----------
    env
        The clock.
    scheduler, cost_model, recorder
        The three roles.
    sample
        Lets the output of a step appear; schedulers of sequence groups need theirs.
    admission_check
        Whether requests that can never be served are rejected on arrival; without
        it they block the queue as they would the real engine's (invariant 7).

    Attributes
    ----------
    num_steps
        Steps taken so far.
    num_empty_steps
        The latest of them that computed nothing, in a row.
    listeners
        Told of every step in full. The fast path then takes steps one by one.
    stop_requested
        Set it to end the run after the step in progress.
    stalled
        Whether the run ended with a queue that nothing could move any more; happens
        only without the admission check.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        cost_model: CostModel,
        recorder: StepRecorder,
        *,
        sample: Sampler = sample,
        admission_check: bool = True,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.cost_model = cost_model
        self.recorder = recorder
        self.sample = sample
        self.admission_check = admission_check
        self.num_steps = 0
        self.listeners: list[StepListener] = []
        self.stop_requested = False
        self._observers: list[tuple[int, Callable[[Engine], None]]] = []
        self.stalled = False
        self._arrivals_closed = False
        self._blocked = False
        self.num_empty_steps = 0
        self._aborts: list[tuple[Request, str]] = []
        self._wake: simpy.Event | None = None  # while it waits for something to do
        self.done = env.process(self._run())

    # -- the client's side ----------------------------------------------------

    def submit(self, request: Request) -> None:
        """Hand over a request that arrives now."""
        self.recorder.arrived(request)
        error = (
            self.scheduler.admission_error(request) if self.admission_check else None
        )
        if error is not None:
            request.reason = error
            request.move_to(RequestStatus.FINISHED_REJECTED)
            self._leave(request)
            return
        self.scheduler.add_request(request)
        self._wake_up()

    def _leave(self, request: Request) -> None:
        """Record and announce the end of a request that got no answer."""
        self.recorder.left(request, self.env.now)
        if request.on_end is not None:
            _announce(request)

    def abort(self, request: Request, reason: str) -> None:
        """Withdraw a request before the next scheduler call, if it is unfinished.

        As in the real engine an abort takes effect between two steps: what the step
        in progress gives the request still counts.
        """
        self._aborts.append((request, reason))
        self._wake_up()

    def close_arrivals(self) -> None:
        """Say that nothing will arrive any more: the run ends with the last output."""
        self._arrivals_closed = True
        self._wake_up()

    def _wake_up(self) -> None:
        self._blocked = False
        self.num_empty_steps = 0
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    # -- the loop -------------------------------------------------------------

    def observe(self, every_steps: int, observer: Callable[[Engine], None]) -> None:
        """Call `observer` after every `every_steps` steps (progress, checks)."""
        self._observers.append((every_steps, observer))

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while not self.stop_requested:
            if self._aborts:
                self._apply_aborts()
            if self._is_idle():
                if self._arrivals_closed:
                    self.stalled = self._has_requests()
                    return
                self._wake = self.env.event()
                yield self._wake
            else:
                output, end_s = self._begin_step()
                yield At(self.env, end_s, STEP_PRIORITY)
                self._end_step(output, end_s)

    def _apply_aborts(self) -> None:
        for request, reason in self._aborts:
            if not request.status.is_finished:
                request.reason = reason
                self._withdraw(request)
                self._leave(request)
        self._aborts.clear()

    def _withdraw(self, request: Request) -> None:
        """Take an unfinished request from the scheduler."""
        self.scheduler.abort(request)

    def _is_idle(self) -> bool:
        """Whether only an arrival can bring work."""
        return self._blocked or not self._has_requests()

    def _has_requests(self) -> bool:
        scheduler = self.scheduler
        return bool(
            scheduler.num_running or scheduler.num_waiting or scheduler.num_swapped
        )

    def _begin_step(self) -> tuple[SchedulerOutput, float]:
        """Decide and price the next step; return the decisions and its end."""
        now_s = self.env.now
        output = self.scheduler.schedule(now_s)
        cost = self.cost_model.step(output.shape)
        end_s = now_s + cost.total_s
        if not now_s < end_s < inf:
            raise no_length(cost.total_s, now_s)
        self.recorder.step(self.num_steps, now_s, cost, output, self.scheduler)
        for listener in self.listeners:
            listener.scheduled(self.num_steps, now_s, cost, output, self.scheduler)
        for request in output.ignored:
            self._leave(request)
        self._note_progress(output)
        return output, end_s

    def _note_progress(self, output: SchedulerOutput) -> None:
        """Stop asking a scheduler that is stuck, or has nothing to say for too long."""
        if output.num_batched_tokens or output.ignored:
            self.num_empty_steps = 0
        else:
            self.num_empty_steps += 1
            most = self.num_empty_steps >= MAX_NUM_EMPTY_STEPS
            self._blocked = output.stuck or most

    def _end_step(self, output: SchedulerOutput, end_s: float) -> None:
        """Let the output of the step appear."""
        self._close_step(self.sample(output, self.num_steps, end_s), end_s)

    def _close_step(self, finished: Sequence[Request], end_s: float) -> None:
        """Release, record and announce the requests that the step has finished."""
        self.scheduler.update(finished)
        self.recorder.stepped(end_s, finished)
        for listener in self.listeners:
            listener.ended(end_s, finished, self.scheduler)
        for request in finished:
            if request.on_end is not None:
                _announce(request)
        self.num_steps += 1
        if self._observers:
            self._notify()

    def _notify(self) -> None:
        for every_steps, observer in self._observers:
            if self.num_steps % every_steps == 0:
                observer(self)


def _announce(request: Request) -> None:
    """Call back who waits for the end of `request`, once.

    It is let go before: an event that holds the request, which holds the event, would
    be a cycle.
    """
    on_end, request.on_end = request.on_end, None
    assert on_end is not None
    on_end(request)


def no_length(total_s: float, now_s: float) -> CostError:
    """Return what to raise at a step that takes no time, or all of it."""
    return CostError(
        f"a step must take a finite time of more than zero (invariant 3): the cost "
        f"model says {total_s} s at {now_s} s; mend its parameters"
    )
