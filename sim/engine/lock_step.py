"""Engines whose steps begin and end together: data-parallel ranks that share experts.

Source: vLLM 0.33.0, ``v1/engine/core.py`` (`DPEngineCoreProc.run_busy_loop`,
`_has_global_unfinished_reqs`, `add_request`; `step_with_batch_queue`),
``v1/engine/coordinator.py``.
"""

from __future__ import annotations

from collections import deque
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.engine.clock import STEP_PRIORITY, At, happen
from sim.engine.pipeline import NOTHING, StepInFlight
from sim.errors import CostError
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence, Sized

    import simpy

    from sim.costs.base import StepCost
    from sim.costs.steps.ahead import HostAhead
    from sim.costs.steps.lock_step import RankStep
    from sim.results.recording.step_log import StepLog
    from sim.scheduler.base import SchedulerOutput

    Price = Callable[[Sequence[BatchShape]], Sequence[RankStep]]

DP_SYNC_INTERVAL = 16
"""Steps from one all-reduce of "has this rank work left?" to the next. Source: vLLM
0.33.0, ``config/parallel.py`` (`dp_sync_interval`); 32 in older releases."""

_DUMMY = BatchShape(0, 0, 0, 0, 0, 0)


class _Step:
    """A step of all ranks, which begins once each has launched its batch."""

    def __init__(self, env: simpy.Environment, num_ranks: int) -> None:
        self.shapes = [_DUMMY] * num_ranks
        self.num_joined = 0
        self.ready_s = -inf
        self.launched = env.event()
        self.end = env.event()


class LockStep:
    """Ranks that take every step together, from one wave of requests to the next.

    ::

        a request comes to a rank   -> a wave starts: all ranks are woken
        all have launched a batch   -> its length is known; it ends for all at once
                                       (two are on the GPU at most)
        no tokens on this rank      -> a dummy batch, while the wave goes on
        after turn 1, 16, 32, ...   -> all ask each other: no work ends the wave
    what came since the turn    -> is not known then, and starts another wave

    Parameters
    ----------
    env
        The clock.
    num_ranks
        How many there are.
    price
        From the batches of all ranks, in their order, to their steps.
    sync_interval
        Turns from one all-reduce to the next.
    host
        With asynchronous scheduling: says which part of a step the host prepares while
        the one before runs. Without it ranks have one step in flight.

    Attributes
    ----------
    ranks
        The `sim.engine.pace.Pace` of each engine.
    num_waves
        Waves that were started.
    is_running
        Whether a wave goes on.
    factor
        How many times as long as their price steps take from the next one on.
    """

    def __init__(
        self,
        env: simpy.Environment,
        num_ranks: int,
        price: Price,
        sync_interval: int = DP_SYNC_INTERVAL,
        *,
        host: HostAhead | None = None,
    ) -> None:
        self.env = env
        self.num_waves = 0
        self.is_running = False
        self._price = price
        self._sync_interval = sync_interval
        self._host = host
        self.ranks = [self._rank(place) for place in range(num_ranks)]
        self._steps = deque[_Step]()  # that some rank has joined, and not all
        self._num_begun = 0
        self._last_s = self._before_s = -inf  # ends of the latest, and the one before
        self.factor = 1.0
        self._num_asking = 0
        self._asks_from = inf  # the turn from which on all ask after each
        self._has_work = False
        self._answer: simpy.Event | None = None

    def _rank(self, place: int) -> Rank:
        return Rank(self, place) if self._host is None else AheadRank(self, place)

    def renewed(self, place: int) -> Rank:
        """Return the pace of an engine that takes the place of one that has ended.

        All ranks end, and begin again, together.
        """
        old, new = self.ranks[place], self._rank(place)
        new.num_joined, new.waits_s = old.num_joined, old.waits_s
        self.ranks[place] = new
        return new

    # -- waves ----------------------------------------------------------------

    def _start_wave(self) -> None:
        """Wake all ranks for the first request."""
        self.is_running = True
        self.num_waves += 1
        for rank in self.ranks:
            rank.is_resting = False
            rank.wake()

    def all_rest(self) -> bool:
        """Whether no rank will have work again; all are then told."""
        is_over = all(rank.is_resting for rank in self.ranks)
        if is_over:
            for rank in self.ranks:
                rank.wake()
        return is_over

    def all_reduce(
        self, num_turns: int, *, has_work: bool
    ) -> Generator[simpy.Event, Any, None]:
        """Let a rank ask the others after so many turns of a wave, if it is due."""
        is_due = num_turns == 1 or num_turns % self._sync_interval == 0
        if not (is_due or num_turns >= self._asks_from):
            return
        self._has_work |= has_work
        self._num_asking += 1
        if self._answer is None:
            self._answer = self.env.event()
        answer = self._answer
        if self._num_asking == len(self.ranks):
            if not self._has_work:
                self.is_running, self._asks_from = False, inf
                for rank in self.ranks:
                    rank.num_turns = 0
            self._answer, self._num_asking, self._has_work = None, 0, False
            answer.succeed()
        yield answer

    def close(self) -> None:
        """Let a wave end with the first turn after which no rank has work."""
        if self.is_running:
            self._asks_from = max(rank.num_turns for rank in self.ranks) + 1

    # -- steps ----------------------------------------------------------------

    def host_s(self, num_rows: int) -> float:
        """Return the host's seconds to prepare a batch of so many requests."""
        host = self._host
        assert host is not None
        return self.factor * host.split(host.prepare_s, num_rows)[0]

    def gpu_s(self, own: RankStep) -> float:
        """Return how long a step takes without its preparation on the host."""
        total_s, host = own.cost.total_s, self._host
        if host is None:
            return total_s
        return self.factor * host.split(total_s / self.factor, 0)[1]

    def join(self, rank: Rank, shape: BatchShape, ready_s: float) -> _Step:
        """Take the batch that a rank has launched at a time; return the step of all."""
        if not self.is_running:
            self._start_wave()
        steps, number = self._steps, rank.num_joined - self._num_begun
        rank.num_joined += 1
        if number == len(steps):
            steps.append(_Step(self.env, len(self.ranks)))
        step = steps[number]
        step.shapes[rank.place] = shape
        step.num_joined += 1
        step.ready_s = max(step.ready_s, ready_s)
        if step.num_joined == len(self.ranks):
            steps.popleft()
            self._num_begun += 1
            self._begin(step)
        return step

    def _begin(self, step: _Step) -> None:
        """Let a step run once all ranks are ready, and the one before has ended."""
        own = [each.slowed(self.factor) for each in self._price(step.shapes)]
        total_s, now_s = own[0].cost.total_s, self.env.now
        before_s = self._last_s
        begin_s = max(step.ready_s, before_s)
        end_s = begin_s + self.gpu_s(own[0])
        if not begin_s < end_s < inf:
            raise CostError(
                f"a step must take a finite time of more than zero (invariant 3): the "
                f"cost model says {total_s} s at {now_s} s; mend its parameters"
            )
        launched_s = max(now_s, step.ready_s, self._before_s)
        self._before_s, self._last_s = before_s, end_s
        for rank, cost in zip(self.ranks, own, strict=True):
            rank.begun(cost, before_s, end_s)
        happen(step.launched, launched_s, STEP_PRIORITY, None)
        happen(step.end, end_s, STEP_PRIORITY, own)


class Rank:
    """How the engine of one rank keeps pace with the others: a `Pace`.

    Attributes
    ----------
    place
        Its number.
    num_joined, num_turns
        Steps that it joined so far, and turns of its engine core in this wave.
    is_resting
        Whether it has nothing to do until a wave starts, and nothing can come.
    waits_s
        What each of its steps waited for the slowest rank.
    """

    def __init__(self, group: LockStep, place: int) -> None:
        self._group = group
        self._env = group.env
        self.place = place
        self.num_joined = self.num_turns = 0
        self.waits_s: list[float] = []
        self._wake: Callable[[], None] | None = None
        self.is_resting = self._in_turn = False

    @property
    def is_running(self) -> bool:
        return self._group.is_running

    def turns(self) -> int:
        """Return `num_turns`."""
        return self.num_turns

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def wake(self) -> None:
        if self._wake is not None:
            self._wake()

    def rests(self) -> bool:
        self.is_resting = True
        return self._group.all_rest()

    def close(self) -> None:
        self._group.close()

    def slow(self, factor: float) -> None:
        """Let the steps of all ranks take so many times as long."""
        self._group.factor = factor

    def renewed(self) -> Rank:
        """Return the pace of the engine that takes the place of this one."""
        return self._group.renewed(self.place)

    def batch_queue(self, log: StepLog) -> Any:
        del log
        raise TypeError("a rank with one step in flight has no batch queue")

    def end(self, shape: BatchShape) -> Generator[simpy.Event, Any, StepCost]:
        self._in_turn = True
        step = self._group.join(self, shape, self._env.now)
        own: Sequence[RankStep] = yield step.end
        return own[self.place].cost

    def begun(self, own: RankStep, before_s: float, end_s: float) -> None:
        """Note that a step begins that ends then, and the one before it ended."""
        del before_s, end_s
        self.waits_s.append(own.wait_s)

    def turned(self, *, has_work: bool) -> Generator[simpy.Event, Any, None]:
        if self._in_turn:
            self._in_turn = False
            self.num_turns += 1
            yield from self._group.all_reduce(self.num_turns, has_work=has_work)


class _Launched(NamedTuple):
    """A turn's batch, from its scheduler call until the step begins."""

    row: bytes
    launched_s: float
    """When the rank began to launch it."""
    host_s: float
    is_dummy: bool


class AheadRank(Rank):
    """A rank that schedules ahead, and its batch queue: a `BatchQueue` of two.

    A turn forms a batch, launches it and waits for the output of the one before. One
    without tokens launches a dummy batch at its end, and waits until all ranks have
    launched theirs. So rows of steps are written down when these begin, which may be
    a turn later.

    Parameters
    ----------
    group, place
        See `Rank`.

    Attributes
    ----------
    has_output
        Whether the latest turn ended with the output of a step.
    overlapped_s
        How much longer steps would have taken one after the other.
    steady_s
        See `HostQueue`: steps do not follow from what this rank knows.
    """

    steady_s = -inf

    def __init__(self, group: LockStep, place: int) -> None:
        super().__init__(group, place)
        self._log: StepLog | None = None
        self._ready_s = -inf
        self._launched = deque[_Launched]()
        self._in_flight: deque[tuple[StepInFlight, simpy.Event | None]] = deque()
        self._dummy: bytes | None = None  # the row of one that is to be launched
        self._turned = StepInFlight(-1, NOTHING, nan)
        self.has_output = False
        self.overlapped_s = 0.0

    def batch_queue(self, log: StepLog) -> AheadRank:
        self._log = log
        return self

    @property
    def has_steps(self) -> bool:
        """Whether outputs are to come."""
        return bool(self._in_flight)

    @property
    def num_steps(self) -> int:
        """Turns of which the outputs are to come."""
        return len(self._in_flight)

    @property
    def computes(self) -> bool:
        """Whether a step in flight has tokens."""
        return any(step.computes for step, _ in self._in_flight)

    @property
    def num_unwritten(self) -> int:
        """Latest steps that have not begun yet."""
        return len(self._launched) + (self._dummy is not None)

    # -- a turn ---------------------------------------------------------------

    def enter(self, now_s: float, shape: Sequence[int], requests: Sized) -> float:
        """See `HostQueue.enter`: nothing is known before the other ranks have come."""
        del now_s, shape, requests
        return nan

    def end_s(self, now_s: float, shape: BatchShape, total_s: float) -> float:
        """See `Stages.end_s`."""
        del now_s, shape
        return total_s

    def turn(
        self,
        step: int,
        row: bytes,
        shape: BatchShape,
        output: SchedulerOutput,
        *,
        has_requests: bool,
    ) -> Generator[simpy.Event, Any, None]:
        """Launch the batch of a step; wait for the output of the one in flight."""
        self._in_turn = True
        computes = bool(shape.num_decodes or shape.num_prefill_tokens)
        end: simpy.Event | None = None
        if computes:
            end = self._launch(row, shape, is_dummy=False).end
        else:
            self._dummy = row
        is_full = bool(self._in_flight)
        if computes or has_requests:
            self._in_flight.append((StepInFlight(step, output, nan, computes), end))
        if is_full:
            self._turned = yield from self.drained()
        else:
            self.has_output = False
            yield from self._until_ready()
            self._turned = StepInFlight(-1, NOTHING, self._env.now)

    def push(self, step: int, output: SchedulerOutput, end_s: float) -> None:
        """See `BatchQueue.push`: `turn` has done it."""

    def pop_if_full(self, now_s: float, scheduler: object) -> StepInFlight:
        """See `BatchQueue.pop_if_full`: `turn` has waited for it."""
        del now_s, scheduler
        return self._turned

    def drained(self) -> Generator[simpy.Event, Any, StepInFlight]:
        """Return the oldest step in flight when its output is there."""
        oldest, end = self._in_flight.popleft()
        if end is not None:
            yield end
        yield from self._until_ready()
        now_s = self._env.now
        if end is not None and self._log is not None:
            self._log.outputs_s.append(now_s)
        self.has_output = True
        return oldest._replace(end_s=now_s)

    def _until_ready(self) -> Generator[simpy.Event, Any, None]:
        if self._ready_s > self._env.now:
            yield At(self._env, self._ready_s, STEP_PRIORITY)

    def _launch(self, row: bytes, shape: BatchShape, *, is_dummy: bool) -> _Step:
        now_s = self._env.now
        host_s = self._group.host_s(shape.num_decodes + shape.num_prefills or 1)
        self._ready_s = max(now_s, self._ready_s) + host_s
        self._launched.append(_Launched(row, now_s, host_s, is_dummy))
        return self._group.join(self, shape, self._ready_s)

    def begun(self, own: RankStep, before_s: float, end_s: float) -> None:
        super().begun(own, before_s, end_s)
        log, (row, launched_s, host_s, is_dummy) = self._log, self._launched.popleft()
        assert log is not None
        log.packed.append(row)
        log.costs.append(own.cost)
        log.ends_s.append(end_s)
        if is_dummy:
            log.outputs_s.append(end_s)
            return
        gpu_s = self._group.gpu_s(own)
        in_turn_s = end_s - max(before_s, launched_s)
        self.overlapped_s += max(host_s + gpu_s - in_turn_s, 0.0)

    def turned(self, *, has_work: bool) -> Generator[simpy.Event, Any, None]:
        row, self._dummy = self._dummy, None
        if row is not None:
            yield self._launch(row, _DUMMY, is_dummy=True).launched
        yield from super().turned(has_work=has_work)
