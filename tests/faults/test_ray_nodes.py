"""Nodes of a Ray cluster die in a plan: it is the same, or says what is lost."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.shared import ROOT
from tests.sim.studies.sweeps.test_ray import QUICK_TO_SEE_A_DEATH

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

MARK = "KVSIM_TEST_OF_NODES"
QUICK = QUICK_TO_SEE_A_DEATH | {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}

RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def _left() -> list[int]:
    """Return the processes that the test began, and what those began."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if MARK.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _wait_until_none_is_left() -> list[str]:
    for _ in range(300):
        if not _left():
            return []
        time.sleep(0.1)
    names = []
    for pid in _left():
        with suppress(OSError):
            told = Path(f"/proc/{pid}/cmdline").read_text()
            names.append(told.replace("\0", " ").strip())
            os.kill(pid, signal.SIGKILL)
    # What Ray itself runs on a node that was killed: not a worker, and nothing of ours.
    return [name for name in names if not name.startswith(RAYS_OWN)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_die_in_a_plan(tmp_path: Path) -> None:
    home, place = tmp_path / "home", tmp_path / "place"
    home.mkdir()
    place.mkdir()
    settings = {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", MARK: "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.plan_on_ray", str(place)],
        env=os.environ | QUICK | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert _wait_until_none_is_left() == []
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    one, lost, head = facts["a node"], facts["all processors"], facts["the head"]
    assert one == {"status": 0, "wrote": True, "told": "", "left": 0, "same": True}
    assert "has lost all its processors" in lost["told"]
    assert "go on with --resume" in lost["told"]
    assert (lost["status"], lost["wrote"], lost["same"]) == (2, False, True)
    # Ray ends a command that has lost the head; what it says is its own.
    assert "Failed to connect to GCS" in head["told"]
    assert (head["status"], head["wrote"], head["same"]) == (1, False, True)
    assert lost["left"] > 0
    assert head["left"] > 0
    assert not any("Traceback" in each["told"] for each in facts.values())
