"""``kvsim plan``: how much traffic, at what price, and what to change."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from sim.cli.run import EXIT_INTERRUPTED, StrictInt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from sim.studies.planning.solve import PlanResult
    from sim.studies.planning.spec import PlanConfig
    from sim.studies.sweeps.job import Executor


def plan(
    plan_file: Path,
    /,
    *,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", allow_leading_hyphen=False),
    ] = None,
    out: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    figures: bool = True,
    workers: StrictInt | None = None,
    address: str | None = None,
    seed: StrictInt | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Find the cheapest way to serve traffic, and how much each candidate holds.

    Parameters
    ----------
    plan_file
        YAML plan; start from examples/plan_chat.yaml.
    set_
        Change a key, as key.path=value; may be given several times.
    out
        Folder for the plan. Default: results/NAME-OF-PLAN.
    overwrite
        Replace an earlier plan in that folder.
    figures
        Draw the figures.
    workers
        Processes on this machine. Default: as many as it has processors.
    address
        A Ray cluster to simulate on instead; needs the extra ray.
    seed
        Shorthand for --set seed=N.
    quiet
        Print nothing but errors.
    json
        Print plan.json.
    """
    from time import perf_counter

    from sim.errors import ConfigError
    from sim.results.output import output_directory
    from sim.studies.planning.solve import PLAN_FILES
    from sim.studies.planning.spec import load_plan

    started_s = perf_counter()
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers takes a number of at least 1, got {workers}")
    overrides = list(set_ or [])
    if seed is not None:
        overrides.append(f"seed={seed}")
    config = load_plan(plan_file, overrides)
    directory = out or Path("results") / plan_file.stem
    with output_directory(directory, overwrite=overwrite, files=PLAN_FILES) as partial:
        found = _solve(config, workers, address, show=not (quiet or json))
        seconds = perf_counter() - started_s
        found.write(partial, wall_s=seconds)
        if figures:
            from sim.views.plots.plan_figures import draw_plan

            draw_plan(found.data, partial / "figures")
    _report(found, directory, seconds, quiet=quiet, as_json=json)
    if found.stopped_in:
        print(
            f"kvsim: interrupted during '{found.stopped_in}'; what was found until "
            f"then is in '{directory}'",
            file=sys.stderr,
        )
    return EXIT_INTERRUPTED if found.stopped_in else 0


def _solve(
    config: PlanConfig, workers: int | None, address: str | None, *, show: bool
) -> PlanResult:
    """Find the plan, under a progress bar if there is somebody to see it."""
    from sim.studies.planning.solve import executor_for, solve

    executor = executor_for(config, workers, address)
    with executor, _stopping_on_interrupt(executor):
        if not show or not sys.stderr.isatty():
            return solve(config, executor)
        from sim.cli.plan_terminal import phases_bar

        with phases_bar() as on_progress:
            return solve(config, executor, on_progress)


@contextmanager
def _stopping_on_interrupt(executor: Executor) -> Iterator[None]:
    """Let the first Ctrl-C end the plan, the second end it at once."""

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        executor.stop()

    before = signal.signal(signal.SIGINT, stop)
    before_term = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, before_term)


def _report(
    found: PlanResult, directory: Path, wall_s: float, *, quiet: bool, as_json: bool
) -> None:
    if as_json:
        from json import dumps

        print(dumps(found.data, indent=2, allow_nan=False))
    elif not quiet:
        from sim.cli.plan_terminal import print_plan

        print_plan(found.data, directory, wall_s)
