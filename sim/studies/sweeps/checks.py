"""What is wrong with a sweep, found before any of it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.errors import CapacityError, ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_cost_model
from sim.simulation.workload import make_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.studies.sweeps.expand import Expanded, Sweep
    from sim.studies.sweeps.job import Job

MAX_UNASKED = 10_000
"""Runs of a sweep that nobody has to be asked about."""

_MOST_TRIED = 256


def check_size(sweep: Sweep, *, confirmed: bool) -> None:
    """Refuse a sweep that is larger than was probably meant.

    Raises
    ------
    ConfigError
        With the number of runs.
    """
    if sweep.num_runs > MAX_UNASKED and not confirmed:
        raise ConfigError(
            f"the sweep has {sweep.num_runs:,} runs; more than {MAX_UNASKED:,} are "
            f"started only with --yes"
        )


def check_runs(runs: Sequence[Expanded]) -> None:
    """Refuse a sweep with a mistake that is not of single runs.

    Keys of tables with `kind` are known when their objects are made. That is done for
    one of all runs that differ in numbers only.

    Raises
    ------
    ConfigError
        In a line, with the run; also if keys contradict each other in every run.
    """
    refusals = [run.refusal for run in runs if run.refusal is not None]
    if len(refusals) == len(runs):
        raise ConfigError(f"no run of the sweep can start: {refusals[0]}")
    tried: set[str] = set()
    for run in runs:
        shape = json.dumps(_without_numbers(run.job.overrides), sort_keys=True)
        if run.refusal is None and shape not in tried and len(tried) < _MOST_TRIED:
            tried.add(shape)
            _check_parts(run.job)


def _is_users(value: Any) -> bool:
    """Whether a class of the user's is named anywhere."""
    if isinstance(value, dict | list):
        return any(map(_is_users, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and ".py:" in value


def _without_numbers(value: Any) -> Any:
    """Return a value in which all numbers are alike."""
    if isinstance(value, dict):
        return {key: _without_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_numbers(each) for each in value]
    return 0 if isinstance(value, int | float) else value


def _check_parts(job: Job) -> None:
    """Make what a run is made of, without reading a trace or counting blocks.

    Users' own classes are left to the workers, which may die of them.
    """
    config = parse_config(dict(job.config))
    try:
        model, gpu = load_model(config.engine.model), load_gpu(config.engine.gpu)
        if not _is_users(config.workload.model_dump()):
            make_workload(config.workload, config.seed)
        if not _is_users(config.cost):
            make_cost_model(config, model, gpu)
    except CapacityError:
        return  # of this run: it will say so
    except ConfigError as error:
        raise ConfigError(f"run {job.index}: {error}") from error
