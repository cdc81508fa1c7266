"""Totals of the steps for the summary, reduced batch by batch."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING

import numpy as np

from sim.results.tables.steps import spans_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from sim.results.tables.steps import Batch

_AVERAGED = ("kv_cache_usage", "num_running", "num_waiting")
_USAGE = "kv_cache_usage"
NUM_USAGE_BINS = 2000
"""Usage is ranked to the nearest of so many parts of the cache."""
_WEIGHED = (*_AVERAGED, "extrapolated", "start_s", "latency_s", "output_s")
_COUNTED = (
    "num_swapped_in_blocks",
    "num_swapped_out_blocks",
    "num_copied_blocks",
    "num_recomputed_tokens",
)


class StepTotals:
    """Sums and maxima over steps.

    A sum of floats is that of the sums of the batches, which have a fixed length, so
    it has the same bits however the steps were told and wherever they are kept.

    Attributes
    ----------
    num_steps
        Steps so far.
    max
        Largest value of the columns that are averaged; 0 without steps.
    total
        Sum of the columns that count blocks and tokens moved by scheduler calls.
    has_bounds
        Whether the cost model knew bounds of any step.
    num_engines
        Engines whose steps these are.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_engines = 1
        self.has_bounds = False
        self.max: dict[str, float] = dict.fromkeys(_AVERAGED, 0.0)
        self.total: dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self._busy_s: list[float] = []
        self._extrapolated_s: list[float] = []
        self._integrals: dict[str, list[float]] = {name: [] for name in _AVERAGED}
        self._usage_s = np.zeros(NUM_USAGE_BINS + 1)
        self._open: Batch | None = None

    @classmethod
    def merged(cls, parts: Sequence[StepTotals]) -> StepTotals:
        """Return those of several engines: sums of sums, maxima of any of them."""
        whole = cls()
        whole.num_engines = sum(part.num_engines for part in parts)
        for part in parts:
            whole.num_steps += part.num_steps
            whole.has_bounds = whole.has_bounds or part.has_bounds
            whole._busy_s += part._busy_s
            whole._extrapolated_s += part._extrapolated_s
            whole._usage_s += part._usage_s
            for name, largest in part.max.items():
                whole.max[name] = max(whole.max[name], largest)
                whole._integrals[name] += part._integrals[name]
            for name, total in part.total.items():
                whole.total[name] += total
        return whole

    def add(self, batch: Batch) -> None:
        """Take a batch: columns of `sim.results.schema.STEPS`."""
        self.num_steps += len(batch["latency_s"])
        self.has_bounds = self.has_bounds or bool(
            (batch["latency_lo_s"] < batch["latency_hi_s"]).any()
        )
        for name in self.max:
            self.max[name] = max(self.max[name], float(batch[name].max()))
        for name in self.total:
            self.total[name] += int(batch[name].sum())
        if "output_s" in batch:
            # The last step lasts until the next one begins, which is not known yet.
            begin_s = batch["start_s"]
            self._weigh_open(float(begin_s[0]))
            self._open = {name: batch[name][-1:].copy() for name in _WEIGHED}
            self._weigh(batch, spans_s(batch, float(begin_s[-1])))
        else:
            self._weigh(batch, batch["latency_s"])

    def close(self, now_s: float) -> None:
        """Add the last step, as far as it has gone when the run ends."""
        self._weigh_open(now_s)

    def _weigh_open(self, next_s: float) -> None:
        last, self._open = self._open, None
        if last is not None:
            self._weigh(last, spans_s(last, next_s))

    def _weigh(self, batch: Batch, spans: npt.NDArray[np.float64]) -> None:
        """Add the columns that count by the time that they last."""
        self._busy_s.append(float(spans.sum()))
        weighed = np.empty(len(spans))
        for name, sums in (
            ("extrapolated", self._extrapolated_s),
            *self._integrals.items(),
        ):
            sums.append(float(np.multiply(batch[name], spans, out=weighed).sum()))
        np.multiply(batch[_USAGE], NUM_USAGE_BINS, out=weighed)
        bins = np.rint(weighed, out=weighed).astype(np.intp)
        self._usage_s += np.bincount(bins, spans, NUM_USAGE_BINS + 1)

    @property
    def busy_s(self) -> float:
        """Seconds in which there was a step; of several in flight, none twice."""
        return fsum(self._busy_s)

    @property
    def extrapolated_share(self) -> float:
        """Share of the busy time in steps that the cost model extrapolated."""
        return fsum(self._extrapolated_s) / max(self.busy_s, 1e-300)

    def usage_percentile(self, percent: float, duration_s: float) -> float:
        """Return the usage of the cache that is not exceeded for so much of the time.

        Parameters
        ----------
        percent
            Share of the time in percent, above 0.
        duration_s
            Length of the run; time outside of steps counts as an empty cache.
        """
        spent_s = self._usage_s.copy()
        whole_s = duration_s * self.num_engines
        spent_s[0] += max(whole_s - float(spent_s.sum()), 0.0)
        until_s = np.add.accumulate(spent_s)
        wanted_s = until_s[-1] * percent / 100.0
        return int(until_s.searchsorted(wanted_s)) / NUM_USAGE_BINS

    def integral(self, name: str) -> float:
        """Return the sum of a column times the time for which each step holds."""
        return fsum(self._integrals[name])
