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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.config.tables import RunConfig
    from sim.engine.stepwise import Engine
    from sim.results.recorder import Recording
    from sim.results.run_results import SimulationResults
    from sim.simulation.run import Progress, Simulation

STATISTICS: Final = ("mean", "median", "p50", "p90", "p95", "p99")
LATENCIES: Final = ("ttft", "tpot", "e2el")
NUMBERS: Final = (
    *(f"{statistic}_{name}_ms" for name in LATENCIES for statistic in STATISTICS),
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
)
"""Keys of the summary that have an interval, under the same name and ``_interval``."""

OFF: Final = "cost_intervals is false"
NO_BOUNDS: Final = "the cost model knows no bounds"
NOT_ASKED: Final = "not asked for"
INTERRUPTED: Final = "interrupted"


def with_intervals(
    simulation: Simulation,
    results: SimulationResults,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    progress_every: int = 512,
) -> SimulationResults:
    """Return the results of a run with the intervals of the summary filled in.

    There are none if the configuration says so, the cost model knows no bounds, or
    the simulation was stopped; the summary says which.

    Parameters
    ----------
    simulation
        The run, at its end.
    results
        What it returned.
    on_progress
        Called every `progress_every` steps; both runs count as one.

    Raises
    ------
    CostError
        If a bound gives a step no length.
    """
    found = no_intervals(_why_none(simulation, results))
    if found["cost_intervals_reason"] is None:
        numbers = []
        for place, bound in enumerate(BOUNDS):
            run = simulation.at_bound(bound)
            if simulation.stop_requested:
                break
            if on_progress:
                tell = partial(_tell, simulation, run, place, on_progress)
                run.engine.observe(progress_every, tell)
            numbers.append(numbers_at_bound(run))
        found = intervals(results.summary, numbers)
        if simulation.stop_requested:
            found = no_intervals(INTERRUPTED)
    return replace(results, summary={**results.summary, **found})


def _why_none(simulation: Simulation, results: SimulationResults) -> str | None:
    reason = why_never(simulation.config, results.recording)
    return reason or (INTERRUPTED if simulation.stop_requested else None)


def why_never(config: RunConfig, recording: Recording) -> str | None:
    """Return why a run has no intervals, whoever asks; None if it could."""
    if not config.cost_intervals:
        return OFF
    return None if recording.totals.has_bounds else NO_BOUNDS


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


def numbers_at_bound(run: Simulation) -> dict[str, float | None]:
    """Run to the end, or until the simulation is stopped; return `NUMBERS`."""
    requests = run.run_requests()
    found: dict[str, float | None] = throughput(
        requests, run.num_requests, run.env.now
    ) | of_served(requests, LATENCIES)
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

    Parameters
    ----------
    central
        The summary.
    at_bounds
        `numbers_at_bound` of the runs at the bounds.
    """
    found: dict[str, Any] = {"cost_intervals_reason": None}
    for name in NUMBERS:
        values = [central[name], *(numbers[name] for numbers in at_bounds)]
        known = [value for value in values if value is not None]
        is_whole = len(known) == len(values)
        found[f"{name}_interval"] = [min(known), max(known)] if is_whole else None
    return found
