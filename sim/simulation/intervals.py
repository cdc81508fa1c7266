"""How far latencies and throughput may be off if the cost model is.

The errors of kernels are common to all steps: a decode that takes 5 % longer than its
table says does so in every step. So the run is simulated again with every step at its
lower bound, and again with every step at its upper one. Queueing and preemptions then
move as well, which no scaling of the latencies themselves would show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sim.results.metrics import of_served, throughput
from sim.results.schema import OF_REQUESTS, STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.config.tables import RunConfig
    from sim.results.recording.recorder import Recording
    from sim.results.tables.memory import ResultTable

NUMBERS: Final = (
    *(
        f"{statistic}_{latency.key}_ms"
        for latency in OF_REQUESTS
        for statistic in STATISTICS
        if statistic != "std"
    ),
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
)
"""Keys of the summary that have an interval, under the same name and ``_interval``."""

OFF: Final = "cost_intervals is false"
NO_BOUNDS: Final = "the cost model knows no bounds"
NOT_ASKED: Final = "not asked for"
INTERRUPTED: Final = "interrupted"


def why_never(config: RunConfig, recording: Recording) -> str | None:
    """Return why a run cannot have intervals, or None if it can."""
    if not config.cost_intervals:
        return OFF
    return None if recording.totals.has_bounds else NO_BOUNDS


def numbers_at_bound(
    requests: ResultTable, num_requests: int, duration_s: float
) -> dict[str, float | None]:
    """Return `NUMBERS` of a run at a bound, of which only requests were recorded."""
    found: dict[str, float | None] = throughput(
        requests, num_requests, duration_s
    ) | of_served(requests, [each.key for each in OF_REQUESTS])
    return {name: found[name] for name in NUMBERS}


def no_intervals(reason: str | None) -> dict[str, Any]:
    """Return the keys of the summary where there are none, and why."""
    return {"cost_intervals_reason": reason} | {f"{n}_interval": None for n in NUMBERS}


def intervals(
    central: Mapping[str, Any], at_bounds: Sequence[Mapping[str, float | None]]
) -> dict[str, Any]:
    """Return the keys of the summary: the least and the most of all runs.

    Faster kernels need not shorten every latency: they change which requests meet. So
    an interval spans the central run, too, and its ends may come from any of them.
    """
    found: dict[str, Any] = {"cost_intervals_reason": None}
    for name in NUMBERS:
        values = [central[name], *(numbers[name] for numbers in at_bounds)]
        known = [value for value in values if value is not None]
        is_whole = len(known) == len(values)
        found[f"{name}_interval"] = [min(known), max(known)] if is_whole else None
    return found
