"""One run and, where its cost model knows bounds, the same run at both of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sim.costs.base import BOUNDS
from sim.results.recording.recorder import Recording
from sim.simulation.intervals import (
    INTERRUPTED,
    intervals,
    no_intervals,
    numbers_at_bound,
    why_never,
)
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.config.tables import RunConfig
    from sim.engine.loop import Engine
    from sim.results.run import Results
    from sim.simulation.progress import Progress


def simulate(config: RunConfig) -> Results:
    """Run one simulation and return its results, intervals included."""
    simulation = Simulation(config)
    return with_intervals(simulation, simulation.run())


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
                run.engine.observe_each(progress_every, tell)
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
