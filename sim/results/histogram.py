"""Durations counted in logarithmic bins, online and in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]

NS_PER_S = 1_000_000_000

_FIRST_DECADE, _LAST_DECADE, _BINS_PER_DECADE = -4, 6, 10

BIN_EDGES_S = tuple(
    float(f"{10 ** (_FIRST_DECADE + index / _BINS_PER_DECADE):.6g}")
    for index in range((_LAST_DECADE - _FIRST_DECADE) * _BINS_PER_DECADE + 1)
)
"""Ten bins a decade from 0.1 ms to 1,000,000 s; one bin below and one above."""

NUM_BINS = len(BIN_EDGES_S) + 1

_EDGES_NS = np.array([round(edge_s * NS_PER_S) for edge_s in BIN_EDGES_S], np.int64)

_MOST_WAITING = 4096


class DurationHistogram:
    """Counts of durations by bin; their number, sum, minimum and maximum exactly.

    Durations are whole nanoseconds, so that a sum does not depend on the order of its
    parts: the paths of a run tell of the same blocks in different orders.

    Durations wait in a buffer of bounded length to be counted many at a time.
    """

    def __init__(self) -> None:
        self._count = 0
        self._total_ns = 0
        self._min_ns = 0
        self._max_ns = 0
        self._counts = np.zeros(NUM_BINS, np.int64)
        self._single: list[int] = []
        self._arrays: list[Nanoseconds] = []
        self._num_in_arrays = 0

    @property
    def count(self) -> int:
        return self._count + len(self._single) + self._num_in_arrays

    def add(self, duration_ns: int) -> None:
        self._single.append(duration_ns)
        if len(self._single) >= _MOST_WAITING:
            self._flush()

    def add_all(self, durations_ns: Nanoseconds) -> None:
        """Count several durations of at least 0; the array must not change any more."""
        if not len(durations_ns):
            return
        self._arrays.append(durations_ns)
        self._num_in_arrays += len(durations_ns)
        if self._num_in_arrays >= _MOST_WAITING:
            self._flush()

    def _flush(self) -> None:
        if not self._single and not self._arrays:
            return
        single = np.array(self._single, np.int64)
        durations_ns = np.concatenate([single, *self._arrays])
        lowest = int(durations_ns.min())
        self._min_ns = min(self._min_ns, lowest) if self._count else lowest
        self._max_ns = max(self._max_ns, int(durations_ns.max()))
        self._count += len(durations_ns)
        # In halves, neither of whose sums leaves 64 bits.
        self._total_ns += int((durations_ns >> 32).sum()) << 32
        self._total_ns += int((durations_ns & 0xFFFFFFFF).sum())
        bins = np.searchsorted(_EDGES_NS, durations_ns, side="right")
        self._counts += np.bincount(bins, minlength=NUM_BINS)
        self._single, self._arrays, self._num_in_arrays = [], [], 0

    def counts(self) -> list[int]:
        """Return the counts: below the first edge, between edges, above the last."""
        self._flush()
        counts: list[int] = self._counts.tolist()
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready, in seconds; no mean, minimum and maximum of nothing."""
        self._flush()
        count = self._count
        return {
            "count": count,
            "mean_s": self._total_ns / (count * NS_PER_S) if count else None,
            "min_s": self._min_ns / NS_PER_S if count else None,
            "max_s": self._max_ns / NS_PER_S if count else None,
            "counts": self.counts(),
        }
