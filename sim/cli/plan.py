"""``kvsim plan``: how much traffic, at what price, and what to change."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from sim.cli import console, options
from sim.cli.main import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from sim.studies.planning.solve import PlanResult
    from sim.studies.planning.spec import PlanConfig


def plan(
    plan_file: Path,
    /,
    *,
    set_: options.Settings = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    figures: options.Figures = True,
    workers: options.Workers = None,
    address: options.Address = None,
    seed: options.Seed = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Find the cheapest way to serve traffic, and how much each candidate holds.

    Parameters
    ----------
    plan_file
        YAML plan; start from examples/plan_chat.yaml.
    out
        Folder for the plan. Default: results/NAME-OF-PLAN.
    """
    from sim.results.output import output_directory
    from sim.studies.planning.solve import PLAN_FILES
    from sim.studies.planning.spec import load_plan

    started_s = perf_counter()
    options.check_workers(workers)
    config = load_plan(plan_file, options.with_seed(set_, seed))
    directory = out or Path("results") / plan_file.stem
    with output_directory(directory, overwrite=overwrite, files=PLAN_FILES) as partial:
        found = _solve(config, workers, address, shown=not (quiet or json))
        seconds = perf_counter() - started_s
        found.write(partial, wall_s=seconds)
        if figures:
            from sim.views.plots.output import write_pngs
            from sim.views.plots.plans import PLAN_FIGURES

            write_pngs(PLAN_FIGURES, found.data, partial / "figures")
    if json:
        console.print_json(found.data)
    elif not quiet:
        from sim.cli.output.plan import print_plan

        print_plan(found.data, directory, seconds)
    if found.stopped_in:
        console.note(
            f"interrupted during '{found.stopped_in}'; what was found until then is in "
            f"'{directory}'"
        )
    return EXIT_INTERRUPTED if found.stopped_in else 0


def _solve(
    config: PlanConfig, workers: int | None, address: str | None, *, shown: bool
) -> PlanResult:
    from sim.cli.output.plan import plan_reporter
    from sim.studies.planning.solve import executor_for, solve

    executor = executor_for(config, workers, address)
    with (
        executor,
        console.stopping_on_interrupt(executor.stop),
        console.progress_bar(plan_reporter, 1, shown=shown) as on_progress,
    ):
        return solve(config, executor, on_progress)
