"""Engines whose steps begin and end together: data-parallel ranks that share experts.

Source: vLLM 0.33.0, ``v1/engine/core.py`` (`DPEngineCoreProc.run_busy_loop`,
`_has_global_unfinished_reqs`, `add_request`), ``v1/engine/coordinator.py``.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from sim.engine.clock import STEP_PRIORITY, happen
from sim.errors import CostError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import simpy

    from sim.costs.base import StepCost
    from sim.costs.lock_step import RankStep
    from sim.scheduler.batch import BatchShape

    Price = Callable[[Sequence[BatchShape]], Sequence[RankStep]]

DP_SYNC_INTERVAL = 16
"""Steps from one all-reduce of "has this rank work left?" to the next. Source: vLLM
0.33.0, ``config/parallel.py`` (`dp_sync_interval`); 32 in older releases."""


class LockStep:
    """Ranks that take every step together, from one wave of requests to the next.

    ::

        a request comes to a rank -> a wave starts: all ranks are woken
        all have formed a batch   -> its length is known; it ends for all at once
        no work on this rank      -> a dummy batch, while the wave goes on
        step 1, 16, 32, ...       -> all ask each other: no work anywhere ends the wave

    Parameters
    ----------
    env
        The clock.
    num_ranks
        How many there are.
    price
        From the batches of all ranks, in their order, to their steps.
    sync_interval
        Steps from one all-reduce to the next.

    Attributes
    ----------
    ranks
        The `sim.engine.pace.Pace` of each engine.
    num_waves
        Waves that were started.
    """

    def __init__(
        self,
        env: simpy.Environment,
        num_ranks: int,
        price: Price,
        sync_interval: int = DP_SYNC_INTERVAL,
    ) -> None:
        self.env = env
        self.ranks = [Rank(self, place) for place in range(num_ranks)]
        self.num_waves = 0
        self.is_running = False
        self._price = price
        self._sync_interval = sync_interval
        self._num_steps = 0  # of this wave
        self._asks = False
        """Whether ranks without work must hear of the others before the next step."""
        self._num_idle = 0
        self._answer: simpy.Event | None = None
        self._shapes: list[BatchShape | None] = [None] * num_ranks
        self._num_formed = 0
        self._end: simpy.Event | None = None

    # -- waves ----------------------------------------------------------------

    def start_wave(self) -> None:
        """Wake all ranks for the first request."""
        self.is_running, self._num_steps, self._asks = True, 0, False
        self.num_waves += 1
        for rank in self.ranks:
            rank.wake()

    def idle(self) -> Generator[simpy.Event, Any, bool]:
        """Return, of a rank without work, whether any other has some."""
        if not (self.is_running and self._asks):
            return self.is_running
        self._num_idle += 1
        if self._answer is None:
            self._answer = self.env.event()
        answer = self._answer
        if self._num_idle == len(self.ranks):
            self.is_running = False
            self._tell(goes_on=False)
        yield answer
        return self.is_running  # a request of this instant may have begun a wave

    def _tell(self, *, goes_on: bool) -> None:
        self._asks, self._num_idle = False, 0
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.succeed(goes_on)

    # -- steps ----------------------------------------------------------------

    def join(self, place: int, shape: BatchShape) -> simpy.Event:
        """Take the batch of a rank; the event is the end of all."""
        if not self.is_running:
            self.start_wave()
        if self._asks:
            self._tell(goes_on=True)
        self._shapes[place] = shape
        self._num_formed += 1
        if self._end is None:
            self._end = self.env.event()
        end = self._end
        if self._num_formed == len(self.ranks):
            self._begin_step(end)
        return end

    def _begin_step(self, end: simpy.Event) -> None:
        shapes = [shape for shape in self._shapes if shape is not None]
        steps = self._price(shapes)
        now_s, total_s = self.env.now, steps[0].cost.total_s
        if not now_s < now_s + total_s < inf:
            raise CostError(
                f"a step must take a finite time of more than zero (invariant 3): the "
                f"cost model says {total_s} s at {now_s} s; mend its parameters"
            )
        happen(end, now_s + total_s, STEP_PRIORITY, steps)
        self._end, self._num_formed = None, 0
        self._shapes = [None] * len(self.ranks)
        self._num_steps += 1
        number = self._num_steps
        self._asks = number == 1 or number % self._sync_interval == 0


class Rank:
    """How the engine of one rank keeps pace with the others: a `Pace`.

    Attributes
    ----------
    waits_s
        What each of its steps waited for the slowest rank.
    """

    def __init__(self, group: LockStep, place: int) -> None:
        self._group = group
        self._place = place
        self._wake: Callable[[], None] | None = None
        self.waits_s: list[float] = []

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def wake(self) -> None:
        if self._wake is not None:
            self._wake()

    def goes_on(self) -> Generator[simpy.Event, Any, bool]:
        return (yield from self._group.idle())

    def end(self, shape: BatchShape) -> Generator[simpy.Event, Any, StepCost]:
        steps: Sequence[RankStep] = yield self._group.join(self._place, shape)
        step = steps[self._place]
        self.waits_s.append(step.wait_s)
        return step.cost
