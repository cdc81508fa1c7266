"""``kvsim sweep``: many runs, here or on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from sim.cli import console, options
from sim.cli.main import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from sim.cli.console import ShowProgress
    from sim.studies.sweeps.expand import Sweep
    from sim.studies.sweeps.job import Executor, Job
    from sim.studies.sweeps.session import Tally


def sweep(
    config: Path,
    /,
    *,
    set_: options.Assignments = None,
    out: Path | None = None,
    resume: options.Flag = False,
    overwrite: options.Overwrite = False,
    workers: options.Workers = None,
    address: options.Address = None,
    dry_run: options.Flag = False,
    yes: options.Flag = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Run a configuration many times: grids, lists, random and Latin-hypercube ranges.

    Parameters
    ----------
    config
        YAML file of the sweep; see docs/sweeps.md, and start from one in examples/.
    set_
        Change a key of the base, as key.path=value; may be given several times.
    out
        Folder for the results. Default: results/NAME-OF-CONFIG.
    resume
        Go on with an interrupted sweep in that folder.
    dry_run
        Print the runs, and run none.
    yes
        Start however many runs there are.
    """
    started_s = perf_counter()
    if not (dry_run or address):  # while the sweep is read: imports take them a second
        from sim.studies.sweeps.forks import warm_up

        warm_up()
    from sim.results.output import claimed, claimed_directory
    from sim.studies.sweeps import directory as folder
    from sim.studies.sweeps.expand import Sweep, check_runs, check_size
    from sim.studies.sweeps.session import executor_for, run_sweep
    from sim.studies.sweeps.spec import load_sweep

    _check_options(workers, address, resume=resume, overwrite=overwrite)
    plan = Sweep(load_sweep(config, set_ or []))
    check_size(plan, confirmed=yes or dry_run)
    runs = list(plan.runs())
    check_runs(runs)
    jobs = [run.job for run in runs]
    if dry_run:
        _print_runs(plan, jobs, as_json=json)
        return 0
    console.note_plugins(dict(job.config) for job in jobs)
    directory = out or Path("results") / config.stem
    facts = folder.identity(jobs)
    if resume:
        folder.check_same(directory, facts)
        claim: AbstractContextManager[object] = claimed(directory)
    else:
        claim = claimed_directory(
            directory, overwrite=overwrite, files=folder.SWEEP_FILES
        )
    shown = not (quiet or json)
    with claim:
        executor = executor_for(jobs, workers, address)
        with executor:  # joins its cluster, if any, before anything is written
            if not resume:
                folder.begin(directory, plan.file.given, facts, overwrite=overwrite)
            with (
                console.stopping_on_interrupt(executor.stop),
                console.progress_bar(
                    _reporter, len(jobs), "runs", shown=shown
                ) as on_outcome,
            ):
                dataset = directory / folder.RUNS
                tally = run_sweep(plan, jobs, dataset, executor, on_outcome=on_outcome)
        wall_s = perf_counter() - started_s
        _note_run(directory, tally, executor, address, wall_s)
    _report(directory, tally, executor, wall_s, quiet=quiet, as_json=json)
    if tally.is_complete:
        if tally.num_runs > 1 and _repeats_are_alike(directory / folder.RUNS):
            console.warn(
                [
                    "repeats of each combination are the same: no part of this traffic "
                    "is drawn with the seed; of a trace or preset, workload.resample "
                    "draws other windows with each"
                ]
            )
        return 0
    console.note(
        f"interrupted; {tally.num_ended:,} of {tally.num_runs:,} runs are in "
        f"'{directory}'; go on with --resume"
    )
    return EXIT_INTERRUPTED


def _check_options(
    workers: int | None, address: str | None, *, resume: bool, overwrite: bool
) -> None:
    from sim.errors import ConfigError

    options.check_workers(workers)
    if workers is not None and address is not None:
        raise ConfigError(
            f"--workers is for this machine and --address for a cluster, got {workers} "
            f"and '{address}'; leave one out"
        )
    if resume and overwrite:
        raise ConfigError(
            "--resume keeps what there is and --overwrite deletes it; leave one out"
        )


def _print_runs(plan: Sweep, jobs: Sequence[Job], *, as_json: bool) -> None:
    """Print what would be run: a line each, or JSON lines."""
    from json import dumps

    for job in jobs:
        varied = {"run": job.index, **job.overrides, "seed": job.config.get("seed", 0)}
        if as_json:
            print(dumps(varied))
        else:
            print("  ".join(f"{key}={_shown(value)}" for key, value in varied.items()))
    if not as_json:
        print(f"{plan.num_runs:,} runs; none was started")


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _repeats_are_alike(dataset: Path) -> bool:
    """Whether there are repeats, and none differs from the others of its point."""
    import pandas as pd

    facts = ["duration", "mean_ttft_ms", "mean_e2el_ms"]
    runs = pd.read_parquet(dataset, columns=["run", "repeat", *facts]).dropna()
    points = runs.groupby(runs["run"] - runs["repeat"])[facts]
    return bool((runs["repeat"] > 0).any() and (points.nunique() == 1).all(axis=None))


def _reporter(show: ShowProgress) -> Callable[[Tally], None]:
    def update(tally: Tally) -> None:
        failed = f"{tally.num_failed:,} failed" if tally.num_failed else ""
        show(tally.num_ended, failed)

    return update


def _note_run(
    directory: Path,
    tally: Tally,
    executor: Executor,
    address: str | None,
    wall_s: float,
) -> None:
    """Write the facts in which two equal sweeps may differ: time and workers."""
    from sim.results.output import write_json

    facts = {
        "wall_seconds": {"command": wall_s, "runs": tally.run_wall_s},
        "engine": "processes" if address is None else "ray",
        "num_workers": executor.num_workers,
        "complete": tally.is_complete,
    }
    write_json(directory / "run.json", facts)


def _report(
    directory: Path,
    tally: Tally,
    executor: Executor,
    wall_s: float,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    from sim.studies.sweeps.directory import RUNS

    console.warn(tally.problems)
    more = tally.num_failed - len(tally.problems)
    if more > 0:
        console.warn([f"and {more:,} more; see column error"])
    dataset = str(directory / RUNS)
    if as_json:
        console.print_json(
            {"dataset": dataset, "num_runs": tally.num_runs, **tally.counts}
        )
    elif not quiet:
        ends = ", ".join(f"{n:,} {end}" for end, n in sorted(tally.counts.items()))
        print(f"runs     {tally.num_ended:,} of {tally.num_runs:,}: {ends}")
        rate = f"; {tally.run_wall_s:.1f} s of runs" if tally.run_wall_s else ""
        print(f"took     {wall_s:.1f} s on {executor.num_workers:,} workers{rate}")
        print(f"dataset  {dataset}, a row each")
        if tally.num_ended > tally.num_failed:
            print(f"to look  kvsim report {directory} --out {directory.name}.html")
            _print_knees(directory)


def _print_knees(directory: Path) -> None:
    """Print where the knee of each curve over load is, if load was varied."""
    from sim.studies.sweeps.knee import knees
    from sim.views.report.sections.sweep import load_sweep

    sweep = load_sweep(directory)
    for line in knees(sweep.done, sweep.varied()):
        print(f"knee     {line}")
