"""The arrival times of a recorded trace, under lengths of any other kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import check_role, checked_window
from workloads.traces.base import TraceReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


@dataclass(frozen=True, slots=True)
class ReplayArrivals:
    """When the requests of a trace arrived; nothing is drawn.

    It ends with the trace: ask for no more requests than it has. The earliest
    possible arrivals of follow-ups count as arrivals.

    Parameters
    ----------
    trace
        Where the times come from; see `TraceReader`.
    window
        ``(start_s, end_s)`` in the trace's own seconds; arrivals in ``start_s <= t <
        end_s`` are taken, and ``start_s`` becomes time 0. An ``end_s`` of None is
        open.

    Raises
    ------
    WorkloadError
        If the window is out of range. Errors of the reader pass through.
    """

    trace: TraceReader
    window: tuple[float, float | None] | None = None

    def __post_init__(self) -> None:
        check_role("trace", self.trace, TraceReader, "read(self)")
        if self.window is not None:
            object.__setattr__(self, "window", checked_window(self.window))

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        del rng  # nothing is random here
        start_s, end_s = self.window or (0.0, None)
        for request in self.trace.read():
            if end_s is not None and request.arrival_s >= end_s:
                return
            if request.arrival_s >= start_s:
                yield request.arrival_s - start_s
