"""``kvsim run``: one simulation."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sim.cli import console, options
from sim.cli.main import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from sim.config.tables import RunConfig
    from sim.results.run import Results
    from sim.simulation.run import Simulation


def run(
    config: Path,
    /,
    *,
    set_: options.Settings = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    figures: options.Figures = True,
    stepwise: options.Flag = False,
    itl: Literal["steps", "exact"] = "steps",
    record: Annotated[
        list[Literal["schedule", "blocks"]] | None, Parameter(negative="")
    ] = None,
    check: options.Whole = 0,
    seed: options.Seed = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Run one simulation: summary on the terminal, results and figures in a folder.

    Parameters
    ----------
    config
        YAML configuration; start from one in examples/.
    out
        Folder for the results. Default: results/NAME-OF-CONFIG.
    stepwise
        Take every step in full, also where the fast path gives the same results.
    itl
        "exact" also writes itl.parquet, a row for each token of the served requests:
        when it came. The summary is the same either way.
    record
        Also write what "schedule" (every decision, step by step, with its times:
        schedule.jsonl.zst) or "blocks" (histograms of how long KV blocks are kept, held
        and idle: blocks.json) names; may be given several times.
    check
        Prove every structure's invariants each N steps; slow.
    """
    from sim.cli.output.run import run_reporter
    from sim.config.tables import load_config
    from sim.errors import ConfigError
    from sim.results.output import output_directory, write_json
    from sim.results.tables.parquet import StepsFile
    from sim.simulation.run import Simulation
    from sim.simulation.simulate import with_intervals

    started_s = perf_counter()
    if check < 0:
        raise ConfigError(f"--check takes a number of steps of at least 0, got {check}")
    run_config = load_config(config, options.with_seed(set_, seed))
    directory = out or Path("results") / config.stem
    simulation = Simulation(run_config, stepwise=stepwise)
    shown, num_requests = not (quiet or json), simulation.num_requests
    bar = partial(console.progress_bar, run_reporter, unit="requests", shown=shown)
    with output_directory(directory, overwrite=overwrite) as folder:
        extras = _extras(simulation, record or [], folder)
        kinds = simulation.recorder.step_kinds
        steps_file = StepsFile(folder / "steps.parquet", kinds)
        # While the tables are written, a Ctrl-C lets that finish: it takes a moment.
        with steps_file, console.stopping_on_interrupt(simulation.stop), extras:
            simulation.recorder.sink = steps_file
            loop_started_s = perf_counter()
            with bar(num_requests) as told:
                results = simulation.run(told, check_every=check)
            loop_s = perf_counter() - loop_started_s
            with bar(2 * num_requests) as told:
                results = with_intervals(simulation, results, told)
            intervals_s = perf_counter() - loop_started_s - loop_s
            results.write(folder, itl=itl == "exact")
        complete = not simulation.stop_requested
        if figures:
            complete = _draw(results, folder / "figures") and complete
        command_s = perf_counter() - started_s
        seconds = {"loop": loop_s, "intervals": intervals_s, "command": command_s}
        write_json(folder / "run.json", _run_info(run_config, seconds))
    _report(results, directory, loop_s, quiet=quiet, as_json=json)
    if not complete:
        console.note(f"interrupted; what was finished is in '{directory}'")
    return 0 if complete else EXIT_INTERRUPTED


def _extras(
    simulation: Simulation, record: Sequence[str], directory: Path
) -> AbstractContextManager[object]:
    """Return the recordings of ``--record``, to be open during the run.

    Imported only then: decision logs and their formats take a tenth of a second.
    """
    if not record:
        return nullcontext()
    from sim.simulation.extras import recording

    return recording(simulation, record, directory)


def _draw(results: Results, directory: Path) -> bool:
    """Draw all figures or, on Ctrl-C, none; False then."""
    from sim.views.plots.accessor import figures_of
    from sim.views.plots.output import write_pngs

    try:
        write_pngs(*figures_of(results), directory)
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True


def _run_info(config: RunConfig, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the facts in which two equal runs may differ: wall time and machine."""
    import os
    import platform

    return {
        "wall_seconds": dict(seconds),
        "host": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "num_cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "seed": config.seed,
    }


def _report(
    results: Results, directory: Path, loop_s: float, *, quiet: bool, as_json: bool
) -> None:
    console.warn(results.summary["warnings"])
    if as_json:
        console.print_json(results.summary)
    elif not quiet:
        from sim.cli.output.run import print_summary

        print_summary(results.summary, directory, loop_s)
