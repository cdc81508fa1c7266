"""Candidates of a plan: GPU types x parallel sizes x engine settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.errors import CapacityError, ConfigError
from sim.hardware.gpus import load_gpu, price_name
from sim.hardware.models.bundled import load_model
from sim.results.summary.compared import short_value
from sim.simulation.assemble import make_capacity, make_cost_model
from sim.studies.planning.search.trial import scale_of
from sim.studies.planning.spec import WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.hardware.capacity import CapacityEstimate
    from sim.studies.planning.spec import PlanConfig

_ALWAYS = ("model", "gpu", "tensor_parallel_size")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the traffic."""

    name: str
    """Of files and rows: model, GPU, ranks, and the settings that tell it apart."""
    run: Mapping[str, Any]
    """A configuration of ``kvsim run`` with the plan's traffic and seed."""
    capacity: CapacityEstimate | None
    reason: str = ""
    """Why it cannot run, in a line; empty if it can."""

    @property
    def pool(self) -> CapacityEstimate:
        """The capacity of a candidate that can run."""
        assert self.capacity is not None
        return self.capacity

    @property
    def model(self) -> str:
        return str(self.run["engine"]["model"])

    @property
    def gpu(self) -> str:
        return price_name(self.run["engine"]["gpu"])

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, of all its ranks."""
        engine = self.run["engine"]
        keys = (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
        )
        return prod(int(engine.get(key, 1)) for key in keys)

    @property
    def host_gib(self) -> float:
        """Host memory behind the pool of one engine."""
        return float(self.run["engine"].get("kv_offloading_size") or 0.0)

    @property
    def link_gb_per_s(self) -> float:
        """Speed of the link to it, where it is named, towards one engine."""
        link = self.run["engine"].get("kv_offloading_link") or {}
        return float(link.get("load_bytes_per_s") or 0.0) / 1e9

    @property
    def scale(self) -> float:
        """``rate_scale`` of the plan's traffic."""
        return scale_of(self.run)


def candidates_of(plan: PlanConfig) -> list[Candidate]:
    """Return all candidates in the order of the plan's axes, those that fit or not.

    If none can run, the first refuses the plan.
    """
    chosen = [
        dict(zip(axes, values, strict=True))
        for axes in plan.tables
        for values in product(*axes.values())
    ]
    found = [_candidate(plan, each) for each in chosen]
    for name, number in Counter(each.name for each in found).items():
        if number > 1:
            raise ConfigError(
                f"candidates: {name} stands {number} times; keep it in one table"
            )
    plan.parsed_prices.check(dict.fromkeys(each.gpu for each in found))
    if all(each.reason for each in found):
        first = found[0]
        raise ConfigError(
            f"candidates: none of {len(found)} can run, the first, {first.name}, "
            f"because: {first.reason}"
        )
    return found


def _candidate(plan: PlanConfig, chosen: Mapping[str, Any]) -> Candidate:
    engine = {**plan.engine, **chosen}
    run = {
        "workload": _traffic(plan),
        "engine": engine,
        "cost": _cost(plan, engine["gpu"]),
        "seed": plan.seed,
    }
    name = _name(plan, engine)
    config = parse_config(run)
    # Every key that is left out is filled in, so that the file holds the whole run.
    run = config.to_data()
    model, gpu = load_model(config.engine.model), load_gpu(config.engine.gpu)
    try:
        capacity = make_capacity(config.engine, model, gpu)
        make_cost_model(config, model, gpu)
    except (CapacityError, ConfigError) as error:
        return Candidate(name, run, None, " ".join(str(error).split()))
    return Candidate(name, run, capacity)


def _traffic(plan: PlanConfig) -> dict[str, Any]:
    workload = {k: v for k, v in plan.workload.model_dump().items() if v is not None}
    if plan.workload.trace is not None:
        workload.setdefault("resample", {"window_s": WINDOW_S, "num_windows": None})
    return workload


def _cost(plan: PlanConfig, gpu: str) -> dict[str, Any]:
    if gpu in plan.profiles:
        return {"kind": "measured", "profile": plan.profiles[gpu]}
    return dict(plan.cost)


def _varied(plan: PlanConfig) -> list[str]:
    """Return keys, besides those of every name, that tell candidates apart."""
    values: dict[str, list[Any]] = {}
    for axes in plan.tables:
        for key, found in axes.items():
            values.setdefault(key, []).extend(found)
    return [key for key, all_ in values.items() if key not in _ALWAYS and len(all_) > 1]


def _name(plan: PlanConfig, engine: Mapping[str, Any]) -> str:
    """Return a name that is a file's, too."""
    num_gpus = engine.get("tensor_parallel_size", 1)
    parts = [Path(str(engine["model"])).name, Path(str(engine["gpu"])).stem]
    parts.append(f"tp{num_gpus}")
    parts += [f"{key}={_said(engine[key])}" for key in _varied(plan) if key in engine]
    text = "_".join(parts)
    return "".join(c if c.isalnum() or c in "._=-" else "-" for c in text)


def _said(value: object) -> str:
    return short_value(value) if isinstance(value, dict) else str(value)
