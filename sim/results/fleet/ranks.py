"""The results of several engines: recorded apart, kept in one table each.

They are the data-parallel ranks of one engine, or the engines of a fleet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from sim.results import schema
from sim.results.recording.recorder import Recording
from sim.results.recording.tokens import InterTokenLatencies
from sim.results.recording.totals import StepTotals
from sim.results.recording.transfers import OffloadRecorder, joined_tiers
from sim.results.tables.memory import ResultTable
from sim.results.tables.steps import MemorySteps, ParquetSteps
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sim.results.folder import RunFolder
    from sim.results.recording.recorder import Recorder
    from sim.results.recording.tokens import Floats, Integers
    from sim.results.tables.steps import Batch, StepSink, StepTable, WrittenSteps
    from sim.scheduler.request import Request

Part = Literal["rank", "engine"]
"""The kind of a run's engines, and the column that numbers them in each table."""


ONE: Mapping[Part, str] = {"rank": "a rank", "engine": "an engine"}


def parts_of(summary: Mapping[str, Any]) -> tuple[Part, Sequence[Mapping[str, Any]]]:
    """Return the name of a run's engines, and a summary of each; none for one."""
    if ranks := summary.get("ranks"):
        return "rank", ranks
    return "engine", summary.get("engines") or ()


def waits_in_words(summary: Mapping[str, Any]) -> str:
    """Return how ranks waited for each other; empty if they did not step together."""
    if (share := summary.get("wait_share")) is None:
        return ""
    return f"{summary['num_dummy_steps']:,} dummy steps, {share:.1%} of time waiting"


# -- recording -----------------------------------------------------------------------


class _SharedSink:
    """The sink of the steps of all ranks: batch by batch, each of one rank.

    `kinds` are its columns; in memory they are asked for with the first batch, when
    the columns of every engine are known.
    """

    def __init__(
        self,
        sink: StepSink | None,
        num_ranks: int,
        part: Part,
        kinds: Callable[[], Mapping[str, str]],
    ) -> None:
        self._sink = sink
        self._num_open = num_ranks
        self._kinds = kinds
        self.part = part
        self.num_batches = 0
        self.table: WrittenSteps | None = None

    @property
    def sink(self) -> StepSink:
        if self._sink is None:
            self._sink = MemorySteps(kinds=self._kinds())
        return self._sink

    @cached_property
    def has_outputs(self) -> bool:
        """Whether some of the engines have several steps in flight."""
        return "output_s" in self._kinds()

    @cached_property
    def written_kinds(self) -> Mapping[str, str]:
        """Columns of the table, read once for all ranks."""
        assert self.table is not None
        return self.table.kinds

    def write(self, batch: Batch) -> None:
        self.num_batches += 1
        self.sink.write(batch)

    def close(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.table = self.sink.close()


class _RankSink:
    """Adds to each step its rank, and the seconds that it waited for others."""

    def __init__(
        self, shared: _SharedSink, rank: int, waits_s: Sequence[float]
    ) -> None:
        self._shared = shared
        self._rank = rank
        self._waits_s = waits_s
        self._num_steps = 0
        self._batches: list[int] = []
        self.num_dummy_steps = 0
        self.wait_s = 0.0

    def write(self, batch: Batch) -> None:
        size = len(batch["step"])
        first, self._num_steps = self._num_steps, self._num_steps + size
        waits_s = np.zeros(size)
        some = self._waits_s[first : first + size]
        waits_s[: len(some)] = some
        self.wait_s += float(waits_s.sum())
        self.num_dummy_steps += size - int(
            np.count_nonzero(batch["num_batched_tokens"])
        )
        told = {self._shared.part: np.full(size, self._rank), "wait_s": waits_s}
        if self._shared.has_outputs and "output_s" not in batch:
            told["output_s"] = batch["start_s"] + batch["latency_s"]
        self._batches.append(self._shared.num_batches)
        self._shared.write(batch | told)

    def close(self) -> WrittenSteps:
        self._shared.close()
        return _OwnSteps(self._shared, self._batches, self._num_steps)


class _OwnSteps:
    """The steps of one rank: those batches of all that are its own."""

    def __init__(
        self, shared: _SharedSink, batches: Sequence[int], num_steps: int
    ) -> None:
        self._shared = shared
        self._batches = batches
        self.num_steps = num_steps

    @property
    def kinds(self) -> Mapping[str, str]:
        return self._shared.written_kinds

    @property
    def _table(self) -> WrittenSteps:
        assert self._shared.table is not None
        return self._shared.table

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        return self._table.pieces(self._batches, columns)

    def pieces(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Batch]:
        own = [self._batches[number] for number in numbers]
        return self._table.pieces(own, columns)


class RankRecorders:
    """The recorders of all ranks, in the place of the one `Recorder` of a run.

    Parameters
    ----------
    of_rank
        The recorder of each.
    waits_s
        By rank the seconds that each step waited for others, filled by the time steps
        are emitted; None for engines that wait for no other.
    part
        The kind of the engines.
    """

    def __init__(
        self,
        of_rank: Sequence[Recorder],
        waits_s: Sequence[Sequence[float] | None],
        *,
        part: Part = "rank",
    ) -> None:
        self.part = part
        self._waits_s = waits_s
        self.of_rank = of_rank
        self._begin(None)

    @property
    def step_kinds(self) -> Mapping[str, str]:
        """Columns of the steps that go into the sink."""
        kinds: dict[str, str] = {}
        for each in self.of_rank:
            kinds |= each.step_kinds
        is_rank = self.part == "rank"
        kinds |= schema.RANKS if is_rank else schema.ENGINES
        waits = is_rank or any(each is not None for each in self._waits_s)
        return kinds | schema.RANK_STEPS if waits else kinds

    @property
    def sink(self) -> StepSink:
        """The sink of the steps of all ranks."""
        return self._shared.sink

    @sink.setter
    def sink(self, sink: StepSink) -> None:
        self._begin(sink)

    def _begin(self, sink: StepSink | None) -> None:
        num_ranks = len(self.of_rank)
        shared = _SharedSink(sink, num_ranks, self.part, lambda: self.step_kinds)
        self._shared = shared
        self._sinks = [
            _RankSink(shared, rank, () if waits_s is None else waits_s)
            for rank, waits_s in enumerate(self._waits_s)
        ]
        for recorder, own in zip(self.of_rank, self._sinks, strict=True):
            recorder.sink = own

    def wait_s(self, rank: int) -> float:
        """Return seconds that a rank waited for others, in all steps."""
        return self._sinks[rank].wait_s

    def num_dummy_steps(self, rank: int) -> int:
        """Return how many of its steps computed nothing."""
        return self._sinks[rank].num_dummy_steps

    @property
    def active(self) -> dict[int, Request]:
        return {k: v for each in self.of_rank for k, v in each.active.items()}

    @property
    def num_arrived(self) -> int:
        return sum(each.num_arrived for each in self.of_rank)

    @property
    def num_finished(self) -> int:
        return sum(each.num_finished for each in self.of_rank)

    @property
    def num_left(self) -> int:
        return sum(each.num_left for each in self.of_rank)

    def finish(self, now_s: float) -> Recording:
        """Close the books at `now_s`."""
        recordings = [each.finish(now_s) for each in self.of_rank]
        steps = self._shared.table
        assert steps is not None
        whole = merged(recordings, steps, self.part)
        tiers = [each.tier_table for each in recordings if each.tier_table is not None]
        if not tiers:
            return whole
        logs = [e.transfers for e in self.of_rank if isinstance(e, OffloadRecorder)]
        shared = frozenset[str]().union(*(log.shared for log in logs))
        return replace(whole, tier_table=joined_tiers(tiers, shared))


@dataclass(frozen=True)
class RankedRecording(Recording):
    """A run's tables with the rank of each row, and the recording of each rank."""

    parts: tuple[Recording, ...] = ()

    @property
    def of_rank(self) -> tuple[Recording, ...]:
        return self.parts

    @cached_property
    def itl(self) -> InterTokenLatencies:
        """Inter-token latencies of served requests, of all ranks."""
        return _Joined([each.itl for each in self.of_rank])


class _Joined(InterTokenLatencies):
    def __init__(self, parts: Sequence[InterTokenLatencies]) -> None:
        super().__init__(parts[0].steps, parts[0].streaks)
        self._parts = parts

    def batches(self) -> Iterator[tuple[Floats, Integers]]:
        for part in self._parts:  # each keeps its own
            yield from part.batches()


def merged(
    recordings: Sequence[Recording], steps: StepTable, part: Part = "rank"
) -> RankedRecording:
    """Return one recording of all ranks, requests by id and others in time."""
    groups = [each.group_table for each in recordings]
    found = [table for table in groups if table is not None]
    copies = [e.transfer_table for e in recordings if e.transfer_table is not None]
    trees = [each.tree_table for each in recordings if each.tree_table is not None]
    return RankedRecording(
        step_table=steps,
        request_table=_joined(
            [each.request_table for each in recordings], "request_id", part
        ),
        preemption_table=_joined(
            [each.preemption_table for each in recordings], "time_s", part
        ),
        totals=StepTotals.merged([each.totals for each in recordings]),
        streaks=recordings[0].streaks,
        occupancy_s=added(each.occupancy_s for each in recordings),
        group_table=_joined(found, "time_s", part) if found else None,
        tree_table=_joined(trees, "time_s", part) if trees else None,
        transfer_table=_joined(copies, "begin_s", part) if copies else None,
        parts=tuple(recordings),
    )


def _joined(tables: Sequence[ResultTable], by: str, part: Part) -> ResultTable:
    kinds = dict(tables[0].kinds) | {part: "int64"}
    arrows = [
        table.arrow.append_column(part, pa.array([rank] * table.num_rows, pa.int64()))
        for rank, table in enumerate(tables)
    ]
    whole = pa.concat_tables(arrows).unify_dictionaries().combine_chunks()
    order = np.argsort(np.concatenate([table[by] for table in tables]), kind="stable")
    return _taken(whole, order, kinds)


def _taken(arrow: pa.Table, rows: Any, kinds: Mapping[str, str]) -> ResultTable:
    columns = {}
    for name in arrow.column_names:
        column = arrow[name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # none of no rows
            column = column.chunk(0)
        columns[name] = column.take(pa.array(rows))
    return ResultTable(columns, kinds)


# -- reading -------------------------------------------------------------------------


class RankSteps:
    """The steps of one rank, in order, out of a table of all."""

    def __init__(
        self, steps: ParquetSteps | MemorySteps, rank: int, part: Part = "rank"
    ) -> None:
        self._steps = steps
        self._rank = rank
        self._part = part

    @cached_property
    def _numbers(self) -> Sequence[int]:
        """The batches that have steps of this rank."""
        return self._steps.holding(self._part, self._rank)

    @property
    def kinds(self) -> Mapping[str, str]:
        return self._steps.kinds

    @property
    def num_steps(self) -> int:
        return sum(len(batch["step"]) for batch in self.batches(("step",)))

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        part = self._part
        names = [*dict.fromkeys((*columns, part))]
        for batch in self._steps.pieces(self._numbers, names):
            own = batch[part] == self._rank
            if own.all():
                yield {name: batch[name] for name in columns}
            elif own.any():
                yield {name: batch[name][own] for name in columns}


@dataclass(frozen=True)
class RankTables:
    """The tables of one rank, as `Recording` and `RunFolder` have them of all."""

    step_table: StepTable
    request_table: ResultTable
    preemption_table: ResultTable
    group_table: ResultTable | None
    tree_table: ResultTable | None


def tables_of_rank(found: Recording | RunFolder, rank: int) -> RankTables:
    """Return the rows of one rank, of a run just simulated or read again.

    Of a fleet, those of one engine.
    """
    part: Part = "engine" if "engine" in found.request_table.kinds else "rank"

    def own(table: ResultTable) -> ResultTable:
        rows = np.flatnonzero(table[part] == rank)
        return _taken(table.arrow, rows, table.kinds)

    groups, tree, steps = found.group_table, found.tree_table, found.step_table
    assert isinstance(steps, ParquetSteps | MemorySteps)  # those of all
    return RankTables(
        RankSteps(steps, rank, part),
        own(found.request_table),
        own(found.preemption_table),
        None if groups is None else own(groups),
        None if tree is None else own(tree),
    )
