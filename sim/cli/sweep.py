"""``kvsim sweep``: many runs, here or on a Ray cluster."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from sim.cli.run import EXIT_INTERRUPTED, StrictInt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.studies.sweeps.expand import Sweep
    from sim.studies.sweeps.job import Executor, Job
    from sim.studies.sweeps.session import Tally


def sweep(
    config: Path,
    /,
    *,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", allow_leading_hyphen=False),
    ] = None,
    out: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    workers: StrictInt | None = None,
    address: str | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    yes: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
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
    overwrite
        Replace the results of an earlier sweep in that folder.
    workers
        Processes on this machine. Default: one for each processor.
    address
        Run on an existing Ray cluster instead: "auto", or HOST:PORT of its head node.
    dry_run
        Print the runs, and run none.
    yes
        Start however many runs there are.
    quiet
        Print nothing but warnings and errors.
    json
        Print what came of it as JSON.
    """
    from time import perf_counter

    started_s = perf_counter()
    if not (dry_run or address):
        _warm_up()
    from sim.results.output import check_output
    from sim.studies.sweeps import directory as folder
    from sim.studies.sweeps.checks import check_runs, check_size
    from sim.studies.sweeps.expand import Sweep
    from sim.studies.sweeps.session import run_sweep
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
    directory = out or Path("results") / config.stem
    facts = folder.identity(jobs)
    if resume:
        folder.check_same(directory, facts)
    else:
        check_output(directory, overwrite=overwrite, files=folder.SWEEP_FILES)
    executor = _executor(workers, address, jobs)
    with executor:  # joins its cluster, if there is one, before anything is written
        if not resume:
            folder.begin(directory, plan.file.given, facts, overwrite=overwrite)
        with (
            folder.held(directory),
            _stopping_on_interrupt(executor),
            _progress(len(jobs), show=not (quiet or json)) as on_outcome,
        ):
            dataset = directory / folder.RUNS
            tally = run_sweep(plan, jobs, dataset, executor, on_outcome=on_outcome)
    wall_s = perf_counter() - started_s
    _note_run(directory, tally, executor, address, wall_s)
    _report(directory, tally, executor, wall_s, quiet=quiet, as_json=json)
    if tally.is_complete:
        return 0
    print(
        f"kvsim: interrupted; {tally.num_ended:,} of {tally.num_runs:,} runs are in "
        f"'{directory}'; go on with --resume",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED


def _warm_up() -> None:
    """Let workers be prepared while the sweep is read: imports take them a second."""
    from sim.studies.sweeps.forks import warm_up

    warm_up()


def _check_options(
    workers: int | None, address: str | None, *, resume: bool, overwrite: bool
) -> None:
    from sim.errors import ConfigError

    if workers is not None and workers < 1:
        raise ConfigError(f"--workers takes a number of at least 1, got {workers}")
    if workers is not None and address is not None:
        raise ConfigError(
            f"--workers is for this machine and --address for a cluster, got {workers} "
            f"and '{address}'; leave one out"
        )
    if resume and overwrite:
        raise ConfigError(
            "--resume keeps what there is and --overwrite deletes it; leave one out"
        )


def _executor(
    workers: int | None, address: str | None, jobs: Sequence[Job]
) -> Executor:
    """Return who carries out the runs, with what they share."""
    from sim.studies.sweeps.supplies import gather

    if address is None:
        from sim.studies.sweeps.local import LocalExecutor

        return LocalExecutor(workers, gather(jobs))
    from sim.studies.sweeps.ray_cluster import RayExecutor

    return RayExecutor(address, gather(jobs, at_least=1))


@contextmanager
def _stopping_on_interrupt(executor: Executor) -> Iterator[None]:
    """Let the first Ctrl-C keep what is finished and end, the second end at once."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        executor.stop()

    before = signal.signal(signal.SIGINT, stop)
    before_term = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, before_term)


@contextmanager
def _progress(num_runs: int, *, show: bool) -> Iterator[Any]:
    """Show a bar, if there is somebody to see it."""
    if not show or not sys.stderr.isatty():
        yield lambda _: None
        return
    from sim.cli.sweep_terminal import progress_bar

    with progress_bar(num_runs) as on_outcome:
        yield on_outcome


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


def _note_run(
    directory: Path,
    tally: Tally,
    executor: Executor,
    address: str | None,
    wall_s: float,
) -> None:
    """Write what may differ between two equal sweeps: time, and who did it."""
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

    for line in tally.problems:
        print(f"kvsim: warning: {line}", file=sys.stderr)
    more = tally.num_failed - len(tally.problems)
    if more > 0:
        print(f"kvsim: warning: and {more:,} more; see column error", file=sys.stderr)
    dataset = str(directory / RUNS)
    if as_json:
        from json import dumps

        counts = {"num_runs": tally.num_runs, **tally.counts}
        print(dumps({"dataset": dataset, **counts}, indent=2))
    elif not quiet:
        from sim.cli.sweep_terminal import print_tally

        print_tally(tally, dataset, executor.num_workers, wall_s)
