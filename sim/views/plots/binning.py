"""From millions of steps to the columns of a screen, batch by batch, extremes kept.

A step holds its values from its start until its end (or until the next step starts,
if that is earlier). Between steps the engine is idle: a value of a step, such as its
latency, has a gap there; a value of the engine, such as the length of a queue, is 0::

    steps            |-a-|-b-|         |---c---|
    columns          |     |     |     |     |     |
    high, of steps     a|b    b    nan    c     c
    high, of engine    a|b    b     0     c     c
    low, of engine     a|b    0     0     0     0

`StepColumns.place` finds the columns of a batch; `Envelope`, `StepMeans` and `Medians`
gather a value over batches and are read after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sim.results.tables.steps import span_columns, spans_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from sim.results.tables.steps import StepTable

    Floats: TypeAlias = npt.NDArray[np.float64]
    Indices: TypeAlias = npt.NDArray[np.intp]


IDLE_SHARE = 1e-6
"""Share of a column's width below which a pause between steps is rounding."""

MAX_MEDIAN_STEPS = 1 << 20
"""Steps of a column that a median is taken of; of more, evenly spaced ones."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Some columns, and for each a range of steps of a batch, none of them empty."""

    columns: Indices
    first: Indices
    stop: Indices
    """One past the last."""

    @classmethod
    def of(cls, lowest_column: int, first: Indices, stop: Indices) -> Spans:
        """Take the columns from `lowest_column` on, those without a step left out."""
        held = np.flatnonzero(first < stop)
        return cls(lowest_column + held, first[held], stop[held])

    def reduce(self, ufunc: np.ufunc, values: Floats) -> Floats:
        """Return one number a column; `values` has one more entry than steps."""
        # `reduceat` takes [first, stop) pairs one after the other; numbers between the
        # pairs are dropped, and a stop may be one past the last step.
        pairs = np.stack([self.first, self.stop], axis=1).ravel()
        reduced: Floats = ufunc.reduceat(values, pairs)[::2]
        return reduced


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch of steps and where it lies in the columns."""

    inside: Spans
    """Steps that a column holds, if only in part."""
    started: Spans
    """Steps that start in a column."""
    length_s: Floats
    """Length of each step, and a 0 after the last."""
    before_s: Floats
    """Of each span's first step, the time before the column; 0 or more."""
    after_s: Floats
    """Of each span's last step, the time after the column."""

    def integral(self, values: Floats) -> Floats:
        """Return the integral over each column; `values` as for `Spans.reduce`."""
        whole = self.inside.reduce(np.add, values * self.length_s)
        whole -= values[self.inside.first] * self.before_s
        whole -= values[self.inside.stop - 1] * self.after_s
        return whole


class StepColumns:
    """Equal columns of simulated time, and how much of each is busy."""

    def __init__(self, stop_s: float, num_columns: int) -> None:
        self.edges_s: Floats = np.linspace(0.0, stop_s, num_columns + 1)
        self.busy_s: Floats = np.zeros(num_columns)

    @property
    def num_columns(self) -> int:
        return self.busy_s.size

    @property
    def width_s(self) -> float:
        return float(self.edges_s[1] - self.edges_s[0])

    @property
    def is_partly_idle(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of each column, whether some of it is outside of all steps placed so far."""
        partly: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            self.busy_s < (1.0 - IDLE_SHARE) * self.width_s
        )
        return partly

    def place(self, start_s: Floats, end_s: Floats) -> Placed:
        """Find the columns of some steps, all later than those placed before.

        No step ends after the next one starts, the first of the next call included.
        """
        low = int(np.searchsorted(self.edges_s[1:], start_s[0], "right"))
        high = int(np.searchsorted(self.edges_s[:-1], end_s[-1], "right"))
        edges_s = self.edges_s[low : max(low, high) + 1]
        left_s, right_s = edges_s[:-1], edges_s[1:]
        inside = Spans.of(
            low,
            np.searchsorted(end_s, left_s, "right"),
            np.searchsorted(start_s, right_s, "left"),
        )
        starts = np.searchsorted(start_s, edges_s, "left")
        touched = inside.columns - low
        placed = Placed(
            inside=inside,
            started=Spans.of(low, starts[:-1], starts[1:]),
            length_s=np.append(end_s - start_s, 0.0),
            before_s=np.maximum(left_s[touched] - start_s[inside.first], 0.0),
            after_s=np.maximum(end_s[inside.stop - 1] - right_s[touched], 0.0),
        )
        self.busy_s[inside.columns] += placed.integral(np.ones(start_s.size + 1))
        return placed


class Envelope:
    """Lowest, highest and mean value of each column; idle time may count as 0."""

    def __init__(self, columns: StepColumns, *, idle_is_zero: bool = False) -> None:
        self.columns = columns
        self._idle_is_zero = idle_is_zero
        self._low: Floats = np.full(columns.num_columns, np.nan)
        self._high: Floats = np.full(columns.num_columns, np.nan)
        self._integral: Floats = np.zeros(columns.num_columns)

    def add(self, placed: Placed, values: Floats) -> None:
        """Add a batch; `values` has one more entry than steps, which is ignored."""
        at = placed.inside.columns
        low = placed.inside.reduce(np.minimum, values)
        high = placed.inside.reduce(np.maximum, values)
        self._low[at] = np.fmin(self._low[at], low)
        self._high[at] = np.fmax(self._high[at], high)
        self._integral[at] += placed.integral(values)

    @property
    def low(self) -> Floats:
        if not self._idle_is_zero:
            return self._low
        return np.where(self.columns.is_partly_idle, 0.0, self._low)

    @property
    def high(self) -> Floats:
        if not self._idle_is_zero:
            return self._high
        return np.nan_to_num(self._high, nan=0.0)

    @property
    def mean(self) -> Floats:
        columns, mean = self.columns, self.low.copy()
        over_s = columns.width_s if self._idle_is_zero else columns.busy_s
        np.divide(self._integral, over_s, out=mean, where=columns.busy_s > 0.0)
        # Not beyond the extremes by rounding.
        return np.clip(mean, self.low, self.high)


class StepMeans:
    """Mean over the steps that start in each column, each step counted once."""

    def __init__(self, columns: StepColumns) -> None:
        self.columns = columns
        self._running: Floats = np.full(columns.num_columns, np.nan)
        self._total: Floats = np.zeros(columns.num_columns)
        self._num_steps: Floats = np.zeros(columns.num_columns)

    def add(self, placed: Placed, values: Floats) -> None:
        """Add a batch; `values` has one more entry than steps, which is ignored."""
        inside, started = placed.inside, placed.started
        self._running[inside.columns] = values[inside.first]
        self._total[started.columns] += started.reduce(np.add, values)
        self._num_steps[started.columns] += started.stop - started.first

    @property
    def mean(self) -> Floats:
        """Mean of each column.

        A column in which no step starts has the value of the one that is still
        running, or a gap.
        """
        mean, some = self._running.copy(), self._num_steps > 0.0
        return np.divide(self._total, self._num_steps, out=mean, where=some)


class Medians:
    """Median over the steps of each column, each step counted once.

    Columns are filled from left to right, so that only the values of one of them are
    held at any time; of a column with more than `max_steps`, every second, fourth,
    eighth... step counts.
    """

    def __init__(self, columns: StepColumns, max_steps: int = MAX_MEDIAN_STEPS) -> None:
        self.columns = columns
        self._median: Floats = np.full(columns.num_columns, np.nan)
        self._max_steps = max_steps
        self._open(-1)

    def add(self, placed: Placed, values: Floats) -> None:
        """Add a batch; `values` has one more entry than steps, which is ignored."""
        inside = placed.inside
        for column, first, stop in zip(
            inside.columns.tolist(),
            inside.first.tolist(),
            inside.stop.tolist(),
            strict=True,
        ):
            if column != self._column:
                self._close()
                self._open(column)
            self._keep(values[first:stop])

    @property
    def median(self) -> Floats:
        self._close()
        return self._median

    def _open(self, column: int) -> None:
        self._column = column
        self._kept: list[Floats] = []
        self._num_kept = self._num_seen = 0
        self._every = 1

    def _keep(self, values: Floats) -> None:
        kept = values[-self._num_seen % self._every :: self._every]
        self._num_seen += values.size
        self._num_kept += kept.size
        self._kept.append(kept)
        while self._num_kept > self._max_steps:
            fewer = np.concatenate(self._kept)[::2].copy()
            self._kept, self._num_kept = [fewer], fewer.size
            self._every *= 2

    def _close(self) -> None:
        if self._num_kept:
            self._median[self._column] = np.median(np.concatenate(self._kept))


def extremes_per_column(x: Floats, y: Floats, edges: Floats) -> Indices:
    """Return the indices of the points to keep: lowest and highest y per column."""
    if not x.size:
        return np.zeros(0, dtype=np.intp)
    column = np.searchsorted(edges, x, "right")
    order = np.lexsort((y, column))
    first = np.flatnonzero(np.diff(column[order], prepend=-1))
    last = np.append(first[1:], x.size) - 1
    return np.unique(order[np.concatenate([first, last])])


def cdf_points(values: Floats, num_points: int) -> tuple[Floats, Floats]:
    """Return sorted values, and the share of all that is no larger than each.

    They are thinned to `num_points`, both ends kept; there is no NaN among them.
    """
    ordered = np.sort(values)
    kept = np.linspace(0, ordered.size - 1, min(num_points, ordered.size))
    index = np.unique(kept.astype(np.intp))
    return ordered[index], (index + 1.0) / ordered.size


def with_ends(
    steps: StepTable, columns: Sequence[str]
) -> Iterator[tuple[Mapping[str, Floats], Floats]]:
    """Yield the batches, and where their steps end: when the next one starts at last.

    A batch is held back until the next one tells when its first step starts.
    """
    held: Mapping[str, Floats] | None = None
    names = dict.fromkeys((*columns, *span_columns(steps)))
    for raw in steps.batches(list(names)):
        batch = {name: np.asarray(raw[name], dtype=np.float64) for name in names}
        if not batch["start_s"].size:
            continue
        if held is not None:
            yield held, _ends(held, float(batch["start_s"][0]))
        held = batch
    if held is not None:
        yield held, _ends(held, np.inf)


def _ends(batch: Mapping[str, Floats], next_s: float) -> Floats:
    start_s = batch["start_s"]
    ends_s: Floats = np.minimum(
        start_s + spans_s(batch, next_s), np.append(start_s[1:], next_s)
    )
    return ends_s


def end_s(steps: StepTable) -> float:
    """Return when the last step ended; 0 without any."""
    ends_s = 0.0
    for batch in steps.batches(span_columns(steps)):
        if len(batch["start_s"]):
            ends_s = float(batch["start_s"][-1] + spans_s(batch)[-1])
    return ends_s
