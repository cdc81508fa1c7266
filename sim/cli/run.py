"""``kvsim run``: one simulation."""

from __future__ import annotations

import shutil
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from sim.config.tables import RunConfig
    from sim.results.run import Results
    from sim.simulation.run import Simulation

EXIT_INTERRUPTED = 130


def _strict_int(type_: Any, tokens: Sequence[Any]) -> int:
    """Refuse 1.7, which would be rounded."""
    text = tokens[0].value
    if not text.lstrip("-").isdecimal():
        raise ValueError(f"must be a whole number, got {text}")
    return int(text)


StrictInt = Annotated[int, Parameter(converter=_strict_int)]


def run(
    config: Path,
    /,
    *,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", allow_leading_hyphen=False),
    ] = None,
    out: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    figures: bool = True,
    stepwise: Annotated[bool, Parameter(negative="")] = False,
    itl: Literal["steps", "exact"] = "steps",
    record: Annotated[
        list[Literal["schedule", "blocks"]] | None, Parameter(negative="")
    ] = None,
    check: StrictInt = 0,
    seed: StrictInt | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run one simulation: summary on the terminal, results and figures in a folder.

    Parameters
    ----------
    config
        YAML configuration; start from one in examples/.
    set_
        Change a key, as key.path=value; may be given several times.
    out
        Folder for the results. Default: results/NAME-OF-CONFIG.
    overwrite
        Replace the results of an earlier run in that folder.
    figures
        Draw the figures.
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
    seed
        Shorthand for --set seed=N.
    quiet
        Print nothing but warnings and errors.
    json
        Print the summary as JSON.
    """
    from time import perf_counter

    from sim.config.tables import load_config
    from sim.errors import ConfigError
    from sim.results.output import output_directory, write_json
    from sim.results.parquet import StepsFile
    from sim.simulation.run import Simulation

    started_s = perf_counter()
    if check < 0:
        raise ConfigError(f"--check takes a number of steps of at least 0, got {check}")
    overrides = list(set_ or [])
    if seed is not None:
        overrides.append(f"seed={seed}")
    run_config = load_config(config, overrides)
    directory = out or Path("results") / config.stem
    simulation = Simulation(run_config, stepwise=stepwise)
    with output_directory(directory, overwrite=overwrite) as partial:
        extras = _extras(simulation, record or [], partial)
        steps_file = StepsFile(partial / "steps.parquet")
        with steps_file, _stopping_on_interrupt(simulation), extras:
            simulation.recorder.sink = steps_file
            loop_started_s = perf_counter()
            results = _run(simulation, check, show=not (quiet or json))
            loop_s = perf_counter() - loop_started_s
            results = _bounded(simulation, results, show=not (quiet or json))
            intervals_s = perf_counter() - loop_started_s - loop_s
            results.write(partial, itl=itl == "exact")
        complete = not simulation.stop_requested
        if figures:
            complete = _draw(results, partial / "figures") and complete
        write_json(
            partial / "run.json",
            _run_info(
                run_config,
                {
                    "loop": loop_s,
                    "intervals": intervals_s,
                    "command": perf_counter() - started_s,
                },
            ),
        )
    _report(results, directory, loop_s, quiet=quiet, as_json=json)
    if not complete:
        print(
            f"kvsim: interrupted; what was finished is in '{directory}'",
            file=sys.stderr,
        )
    return 0 if complete else EXIT_INTERRUPTED


def _extras(
    simulation: Simulation, record: Sequence[str], directory: Path
) -> AbstractContextManager[object]:
    """Return what ``--record`` asks for, to be open during the run.

    Imported only then: decision logs and their formats take a tenth of a second.
    """
    if not record:
        return nullcontext()
    from sim.simulation.extras import recording

    return recording(simulation, record, directory)


def _draw(results: Results, directory: Path) -> bool:
    """Draw all figures or, on Ctrl-C, none; False then."""
    from sim.views.plots import Tables, draw_all

    try:
        draw_all(Tables.of(results), directory)
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True


@contextmanager
def _stopping_on_interrupt(simulation: Simulation) -> Iterator[None]:
    """Let the first Ctrl-C end the run between two steps, the second end it at once.

    A Ctrl-C while the tables are written lets that finish: it takes a moment only.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        simulation.stop()

    before = signal.signal(signal.SIGINT, stop)
    # A batch system's end of time, which likewise should cost no results.
    before_term = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, before_term)


def _run(simulation: Simulation, check: int, *, show: bool) -> Results:
    """Run under a progress bar, if there is somebody to see it."""
    if not show or not sys.stderr.isatty():
        return simulation.run(check_every=check)
    from sim.cli.terminal import progress_bar

    with progress_bar(simulation.num_requests) as on_progress:
        return simulation.run(on_progress, check_every=check)


def _bounded(simulation: Simulation, results: Results, *, show: bool) -> Results:
    """Add intervals to the summary, under another progress bar."""
    from sim.simulation.run import with_intervals

    if not show or not sys.stderr.isatty():
        return with_intervals(simulation, results)
    from sim.cli.terminal import progress_bar

    with progress_bar(2 * simulation.num_requests) as on_progress:
        return with_intervals(simulation, results, on_progress)


def _run_info(config: RunConfig, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return what may differ between two equal runs: wall time and machine."""
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
    """Print warnings, and the summary as a table or as JSON."""
    for line in results.summary["warnings"]:
        print(f"kvsim: warning: {line}", file=sys.stderr)
    if as_json:
        from json import dumps

        print(dumps(results.summary, indent=2, allow_nan=False))
    elif not quiet:
        from sim.cli.terminal import print_summary

        print_summary(results.summary, directory, loop_s)
