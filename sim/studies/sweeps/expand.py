"""From a sweep to its runs, the same ones every time, and mistakes found before any."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sim.config.files import find_files, place_of, put
from sim.config.tables import RunConfig, parse_config
from sim.errors import CapacityError, ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_cost_model
from sim.simulation.workload import make_workload
from sim.studies.sweeps.job import Job
from workloads.draws.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from sim.studies.sweeps.spec import DrawnBlock, SweepFile

MAX_UNASKED = 10_000
"""Runs of a sweep that need no ``--yes``."""
MAX_RUNS = 1_000_000
"""Runs that one sweep may have: each is held with its whole configuration."""

_MOST_TRIED = 256
_TABLES = frozenset({"workload", "synthetic", "preset", "engine"})
Overrides = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expanded:
    """A run as far as it is known before it runs."""

    job: Job
    refusal: str | None
    """Why keys contradict each other, so that the run will be refused."""


class Sweep:
    """The runs of a sweep file.

    The combinations of its blocks, list first and drawn values last, each as often as
    ``repeats`` says. Repeat r of a combination has the seed ``seed + r``, the same for
    all combinations (common random numbers), or the index of the run in place of r.

    Parameters
    ----------
    file
        The sweep file, read.

    Raises
    ------
    ConfigError
        For more than `MAX_RUNS` runs, before any value is drawn.
    """

    def __init__(self, file: SweepFile) -> None:
        self.file = file
        self.spec = file.spec
        if self.num_runs > MAX_RUNS:
            raise ConfigError(
                f"the sweep has {self.num_runs:,} runs; one sweep has at most "
                f"{MAX_RUNS:,}: leave out values, or make several"
            )
        self._blocks = self._read_blocks()

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        spec = self.spec
        num = spec.repeats * prod(map(len, (spec.grid or {}).values()))
        if spec.list is not None:
            num *= len(spec.list)
        for block in (spec.random, spec.latin_hypercube):
            if block is not None:
                num *= block.num_runs
        return num

    def runs(self) -> Iterator[Expanded]:
        """Yield the runs, in order.

        Raises
        ------
        ConfigError
            For a key that does not exist, a value of the wrong type or out of range,
            or a file that is not there: no run of the sweep is worth starting.
        """
        repeats = self.spec.repeats
        for number, parts in enumerate(product(*self._blocks)):
            overrides = {key: each for part in parts for key, each in part.items()}
            for repeat in range(repeats):
                yield self._run(number * repeats + repeat, repeat, overrides)

    def jobs(self) -> Iterator[Job]:
        """Yield the runs, as executors take them."""
        return (run.job for run in self.runs())

    def _run(self, index: int, repeat: int, overrides: Overrides) -> Expanded:
        data = copy.deepcopy(dict(self.file.base))
        seed = self._seed(index, repeat, data)
        if seed is not None:
            overrides = overrides | {"seed": seed}
        for key, value in overrides.items():
            put(data, key, value)
        try:
            find_files(data, self.file.directory)
            return _checked(index, overrides, data)
        except ConfigError as error:
            raise ConfigError(f"run {index}: {error}") from error

    def _seed(self, index: int, repeat: int, base: Mapping[str, Any]) -> int | None:
        """Return the seed of a run, or None where the base's stays."""
        spec = self.spec
        step = repeat if spec.common_random_numbers else index
        if spec.seed is not None:
            return spec.seed + step
        seed = base.get("seed", 0)
        if not step or type(seed) is not int:  # which the base's check refuses
            return None
        return seed + step

    # -- blocks -----------------------------------------------------------------

    def _read_blocks(self) -> list[Sequence[Overrides]]:
        spec = self.spec
        blocks: list[Sequence[Overrides]] = []
        if spec.list is not None:
            blocks.append(spec.list)
        for key, values in (spec.grid or {}).items():
            blocks.append([{key: value} for value in values])
        streams = Streams(spec.seed or 0)
        if spec.random is not None:
            blocks.append(_drawn(spec.random, streams))
        if spec.latin_hypercube is not None:
            rng = streams.generator("sweep.latin_hypercube")
            blocks.append(_latin_hypercube(spec.latin_hypercube, rng))
        return blocks


def _drawn(block: DrawnBlock, streams: Streams) -> list[Overrides]:
    """Draw each key from a stream of its own, so that others leave it as it is."""
    rows: list[Overrides] = [{} for _ in range(block.num_runs)]
    for key, values in block.ranges.items():
        shares = streams.generator(f"sweep.random.{key}").random(block.num_runs)
        for row, share in zip(rows, shares.tolist(), strict=True):
            row[key] = values.at(share)
    return rows


def _latin_hypercube(block: DrawnBlock, rng: np.random.Generator) -> list[Overrides]:
    """Draw so that every key has one value in each of `num_runs` equal parts."""
    from scipy.stats import qmc  # noqa: PLC0415  (0.3 s that few sweeps need)

    sampler = qmc.LatinHypercube(d=len(block.ranges), seed=rng)
    shares: NDArray[np.float64] = sampler.random(block.num_runs)
    return [
        {key: r.at(share) for (key, r), share in zip(ranges, row, strict=True)}
        for ranges, row in ((block.ranges.items(), row) for row in shares.tolist())
    ]


def value_at(data: Mapping[str, Any], key: str) -> Any:
    """Return the value at a key with dots; None where there is none."""
    value: Any = data
    for name in key.split("."):
        if isinstance(value, list):
            place = place_of(value, name)
            value = None if place is None else value[place]
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def _checked(index: int, overrides: Overrides, data: dict[str, Any]) -> Expanded:
    """Return the run, its configuration complete if its keys fit together."""
    if "cost_intervals" in RunConfig.model_fields:
        # Two more simulations a run, which a sweep asks for if it wants them.
        data.setdefault("cost_intervals", False)
    try:
        config = parse_config(data)
    except ConfigError as error:
        if not _is_contradiction(error.__cause__):
            raise
        return Expanded(Job(index, overrides, data), str(error))
    return Expanded(Job(index, overrides, config.to_data()), None)


def _is_contradiction(error: BaseException | None) -> bool:
    """Whether all keys are right by themselves, but not together."""
    return isinstance(error, ValidationError) and all(
        problem["type"] == "value_error" and set(problem["loc"]) <= _TABLES
        for problem in error.errors()
    )


def check_size(sweep: Sweep, *, confirmed: bool) -> None:
    """Refuse a sweep that is larger than was probably meant."""
    if sweep.num_runs > MAX_UNASKED and not confirmed:
        raise ConfigError(
            f"the sweep has {sweep.num_runs:,} runs; more than {MAX_UNASKED:,} are "
            f"started only with --yes"
        )


def check_runs(runs: Sequence[Expanded]) -> None:
    """Refuse a sweep with a mistake that is not of single runs.

    Keys of tables with `kind` are known when their objects are made. That is done for
    one of all runs that differ in numbers only.
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
    """Return whether a class of the user's is named anywhere."""
    if isinstance(value, dict | list):
        return any(map(_is_users, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and ".py:" in value


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_numbers(each) for each in value]
    return 0 if isinstance(value, int | float) else value


def _check_parts(job: Job) -> None:
    """Make the parts of a run, without reading a trace or counting blocks.

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
