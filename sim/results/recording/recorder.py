"""The recorder of a run: its events, taken down as they happen."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cache.errors import require
from sim.results import schema
from sim.results.recording.requests import PreemptionRows, RequestRows
from sim.results.recording.step_log import StepLog, UnkeptLog
from sim.results.recording.tokens import InterTokenLatencies, Streaks
from sim.results.recording.totals import StepTotals
from sim.results.tables.steps import MemorySteps, frame_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from sim.results.recording.step_columns import ColumnMaker
    from sim.results.recording.usage import GroupUsage, PrefixTreeUsage
    from sim.results.tables.memory import ResultTable
    from sim.results.tables.steps import Batch, StepSink, StepTable
    from sim.scheduler.base import Preemption, Scheduler
    from sim.scheduler.request import Request


@dataclass(frozen=True)
class Recording:
    """The tables of a run (`sim.results.schema`), and totals for the summary.

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
    group_table
        One row a change of a KV cache group's blocks, if there are several kinds.
    transfer_table, tier_table
        One row a copy, and one a change of the contents of the tier behind the pool,
        if there is one.
    fleet_table
        One row a time and pool, of a fleet.
    tree_table
        One row a change of a tree of prefixes, if there is one.
    """

    step_table: StepTable
    request_table: ResultTable
    preemption_table: ResultTable
    totals: StepTotals
    streaks: Streaks
    occupancy_s: float
    group_table: ResultTable | None = None
    transfer_table: ResultTable | None = None
    tier_table: ResultTable | None = None
    fleet_table: ResultTable | None = None
    tree_table: ResultTable | None = None

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All steps in memory, 260 bytes each; `step_table` gives them in batches."""
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
    def of_rank(self) -> tuple[Recording, ...]:
        """The recording of each engine: itself, where there is one."""
        return (self,)

    @property
    def extrapolated_share(self) -> float:
        """Share of the engine's busy time that the cost model extrapolated."""
        return self.totals.extrapolated_share


class Recorder:
    """Takes down every step, request and preemption of one run.

    Memory does not grow with the number of steps, if the sink's does not: steps go
    there in batches of a fixed length, the same whether they were taken one by one or
    in stretches. A request costs about 100 bytes, a preemption about 70, and of many
    neither: long columns lie in files.

    Parameters
    ----------
    sink
        Takes the steps; keeps them in memory unless said otherwise.
    keeps_steps
        Whether steps are kept at all; without them there are no totals either.
    groups
        Takes the blocks of kinds of KV cache groups, if there are several.
    tree
        Takes the tokens and nodes of a tree of prefixes, if there is one.
    front_end_s
        Seconds that latencies have besides; see `RequestRows`.
    num_recorders
        How many there are in the run; of many, each collects less at a time.
    maker
        Of the columns of their steps, one for all.

    Attributes
    ----------
    steps
        The log that the engine fills.
    active
        Requests in the system by id.
    """

    def __init__(
        self,
        sink: StepSink | None = None,
        *,
        keeps_steps: bool = True,
        groups: GroupUsage | None = None,
        tree: PrefixTreeUsage | None = None,
        front_end_s: float = 0.0,
        num_recorders: int = 1,
        maker: ColumnMaker | None = None,
    ) -> None:
        self.groups = groups
        self._tree = tree
        self._sink = sink
        self.num_arrived = 0
        self.num_finished = 0
        self.num_left = 0
        self.active: dict[int, Request] = {}
        log = StepLog if keeps_steps else UnkeptLog
        self.steps = log(self._emit, num_recorders, maker)
        self._left_s = array("d")
        self._totals = StepTotals()
        self._requests = RequestRows(front_end_s, num_recorders)
        self._preemptions = PreemptionRows()

    @property
    def step_kinds(self) -> Mapping[str, str]:
        """Columns of the steps that go into the sink, of the engine that fills it."""
        more = schema.AHEAD_STEPS if self.steps.num_in_flight else {}
        return schema.STEPS | more

    @property
    def sink(self) -> StepSink:
        """Where steps go."""
        if self._sink is None:
            self._sink = MemorySteps(kinds=self.step_kinds)
        return self._sink

    @sink.setter
    def sink(self, sink: StepSink) -> None:
        self._sink = sink

    @property
    def of_rank(self) -> Sequence[Recorder]:
        """The recorder of each engine: itself, where there is one."""
        return (self,)

    def arrived(self, request: Request) -> None:
        """Take note of an arrival, just before it is queued or rejected."""
        self.num_arrived += 1
        self.active[request.request_id] = request

    def preempted(
        self, step: int, now_s: float, preemptions: Sequence[Preemption]
    ) -> None:
        """Take note of the preemptions of a scheduler call, right after it."""
        for preemption in preemptions:
            self._preemptions.add(step, now_s, preemption)

    def finished(self, requests: Sequence[Request], num_later_steps: int = 0) -> None:
        """Take note of requests that the output of a step finished.

        It is the latest step but for `num_later_steps`, which are in flight.
        """
        active, steps = self.active, self.steps
        for request in requests:
            del active[request.request_id]
        num_requests = len(requests)
        self.num_finished += num_requests
        row = len(steps.ends_s) - 1 - num_later_steps
        steps.finished.extend((row, num_requests))
        self._requests.add(requests)

    def left(self, request: Request, now_s: float) -> None:
        """Take note of a rejected or aborted request."""
        del self.active[request.request_id]
        self.num_left += 1
        self._left_s.append(now_s)
        self._requests.add((request,))

    def moved(self, request: Request) -> None:
        """Forget a request that goes on to another engine, which has its row."""
        del self.active[request.request_id]
        self.num_arrived -= 1

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

    def _emit(self, batch: Batch) -> None:
        self._totals.add(batch)
        self.sink.write(batch)

    def finish(self, now_s: float) -> Recording:
        """Close the books at `now_s`; requests still active become rows as they are."""
        self.steps.close()
        self._totals.close(now_s)
        self._requests.add(self.active.values())
        occupancy_s = self._requests.occupancy_s(self._left_s, now_s)
        return Recording(
            step_table=self.sink.close(),
            request_table=self._requests.table(),
            preemption_table=self._preemptions.table(),
            totals=self._totals,
            streaks=self._requests.streaks,
            occupancy_s=occupancy_s,
            group_table=None if self.groups is None else self.groups.table(),
            tree_table=None if self._tree is None else self._tree.table(),
        )
