"""``kvsim plan``: how much traffic, at what price, and what to change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from sim.cli import console, options
from sim.cli.main import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.studies.planning.phases.progress import AnswerFile
    from sim.studies.planning.solve import PlanResult, PlanStopped
    from sim.studies.planning.spec import PlanConfig


def plan(
    plan_file: Path,
    /,
    *,
    set_: options.Settings = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    resume: options.Flag = False,
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
    resume
        Go on with a plan that was interrupted; what it has found is not run again.
    """
    from sim.errors import ConfigError
    from sim.results.output import claimed_directory
    from sim.studies.planning.solve import PLAN_FILES, PlanStopped
    from sim.studies.planning.spec import load_plan

    started_s = perf_counter()
    options.check_workers(workers)
    config = load_plan(plan_file, options.with_seed(set_, seed))
    console.note_plugins([config.model_dump()])
    directory = out or Path("results") / plan_file.stem
    if overwrite and resume:
        raise ConfigError(
            "--resume keeps what there is and --overwrite deletes it; leave one out"
        )
    replaces = overwrite or resume
    # The answers lie beside the folder, and belong to the plan that holds it.
    with claimed_directory(directory, overwrite=replaces, files=PLAN_FILES):
        answers = _answers(directory, overwrite=overwrite, resume=resume)
        shown = not (quiet or json)
        solving = partial(_solve, config, workers, address, answers, shown=shown)
        try:
            found, seconds = _written(
                solving, directory, started_s, replaces=replaces, figures=figures
            )
        except ConfigError:
            if not resume:
                answers.remove()  # the plan has to be changed first
            raise
        except PlanStopped as stopped:
            _say_stopped(stopped, answers)
            return EXIT_INTERRUPTED
        if not found.stopped_in:
            answers.remove()
    if json:
        console.print_json(found.data)
    elif not quiet:
        from sim.cli.output.plan import print_plan

        print_plan(found.data, directory, seconds)
    if found.stopped_in:
        console.note(
            f"interrupted during '{found.stopped_in}'; what was found until then is in "
            f"'{directory}'; go on with --resume"
        )
        return EXIT_INTERRUPTED
    return 0


def _written(
    solving: Callable[[], PlanResult],
    directory: Path,
    started_s: float,
    *,
    replaces: bool,
    figures: bool,
) -> tuple[PlanResult, float]:
    """Solve a plan and write its folder; return the seconds that solving took, too."""
    from sim.results.output import output_directory
    from sim.studies.planning.solve import PLAN_FILES

    with output_directory(directory, overwrite=replaces, files=PLAN_FILES) as new:
        found = solving()
        seconds = perf_counter() - started_s
        found.write(new, wall_s=seconds)
        if figures:
            from sim.views.plots.output import write_pngs
            from sim.views.plots.studies.plans import PLAN_FIGURES

            write_pngs(PLAN_FIGURES, found.data, new / "figures")
    return found, seconds


def _answers(directory: Path, *, overwrite: bool, resume: bool) -> AnswerFile:
    """Return the answers to go on from, or an empty file for those to come."""
    from sim.errors import ConfigError
    from sim.studies.planning.phases.progress import AnswerFile

    named = directory if directory.name not in {"", ".."} else directory.resolve()
    path = named.parent / f"{named.name}.answers.jsonl"
    if resume and not path.exists():
        raise ConfigError(
            f"there is no plan to resume in '{directory}': '{path}' is missing; leave "
            f"out --resume, or choose another --out"
        )
    if path.exists() and not (resume or overwrite):
        raise ConfigError(
            f"'{path}' has answers of a plan that was interrupted; go on with "
            f"--resume, or begin anew with --overwrite"
        )
    if overwrite:
        path.unlink(missing_ok=True)
    return AnswerFile(path)


def _say_stopped(stopped: PlanStopped, answers: AnswerFile) -> None:
    """Print the findings of a plan that was stopped too early to be written."""
    for line in stopped.known:
        console.note(line)
    number = len(answers)
    held = "1 answer is" if number == 1 else f"{number:,} answers are"
    console.note(
        f"interrupted during '{stopped.phase}'; {held} in "
        f"'{answers.path}'; go on with --resume"
    )


def _solve(
    config: PlanConfig,
    workers: int | None,
    address: str | None,
    answers: AnswerFile,
    *,
    shown: bool,
) -> PlanResult:
    from sim.cli.output.plan import plan_reporter
    from sim.studies.planning.solve import executor_for, solve

    executor = executor_for(config, workers, address)
    with (
        executor,
        console.stopping_on_interrupt(executor.stop),
        console.progress_bar(plan_reporter, 1, shown=shown) as on_progress,
    ):
        return solve(config, executor, on_progress, answers)
