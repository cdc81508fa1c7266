"""docs/extending.md: the scheduler on the page runs, the column on it is one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import load_config, parse_config
from sim.costs.base import STEP_PARTS
from sim.fleet.balancer import Load
from sim.scheduler.views import EngineView, RunningRequest, WaitingRequest
from sim.simulation.run import Simulation
from tests.shared import ROOT
from tests.sim.fleet.test_run import TIGHT, data_of
from tests.test_moved import EXTENSION_POINTS, MOVED

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
ROOMS = ("cache", "kvsim", "sim", "workloads", "examples")
NEW_COLUMN = """
import numpy as np
from kvsim import load_config, simulate

minute = {"workload.preset.duration_s": 60, "cost_intervals": False}
groups = {"engine.scheduler": "v0", "engine.max_model_len": 8192}
for engine in ({}, groups):
    results = simulate(load_config("examples/demo.yaml", minute | engine))
    arrivals_s = np.sort(results.requests["arrival_s"])
    expected = np.searchsorted(arrivals_s, results.steps["start_s"], side="right")
    assert results.steps["num_arrived"].tolist() == expected.tolist()
    print(len(expected))
"""


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    return str(found)


def test_the_table_names_the_extension_points_and_where_they_were() -> None:
    for path in EXTENSION_POINTS:
        if path not in ("sim.scheduler.base", "workloads.spec"):
            assert f"`{path}." in PAGE, path
    for old, (new, _) in MOVED.items():
        assert f"`{old}` (now\n`{new}`)" in PAGE or f"`{old}` (now `{new}`)" in PAGE


def test_the_scheduler_on_the_page_prints_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    Path("static_batching.py").write_text(block("python"))
    shutil.copytree(ROOT / "examples", "examples")
    arguments = shlex.split(block("sh").replace("\\\n", " "))[1:]
    assert kvsim([*arguments, "--no-figures", "--out", "out"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in block("text").splitlines():
        assert line in printed
    changes = [value for value in arguments if "=" in value]
    short = [*changes, "workload.preset.duration_s=60"]
    results = Simulation(load_config("examples/demo.yaml", short)).run(check_every=1)
    served = results.requests["num_prompt_tokens"] < 4096
    assert results.summary["completed"] == served.sum() > 100


@pytest.mark.parametrize(
    ("page", "name", "key"),
    [
        ("policies", "InTurn", "engine.preemption_victim"),
        ("policies", "ShortWhenBusy", "engine.admission"),
        ("fleets", "Shortest", "fleet.router"),
        ("tiers", "Newest", None),
    ],
)
def test_classes_on_other_pages_run(
    page: str, name: str, key: str | None, tmp_path: Path
) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    (source,) = (
        found
        for found in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
        if f"class {name}" in found
    )
    path = tmp_path / "mine.py"
    path.write_text(source)
    kind = f"{path}:{name}"
    data = data_of(TIGHT, {"pools": [{"name": "main", "replicas": 2}]})
    if key is None:
        del data["fleet"]
        gbs = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}
        tier = {"type": kind, "capacity_bytes": 1e9, **gbs}
        extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        data["engine"] |= {
            "kv_offloading_size": 0.1,
            "kv_transfer_config": {"kv_connector_extra_config": extra},
        }
    else:
        room, _, part = key.partition(".")
        data[room][part] = {"kind": kind}
    results = Simulation(parse_config(data)).run(check_every=1)
    assert results.summary["completed"] == 60


def test_the_page_names_what_views_and_prices_have() -> None:
    for part in STEP_PARTS:
        assert f"`{part}`" in PAGE, part
    views = {RunningRequest, WaitingRequest, EngineView}
    for name in {n for view in views for n in dir(view) if not n.startswith("_")}:
        assert f"`{name}`" in PAGE, name
    for name in Load._fields:
        assert f"`{name}`" in PAGE, name


def test_the_change_on_the_page_adds_a_column(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git applies the change")
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room)  # with what Python has compiled
    (tmp_path / "new.diff").write_text(block("diff"))
    assert len(re.findall(r"^\+\+\+ ", block("diff"), re.MULTILINE)) <= 3
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    environment |= {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    for command in (["git", "apply", "new.diff"], [sys.executable, "-c", NEW_COLUMN]):
        done = subprocess.run(
            command,
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
