"""The steps of a run, read in batches: from memory or from disk, never all at once."""

from __future__ import annotations

from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from sim.results import schema
from sim.results.tables.memory import as_recorded, to_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    import pyarrow as pa

BATCH_ROWS = 65_536
"""Steps a batch, but for the last: the same wherever the table lies, so that a sum
over batches has the same bits everywhere; also rows of a row group on disk."""

_SPAN = ("start_s", "latency_s", "output_s")
_ENGINES = (*schema.RANKS, *schema.ENGINES)

Batch = dict[str, npt.NDArray[Any]]
"""Some columns of steps in a row, equally long."""


def span_columns(steps: StepTable) -> tuple[str, ...]:
    """Return the columns that `spans_s` reads."""
    more = [name for name in ("output_s", *_ENGINES) if name in steps.kinds]
    return ("start_s", "latency_s", *more)


def spans_s(
    batch: Mapping[str, npt.NDArray[Any]], next_s: float = inf
) -> npt.NDArray[np.float64]:
    """Return for how long each step says how its engine is.

    That is until it ends or, where several are in flight, until its output is
    processed or the next one begins: no second is counted twice.

    Parameters
    ----------
    batch
        Columns of `span_columns`, of steps in a row.
    next_s
        When the step after the last one begins, if they are of one engine.
    """
    if "output_s" not in batch:
        return batch["latency_s"]
    for name in _ENGINES:
        if name in batch:
            return _spans_by_engine(batch, name)
    start_s, latency_s, ends_s = (np.asarray(batch[name]) for name in _SPAN)
    is_unseen = np.isnan(ends_s)
    if is_unseen.any():  # when a run was interrupted: due with the step at the latest
        ends_s = np.where(is_unseen, start_s + latency_s, ends_s)
    spans = np.empty(len(start_s))
    np.minimum(ends_s[:-1], start_s[1:], out=spans[:-1])
    spans[-1:] = np.minimum(ends_s[-1:], next_s)
    spans -= start_s
    return spans


def engines_in(column: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the values of a column of engines or ranks, which come in long runs."""
    column = np.asarray(column)
    is_last = column[:-1] != column[1:]
    return np.unique(np.append(column[:-1][is_last], column[-1:]))


def _spans_by_engine(
    batch: Mapping[str, npt.NDArray[Any]], name: str
) -> npt.NDArray[np.float64]:
    spans = np.empty(len(batch[name]))
    for engine in engines_in(batch[name]):
        is_own = batch[name] == engine
        own = {each: batch[each][is_own] for each in _SPAN}
        spans[is_own] = spans_s(own)
    return spans


class StepTable(Protocol):
    """One row a step, see `sim.results.schema.STEPS`."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """Columns, and their types."""
        ...

    @property
    def num_steps(self) -> int: ...

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """Yield `columns` in order of steps, `BATCH_ROWS` rows at a time.

        Nothing is yielded of an empty table. The arrays may be views: do not write
        into them.
        """


class WrittenSteps(StepTable, Protocol):
    """A table that knows the batches in which it was written."""

    def pieces(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Batch]:
        """Yield `columns` of those batches that were written as these, from 0 on."""


class StepSink(Protocol):
    """Where a recorder puts the steps of a run."""

    def write(self, batch: Batch) -> None:
        """Take `BATCH_ROWS` steps, or the last few: all columns, and maybe others.

        The arrays never change, and may be kept.
        """

    def close(self) -> WrittenSteps:
        """Return all steps; nothing is written afterwards."""


class FrameSteps:
    """Steps in memory."""

    kinds: Mapping[str, str] = schema.STEPS

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame

    @property
    def num_steps(self) -> int:
        return len(self.frame)

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        for begin in range(0, len(self.frame), BATCH_ROWS):
            rows = slice(begin, begin + BATCH_ROWS)
            yield {name: self.frame[name].to_numpy()[rows] for name in columns}


class ParquetSteps:
    """Steps on disk, read row group by row group of `BATCH_ROWS` rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._holding: dict[str, dict[int, list[int]]] = {}

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        ours = schema.STEPS | schema.AHEAD_STEPS | schema.DRAFT_STEPS
        ours |= schema.RANKS | schema.RANK_STEPS | schema.ENGINES
        return {
            name: ours[name] for name in self._metadata.schema.names if name in ours
        }

    @property
    def num_steps(self) -> int:
        return int(self._metadata.num_rows)

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        """The index at the end of the file, long where there are many row groups."""
        return pq.read_metadata(self.path)

    def _open(self) -> pq.ParquetFile:
        # A buffer ahead of the reader would hold on to the columns of the whole file.
        return pq.ParquetFile(self.path, metadata=self._metadata, pre_buffer=False)

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        with self._open() as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=list(columns)):
                yield _in_numpy(batch, columns)

    def pieces(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Batch]:
        names = list(columns)
        with self._open() as file:
            for number in numbers:
                for batch in file.iter_batches(BATCH_ROWS, [number], names):
                    yield _in_numpy(batch, columns)

    def holding(self, column: str, value: int) -> Sequence[int]:
        """Return the numbers of the batches with steps of an engine or a rank.

        Its column is read once for all of them.
        """
        if column not in self._holding:
            with self._open() as file:
                self._holding[column] = _numbers_by_value(
                    (number, _in_numpy(batch, (column,))[column])
                    for number in range(file.num_row_groups)
                    for batch in file.iter_batches(BATCH_ROWS, [number], [column])
                )
        return self._holding[column].get(value, ())


def _numbers_by_value(
    columns: Iterable[tuple[int, npt.NDArray[Any]]],
) -> dict[int, list[int]]:
    """Return by value the numbers of the columns that it is in."""
    found: dict[int, dict[int, None]] = {}
    for number, column in columns:
        for value in engines_in(column).tolist():
            found.setdefault(value, {})[number] = None
    return {value: [*numbers] for value, numbers in found.items()}


def _in_numpy(batch: pa.RecordBatch, columns: Sequence[str]) -> Batch:
    # Not `to_numpy`, which imports pandas.
    return {name: to_numpy(as_recorded(batch.column(name))) for name in columns}


class MemorySteps:
    """Steps that stay in memory: sink and table in one, at most 270 bytes a step.

    With `columns`, those are kept, in place of all of them.
    """

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        kinds: Mapping[str, str] = schema.STEPS,
    ) -> None:
        self.kinds = kinds
        self.num_steps = 0
        more = [name for name in kinds if name not in schema.STEPS]
        self._columns = None if columns is None else [*columns, *more]
        self._batches: list[Batch] = []
        self._begins: list[int] = []  # of the batches as they were written
        self._frame: pd.DataFrame | None = None

    def write(self, batch: Batch) -> None:
        self._begins.append(self.num_steps)
        self.num_steps += len(batch["step"])
        names = self.kinds if self._columns is None else self._columns
        self._batches.append({name: batch[name] for name in names})

    def close(self) -> MemorySteps:
        return self

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        if self._frame is not None:
            yield from FrameSteps(self._frame).batches(columns)
        for batch in self._batches:
            yield {name: batch[name] for name in columns}

    def pieces(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Batch]:
        ends = [*self._begins[1:], self.num_steps]
        for number in numbers:
            if self._frame is None:
                batch = self._batches[number]
                yield {name: batch[name] for name in columns}
            else:
                rows = slice(self._begins[number], ends[number])
                yield {name: self._frame[name].to_numpy()[rows] for name in columns}

    def holding(self, column: str, value: int) -> Sequence[int]:
        """Return the numbers of the batches with steps of an engine or a rank."""
        pieces = self.pieces(range(len(self._begins)), (column,))
        found = _numbers_by_value(enumerate(each[column] for each in pieces))
        return found.get(value, ())

    def frame(self) -> pd.DataFrame:
        """Return all steps; the batches are given up for it, one by one."""
        if self._frame is None:
            self._frame = _joined(self._batches, self.kinds)
            self._batches = []
        return self._frame


def frame_of(steps: StepTable) -> pd.DataFrame:
    """Return all steps at once: some 260 bytes each."""
    if isinstance(steps, MemorySteps):
        return steps.frame()
    return _joined([*steps.batches(list(steps.kinds))], steps.kinds)


def _joined(batches: list[Batch], kinds: Mapping[str, str]) -> pd.DataFrame:
    """Return batches as one frame, and empty them on the way."""
    import pandas as pd  # noqa: PLC0415  (slow to import, and a run needs none)

    num_steps = sum(len(batch["step"]) for batch in batches)
    columns = {name: np.empty(num_steps, kind) for name, kind in kinds.items()}
    begin = 0
    batches.reverse()
    while batches:
        batch = batches.pop()
        rows = slice(begin, begin + len(batch["step"]))
        for name, column in columns.items():
            column[rows] = batch[name]
        begin = rows.stop
    return pd.DataFrame(columns, copy=False)
