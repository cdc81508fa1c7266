"""When tokens came, without a value a token: streaks of steps, and the steps' ends."""

from __future__ import annotations

import tempfile
from functools import cached_property
from itertools import accumulate, pairwise
from math import fsum, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.results.tables.columns import Columns
from sim.results.tables.percentiles import percentiles
from sim.results.tables.steps import BATCH_ROWS
from workloads.requests.long_arrays import Collector, mapped, spilled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sim.results.tables.columns import Array
    from sim.results.tables.steps import StepTable

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_FACTS = {"owner": "int64", "begin": "int64", "end": "int64"}


class Streaks:
    """Runs of consecutive steps that each gave a token to one request."""

    def __init__(self) -> None:
        self._columns = Columns(_FACTS)

    def add(self, owner: Array, begin: Array, end: Array) -> None:
        """Take the streaks of some requests, in order.

        Parameters
        ----------
        owner
            Id of the request of each; those of one request stand together.
        begin, end
            Its first and its last step.
        """
        self._columns.add({"owner": owner, "begin": begin, "end": end})

    @cached_property
    def owner(self) -> Integers:
        """Request of each streak; those of one stand together, in order."""
        return self._columns.pop("owner")

    @cached_property
    def begin(self) -> Integers:
        """First step of each streak."""
        return self._columns.pop("begin")

    @cached_property
    def end(self) -> Integers:
        """Last step of each streak."""
        return self._columns.pop("end")


class _Kept:
    """Batches of latencies, to be looked at again: many of them lie in files."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._values = Collector("float64")
        self._weights = Collector("int32")

    def add(self, values: Floats, weights: Integers) -> None:
        self._lengths.append(len(values))
        self._values.add(values)
        self._weights.add(weights)

    def batches(self) -> Iterator[tuple[Floats, Integers]]:
        """Yield the same batches: sums depend on where one begins."""
        stops = accumulate(self._lengths)
        for length, stop in zip(self._lengths, stops, strict=True):
            here = slice(stop - length, stop)
            values, weights = (
                mapped(column.kept())[here] for column in (self._values, self._weights)
            )
            yield values, weights.astype(np.int64)


class InterTokenLatencies:
    """The inter-token latencies of all served requests.

    A step is the latency of as many tokens as have their predecessor in the step
    before; a request that paused has one latency more for each pause.

    Parameters
    ----------
    steps
        All steps of the run.
    streaks
        Of the served requests.
    """

    def __init__(self, steps: StepTable, streaks: Streaks) -> None:
        self.steps = steps
        self.streaks = streaks
        self._kept: _Kept | None = None
        self._ranked: dict[tuple[float, ...], list[float]] = {}

    @property
    def values_s(self) -> Floats:
        """Distinct latencies in seconds, one a step and one a pause."""
        return np.concatenate([np.zeros(0), *(values for values, _ in self.batches())])

    @property
    def weights(self) -> Integers:
        """How many tokens came after each of `values_s`."""
        weights = (weights for _, weights in self.batches())
        return np.concatenate([np.zeros(0, np.int64), *weights])

    def batches(self) -> Iterator[tuple[Floats, Integers]]:
        """Yield latencies in seconds, and how many tokens came after each."""
        if self._kept is not None:
            yield from self._kept.batches()
            return
        kept = _Kept()
        for values, weights in self._read():
            yield values, weights
            kept.add(values, weights)
        self._kept = kept

    def _read(self) -> Iterator[tuple[Floats, Integers]]:
        pauses = _Pauses(self.streaks)
        begins, ends = self._changes
        step, last_end_s, num_open = 0, 0.0, 0
        for end_s in output_times(self.steps):
            window = (step, step + len(end_s))
            changes = _counts(begins, window) - _counts(ends, window)
            weights = num_open + np.cumsum(changes)
            values = np.diff(end_s, prepend=last_end_s)
            pauses.note(step, end_s)
            step, last_end_s, num_open = window[1], float(end_s[-1]), int(weights[-1])
            used = weights > 0
            yield values[used], weights[used]
        yield from pauses.batches()

    @cached_property
    def _changes(self) -> tuple[Integers, Integers]:
        """Steps, sorted, from which on one request more, or less, has a latency."""
        # A streak from step a to step b has one interval in each of a+1 .. b.
        begins, ends = (
            spilled(np.sort(steps) + 1)
            for steps in (self.streaks.begin, self.streaks.end)
        )
        return begins, ends

    @cached_property
    def moments(self) -> tuple[int, float, float]:
        """Number of latencies, their mean and standard deviation in seconds."""
        sums = [(int(w.sum()), float((v * w).sum())) for v, w in self.batches()]
        number = sum(weight for weight, _ in sums)
        if not number:
            return 0, 0.0, 0.0
        mean = fsum(each for _, each in sums) / number
        squares = fsum(float(((v - mean) ** 2 * w).sum()) for v, w in self.batches())
        return number, mean, sqrt(squares / number)

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Return percentiles, each token counted, as ``numpy.percentile`` does.

        Raises
        ------
        ValueError
            If there is no latency at all.
        """
        asked = tuple(percents)
        if asked not in self._ranked:  # of a run, and of its only pool
            self._ranked[asked] = percentiles(self.batches, asked)
        return self._ranked[asked]


def output_times(steps: StepTable) -> Iterator[Floats]:
    """Yield when the tokens of steps appeared, in seconds, batch by batch.

    That is the end of a step, unless steps are formed before the last output is there.
    """
    if "output_s" in steps.kinds:
        for batch in steps.batches(("output_s",)):
            yield batch["output_s"]
        return
    for batch in steps.batches(("start_s", "latency_s")):
        yield batch["start_s"] + batch["latency_s"]


def _counts(steps: Integers, window: tuple[int, int]) -> Integers:
    """Return how many of the sorted `steps` each step of a window is."""
    first, stop = np.searchsorted(steps, window)
    return np.bincount(steps[first:stop] - window[0], minlength=window[1] - window[0])


class _Pauses:
    """Intervals between the end of a streak and the first token of the next."""

    def __init__(self, streaks: Streaks) -> None:
        follows = np.flatnonzero(streaks.owner[1:] == streaks.owner[:-1])
        # The step before and the step after each pause, one pause after another.
        steps = np.stack([streaks.end[follows], streaks.begin[follows + 1]], axis=1)
        self._order = np.argsort(steps, axis=None, kind="stable")
        self._steps = steps.reshape(-1)[self._order]
        self._end_s = np.zeros(len(self._steps))

    def note(self, step: int, end_s: Floats) -> None:
        """Take the ends of steps from `step` on."""
        first, stop = np.searchsorted(self._steps, (step, step + len(end_s)))
        here = slice(int(first), int(stop))
        self._end_s[self._order[here]] = end_s[self._steps[here] - step]

    def batches(self) -> Iterator[tuple[Floats, Integers]]:
        """Yield the lengths of the pauses in seconds, each once."""
        before_s, after_s = self._end_s.reshape(-1, 2).T
        values = after_s - before_s
        for first in range(0, len(values), BATCH_ROWS):
            some = values[first : first + BATCH_ROWS]
            yield some, np.ones(len(some), dtype=np.int64)


def token_times(
    steps: StepTable, streaks: Streaks, directory: Path, batch_rows: int
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield every token of the served requests: columns of `sim.results.schema.ITL`.

    Requests come by id, tokens in order, `batch_rows` at a time.

    Parameters
    ----------
    directory
        Where a file may lie meanwhile, of 8 bytes a step.
    """
    order = np.argsort(streaks.owner, kind="stable")
    owner, begin = streaks.owner[order], streaks.begin[order]
    until = np.cumsum(streaks.end[order] - begin + 1)
    before = until - (streaks.end[order] - begin + 1)
    is_first = np.diff(owner, prepend=-1) != 0
    first_token = np.maximum.accumulate(np.where(is_first, before, 0))
    num_tokens = int(until[-1]) if len(until) else 0
    with tempfile.TemporaryFile(dir=directory) as file:
        for end_s in output_times(steps):
            file.write(end_s.tobytes())
        file.flush()
        bounds = [*range(0, num_tokens, batch_rows), num_tokens]
        if num_tokens:
            all_end_s = np.memmap(file, np.float64, "r")
        for low, high in pairwise(bounds):
            tokens = np.arange(low, high)
            streak = np.searchsorted(until, tokens, side="right")
            yield {
                "request_id": owner[streak],
                "token_index": (tokens - first_token[streak] + 1).astype(np.int32),
                "time_s": all_end_s[begin[streak] + tokens - before[streak]],
            }
