"""How far latencies and throughput may be off if the cost model is.

The errors of kernels are common to all steps: a decode that takes 5 % longer than its
table says does so in every step. So the run is simulated again with every step at its
lower bound, and again with every step at its upper one. Queueing and preemptions then
move as well, which no scaling of the latencies themselves would show.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sim.costs.base import BOUNDS
from sim.results.metrics import of_served, throughput
from sim.results.recorder import Recording
from sim.results.schema import OF_REQUESTS, STATISTICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.config.tables import RunConfig
    from sim.engine.loop import Engine
    from sim.results.run import Results
    from sim.results.table import ResultTable
    from sim.simulation.run import Progress, Simulation

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


def with_intervals(
    simulation: Simulation,
    results: Results,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    progress_every: int = 512,
) -> Results:
    """Fill in the intervals of the summary: run twice more, every step at a bound.

    There are none if the configuration says so, the cost model knows no bounds, or
    the simulation was stopped; the summary says which. Both runs count as one for
    `on_progress`.
    """
    numbers = []
    if (reason := _why_no_intervals(simulation, results)) is None:
        for place, bound in enumerate(BOUNDS):
            run = simulation.at_bound(bound)
            if simulation.stop_requested:
                break
            if on_progress:
                tell = partial(_tell, simulation, run, place, on_progress)
                run.engine.observe(progress_every, tell)
            requests = run.run_requests()
            numbers.append(numbers_at_bound(requests, run.num_requests, run.env.now))
        reason = _why_no_intervals(simulation, results)
    if reason is None:
        found = intervals(results.summary, numbers)
    else:
        found = no_intervals(reason)
    return replace(results, summary={**results.summary, **found})


def _why_no_intervals(simulation: Simulation, results: Results) -> str | None:
    assert isinstance(results.recording, Recording)
    reason = why_never(simulation.config, results.recording)
    return reason or (INTERRUPTED if simulation.stop_requested else None)


def _tell(
    simulation: Simulation,
    run: Simulation,
    place: int,
    on_progress: Callable[[Progress], None],
    _: Engine,
) -> None:
    """Tell how far the two runs have come, of which `run` is number `place`."""
    found = run.progress()
    num_requests = simulation.num_requests
    on_progress(
        replace(
            found,
            num_requests=2 * num_requests,
            num_done=place * num_requests + found.num_done,
            bound=BOUNDS[place],
        )
    )
