"""``kvsim advise``: what would help a run, tried on its traffic."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from sim.cli import console, options

if TYPE_CHECKING:
    from sim.studies.advice.advise import Advice


def advise(
    results: Path,
    /,
    *,
    set_: options.Settings = None,
    seeds: options.Whole = 5,
    workers: options.Workers = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Try the remedies that fit what binds a run, and print the three that help most.

    Kept as advice.json in the folder, where the report finds it; what --set makes
    another run of is only printed.

    Parameters
    ----------
    results
        The --out of 'kvsim run'.
    seeds
        How often the traffic is drawn anew for each remedy, 2 to 11.
    """
    from sim.config.files import override
    from sim.config.tables import parse_config
    from sim.errors import ConfigError
    from sim.results.folder import RunFolder
    from sim.results.output import to_json, write_whole
    from sim.studies.advice.advise import DEFAULT_OBJECTIVE, MAX_SEEDS

    options.check_workers(workers)
    if not 2 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds takes a number from 2 to {MAX_SEEDS}, got {seeds}")
    folder = RunFolder(results).of_one_engine()
    data = deepcopy(dict(folder.config))
    override(data, set_ or ())
    run = parse_config(data).to_data()
    found = _advise(
        run, folder.summary[DEFAULT_OBJECTIVE], seeds, workers, shown=not quiet
    )
    is_this_run = _apart_from_objectives(run) == _apart_from_objectives(
        parse_config(dict(folder.config)).to_data()
    )
    path = results / "advice.json" if is_this_run else None
    if path is not None:
        write_whole(path, to_json(found.to_dict()).encode())
    if json:
        console.print_json(found.to_dict())
    elif not quiet:
        from sim.cli.output.advise import print_advice

        print_advice(found.to_dict(), path)
    return 0


def _apart_from_objectives(run: dict[str, object]) -> dict[str, object]:
    """Return the keys of a run that change it; objectives only judge it."""
    return {key: value for key, value in run.items() if key != "objectives"}


def _advise(
    run: dict[str, object],
    base_value: float | None,
    num_seeds: int,
    workers: int | None,
    *,
    shown: bool,
) -> Advice:
    from sim.cli.output.plan import plan_reporter
    from sim.studies.advice.advise import advise as try_remedies
    from sim.studies.sweeps.job import Job
    from sim.studies.sweeps.session import executor_for

    executor = executor_for([Job(0, {}, run)], workers, None, at_least=1)
    with (
        executor,
        console.stopping_on_interrupt(executor.stop),
        console.progress_bar(plan_reporter, 1, shown=shown) as on_progress,
    ):
        return try_remedies(
            run,
            executor,
            base_value=base_value,
            num_seeds=num_seeds,
            on_progress=on_progress,
        )
