"""What happens in a run, taken down as it happens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cache.errors import require
from sim.results import schema
from sim.results.requests import PreemptionRows, RequestRows
from sim.results.rows import (
    CHUNK_ROWS,
    QuietSteps,
    StepRows,
    UnkeptRows,
    pack_facts,
    pack_step,
)
from sim.results.step_table import MemorySteps, frame_of
from sim.results.table import ResultTable
from sim.results.tokens import InterTokenLatencies, Streaks
from sim.results.totals import StepTotals

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from sim.costs.base import CostModel, StepCost, StepPricer
    from sim.results.step_table import Batch, StepSink, StepTable
    from sim.scheduler.base import Scheduler, SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.v1.fast_state import FastV1State

__all__ = ["QuietSteps", "Recorder", "Recording"]


@dataclass(frozen=True)
class Recording:
    """The tables of a run (`sim.results.schema`) and what the summary needs besides.

    Parameters
    ----------
    step_table
        All steps, in memory or on disk.
    request_table, preemption_table
        One row a request, by id; one row a preemption, in order.
    totals
        Sums and maxima over the steps.
    streaks
        When the tokens of served requests came.
    occupancy_s
        Integral of the number of requests in the system over time (Little's law).
    """

    step_table: StepTable
    request_table: ResultTable
    preemption_table: ResultTable
    totals: StepTotals
    streaks: Streaks
    occupancy_s: float

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All steps in memory, 257 bytes each; `step_table` gives them in batches."""
        return frame_of(self.step_table)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """`request_table` as a frame."""
        return self.request_table.frame()

    @cached_property
    def preemptions(self) -> pd.DataFrame:
        """`preemption_table` as a frame."""
        return self.preemption_table.frame()

    @cached_property
    def itl(self) -> InterTokenLatencies:
        """Inter-token latencies of served requests."""
        return InterTokenLatencies(self.step_table, self.streaks)

    @property
    def extrapolated_share(self) -> float:
        """Share of the engine's busy time that the cost model extrapolated."""
        return self.totals.extrapolated_share


class Recorder:
    """Takes down every step, request and preemption of one run.

    Memory does not grow with the number of steps, if the sink's does not: steps go
    there in batches of a fixed length, the same whether they were told one by one or
    in stretches. A request costs about 100 bytes, a preemption about 70.

    Parameters
    ----------
    sink
        Where steps go; into memory unless said otherwise.
    keeps_steps
        Whether steps are kept at all; without them there are no totals either.
    """

    exact_on_fast_path = True
    """Takes `quiet` stretches; an engine tells a recorder without this each step. A
    subclass that wants to see each step sets it to False."""

    books = frozenset({"arrived", "decided", "quiet", "stepped"})
    """The loop of the fast path writes into `rows`, `requests`, `active` and the counts
    itself in place of calling these. A subclass that redefines one is called."""

    def __init__(
        self, sink: StepSink | None = None, *, keeps_steps: bool = True
    ) -> None:
        self.sink: StepSink = sink or MemorySteps()
        self.num_arrived = 0
        self.num_finished = 0
        self.num_left = 0
        self.active: dict[int, Request] = {}
        self._totals = StepTotals()
        self.rows = (StepRows if keeps_steps else UnkeptRows)(self._emit)
        self._packed = self.rows.packed
        self.requests = RequestRows()
        self._preemptions = PreemptionRows()
        self.occupancy_s = 0.0
        self.occupied_since_s = 0.0

    # -- sim.engine.stepwise.StepRecorder ----------------------------------------------

    def arrived(self, request: Request) -> None:
        """See `StepRecorder.arrived`."""
        now_s, active = request.arrival_s, self.active
        self.occupancy_s += len(active) * (now_s - self.occupied_since_s)
        self.occupied_since_s = now_s
        self.num_arrived += 1
        active[request.request_id] = request

    def step(
        self,
        step: int,
        start_s: float,
        cost: StepCost,
        output: SchedulerOutput,
        scheduler: Scheduler,
    ) -> None:
        """See `StepRecorder.step`."""
        packed = self._packed
        if len(packed) >= CHUNK_ROWS:
            self.rows.flush()
        preemptions = output.preemptions
        packed.append(
            pack_step(
                step,
                start_s,
                scheduler.num_running,
                scheduler.num_waiting,
                scheduler.num_swapped,
                *output.shape,
                *scheduler.cache_usage(),
                len(preemptions),
                output.num_recomputed_tokens,
                *cost,
            )
        )
        for preemption in preemptions:
            self._preemptions.add(step, start_s, preemption)

    def price_by(self, pricer: StepPricer, cost_model: CostModel) -> None:
        """Be told of steps by `decided`, not by `step`; `pricer` knows their costs.

        It is `cost_model`, which is told with quiet stretches.
        """
        self.rows.price_by(pricer, cost_model)

    def decided(
        self,
        step: int,
        start_s: float,
        shape: Sequence[int],
        scheduler: FastV1State,
    ) -> None:
        """Take note of a step as `step` does, its costs to be asked of the pricer.

        Parameters
        ----------
        shape
            The first six fields of its `BatchShape`; the others are 0.
        scheduler
            Right after its call.
        """
        packed = self._packed
        if len(packed) >= CHUNK_ROWS:
            self.rows.flush()
        preemptions = scheduler.preemptions
        packed.append(
            pack_facts(
                step,
                start_s,
                len(scheduler.running),
                len(scheduler.waiting),
                0,
                *shape,
                0,
                0,
                0,
                *scheduler.usage_facts(),
                len(preemptions),
                scheduler.num_recomputed_tokens,
            )
        )
        for preemption in preemptions:
            self._preemptions.add(step, start_s, preemption)

    def quiet(self, steps: QuietSteps, cost_model: CostModel) -> None:
        """Take note of steps as `step` would of each, and of the end of all but one.

        `stepped` is then called once, for the end of the last.

        Parameters
        ----------
        steps
            The stretch; its lists are kept.
        cost_model
            The model that priced it, asked again for the parts when rows are made.
        """
        self.rows.add(steps, cost_model)

    def stepped(self, end_s: float, finished: Sequence[Request]) -> None:
        """See `StepRecorder.stepped`."""
        if finished:
            active = self.active
            self.occupancy_s += len(active) * (end_s - self.occupied_since_s)
            self.occupied_since_s = end_s
            for request in finished:
                del active[request.request_id]
            self.num_finished += len(finished)
            self.rows.finished(len(finished))
            self.requests.add(finished)

    def left(self, request: Request, now_s: float) -> None:
        """See `StepRecorder.left`."""
        self._occupy(now_s)
        del self.active[request.request_id]
        self.num_left += 1
        self.requests.add((request,))

    def check(self, scheduler: Scheduler) -> None:
        """Prove that no request is lost or counted twice (invariant 1).

        Raises
        ------
        InvariantError
            If the queues do not hold as many requests as came and did not go.
        """
        queued = scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped
        gone = self.num_finished + self.num_left
        require(
            self.num_arrived == queued + gone,
            f"{self.num_arrived} requests arrived, {queued} are queued, {gone} left",
        )
        require(
            len(self.active) == queued,
            f"{len(self.active)} requests are active, {queued} are queued",
        )

    # -- collecting -----------------------------------------------------------

    def _occupy(self, now_s: float) -> None:
        """Advance the integral of requests in the system to now."""
        self.occupancy_s += len(self.active) * (now_s - self.occupied_since_s)
        self.occupied_since_s = now_s

    def _emit(self, batch: Batch) -> bool:
        self._totals.add(batch)
        return bool(self.sink.write(batch))

    def finish(self, now_s: float) -> Recording:
        """Close the books at `now_s`; requests still active become rows as they are."""
        self._occupy(now_s)
        self.rows.close()
        self.requests.add(self.active.values())
        return Recording(
            step_table=self.sink.close(),
            request_table=ResultTable(self.requests.table(), schema.REQUESTS),
            preemption_table=ResultTable(self._preemptions.table(), schema.PREEMPTIONS),
            totals=self._totals,
            streaks=self.requests.streaks,
            occupancy_s=self.occupancy_s,
        )
