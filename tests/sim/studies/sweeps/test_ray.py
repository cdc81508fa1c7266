"""Sweeps on a Ray cluster that the test makes; skipped where Ray is not installed."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from sim.errors import UserError
from sim.results.summary.provenance import versions
from sim.studies.sweeps.ray_cluster import run_on_node
from tests.shared import ROOT
from tests.sim.commands import refused
from tests.sim.studies.sweeps.files import seeded_jobs, write_sweep
from tests.sim.studies.sweeps.tasks import add_one

if TYPE_CHECKING:
    from pathlib import Path

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)

QUICK_TO_SEE_A_DEATH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_node_changes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    settings = {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.studies.sweeps.on_ray", str(work)],
        env=os.environ | QUICK_TO_SEE_A_DEATH | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    assert 0 < facts.pop("killed_after") < 38
    assert facts == {
        "statuses": {"done": 36, "crashed": 1, "refused": 1},
        "same": True,
        "engine": "ray",
        "shipped": True,
    }


@needs_ray
def test_no_cluster_at_the_address_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, repeats=2)
    arguments = ["sweep", str(path), "--out", str(tmp_path / "out")]
    line = refused([*arguments, "--address", "127.0.0.1:1"], capsys, tmp_path)
    assert "there is no Ray cluster at '127.0.0.1:1'" in line


def test_a_node_with_other_packages_is_named() -> None:
    (job,) = seeded_jobs(1)
    expected = versions() | {"numpy": "1.0"}
    with pytest.raises(UserError, match=r"a node has numpy .*, where .* it is 1\.0"):
        run_on_node([], job, add_one, expected)


def test_ray_is_an_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sweep(tmp_path, repeats=2)
    plain = builtins.__import__

    def without_ray(name: str, *args: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError("no ray")
        return plain(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    arguments = ["sweep", str(path), "--out", str(tmp_path / "out")]
    line = refused([*arguments, "--address", "auto"], capsys, tmp_path)
    assert "Ray is not installed; pip install 'kvsim[ray]'" in line
