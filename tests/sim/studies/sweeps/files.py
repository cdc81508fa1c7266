"""Small sweeps for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from sim.config.tables import parse_config
from sim.studies.sweeps.expand import Sweep
from sim.studies.sweeps.job import Job
from sim.studies.sweeps.spec import load_sweep
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sim.studies.sweeps.job import Outcome

CRASHER = """
import os
from sim.costs.base import StepCost

class Crash:
    def step(self, shape):
        if shape.num_prefills:
            os._exit(3)
        return StepCost(total_s=0.01)

    def describe(self):
        return {}
"""


def tiny(**engine: Any) -> dict[str, Any]:
    """A run of some milliseconds that preempts."""
    data = minimal(**{"num_gpu_blocks_override": 20, "max_model_len": 300} | engine)
    data["workload"]["synthetic"] |= {
        "num_requests": 12,
        "arrivals": {"kind": "poisson", "rate": 400.0},
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 100},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    return data


def write_sweep(directory: Path, **spec: Any) -> Path:
    """Write a sweep over `tiny`, unless it has a base of its own."""
    path = directory / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": tiny()} | spec, sort_keys=False))
    return path


def sweep_of(directory: Path, **spec: Any) -> Sweep:
    return Sweep(load_sweep(write_sweep(directory, **spec)))


def seeded_jobs(num: int, **engine: Any) -> list[Job]:
    """Jobs that differ in their seed."""
    return [
        Job(i, {"seed": i}, parse_config(tiny(**engine) | {"seed": i}).to_data())
        for i in range(num)
    ]


def by_index(outcomes: Iterable[Outcome]) -> dict[int, tuple[Any, ...]]:
    """Return facts of outcomes that must not depend on where and when a job ran."""
    found = {o.index: (o.status, o.summary, o.error) for o in outcomes}
    return dict(sorted(found.items()))
