"""Paths that users were told to import from still work, and say where things are."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

from tests.shared import ROOT

EXTENSION_POINTS = {
    "sim.scheduler": ["Scheduler"],
    "sim.scheduler.base": ["Scheduler"],
    "sim.scheduler.victims": ["VictimPolicy"],
    "sim.scheduler.admission": ["AdmissionRule"],
    "sim.costs": ["BatchShape", "CostModel", "StepCost"],
    "cache.v1.policies": ["CachePolicy", "KeyedPolicy"],
    "cache.v0.evictor": ["Evictor", "KeyedEvictor"],
    "workloads.arrivals": ["ArrivalProcess"],
    "workloads.lengths": ["LengthDistribution"],
    "workloads.traces": ["TraceReader"],
    "workloads.spec": ["RequestSpec"],
}
"""Where they are defined or handed on; `docs/extending.md` lists them."""

MOVED = {
    "sim.cost": ("sim.costs", ["BatchShape", "CostModel", "StepCost"]),
    "cache.policies": (
        "cache.v1.policies",
        ["CACHE_POLICIES", "CachePolicy", "KeyedPolicy"],
    ),
    "cache.evictor": ("cache.v0.evictor", ["EVICTORS", "Evictor", "KeyedEvictor"]),
    "sim.scheduler.queues": ("sim.scheduler.v1.queues", ["FCFSRequestQueue"]),
}


@pytest.mark.parametrize("path", EXTENSION_POINTS)
def test_extension_points_are_there(path: str) -> None:
    for name in EXTENSION_POINTS[path]:
        assert isinstance(getattr(import_module(path), name), type)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_same_object_and_warns_at_the_line(old: str) -> None:
    new, names = MOVED[old]
    for name in names:
        with pytest.warns(DeprecationWarning, match=re.escape(f"{new}.{name}")) as said:
            found = getattr(import_module(old), name)
        assert found is getattr(import_module(new), name)
        assert [each.filename for each in said] == [__file__]


@pytest.mark.parametrize(
    "statement",
    [
        "from sim.scheduler.v1 import V1Scheduler",
        "from sim.scheduler.v1 import Settings, Scheduler",
        "from sim.scheduler.v0 import Scheduler",
    ],
)
def test_a_users_file_may_be_the_first_to_import_a_scheduler(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True, cwd=ROOT)


def test_a_wrong_name_is_refused_without_a_warning() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CostModle'"):
        import_module("sim.cost").CostModle  # noqa: B018


def test_the_line_of_an_import_is_blamed() -> None:
    code = "\nfrom sim.cost import CostModel"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "<string>:2: DeprecationWarning: sim.cost.CostModel is now" in done.stderr
