"""Two processes that write to one path: the second is refused, nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import run as kvsim
from sim.errors import OutputError
from sim.results.output import claimed, output_directory
from tests.shared import ROOT
from tests.sim.commands import claimed_elsewhere, files, refused
from tests.sim.studies.planning.plans import small, written
from tests.sim.studies.sweeps.files import write_sweep

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = (
    "run run.yaml --out out",
    "sweep sweep.yaml --workers 1 --out out",
    "plan plan.yaml --workers 1 --out out",
    "report done --out out.html",
    "plot done --figure kv_cache_usage --out drawn",
    "export done --to csv --out out",
    "export done --to bench --out out.json",
    "calibrate --model Qwen/Qwen3-8B --preset quick --dry-run --out out.json",
    "workload generate run.yaml --to kvsim --out out.jsonl",
    "workload convert run.yaml --to kvsim --out out.jsonl",
    "workload describe run.yaml --out out",
    "workload curve run.yaml --out out",
)
"""Commands that write, each with its output last."""


def test_whoever_comes_second_is_refused(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_sweep(tmp_path, repeats=2)
    written(small(), tmp_path)
    monkeypatch.chdir(tmp_path)
    done = ["run", str(config), "--quiet", "--no-figures", "--out", "done"]
    assert kvsim(done) == 0
    for command in COMMANDS:
        words = command.split()
        target = tmp_path / words[-1]
        if words[0] == "plot":  # many may draw into one folder
            target.mkdir()
            target /= "kv_cache_usage.png"
        said = f"another kvsim is writing to '{target.relative_to(tmp_path)}'"
        with claimed_elsewhere(target):
            assert said in refused(words, capsys, tmp_path)
            assert said in refused([*words, "--overwrite"], capsys, tmp_path)


def test_two_runs_at_once_leave_one_whole(config: Path, tmp_path: Path) -> None:
    """They begin together; both exited 0 once, and one folder was gone."""
    out = tmp_path / "deep" / "out"
    command = [sys.executable, "-m", "kvsim", "run", str(config), "--no-figures"]
    both = [
        subprocess.Popen(
            [*command, "--set", f"seed={seed}", "--out", str(out)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    said = [each.communicate()[1] for each in both]
    first, second = sorted(range(2), key=lambda i: both[i].returncode)
    assert [both[first].returncode, both[second].returncode] == [0, 2], said
    one_line = said[second].splitlines()
    assert len(one_line) == 1
    assert "another kvsim is writing" in one_line[0] or "exists already" in one_line[0]
    assert f"seed: {first + 1}" in (out / "config.yaml").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """Without locks, or where something else makes the folder."""
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="could not be written"):  # noqa: PT012, SIM117
        with output_directory(out, overwrite=False) as folder:
            (folder / "summary.json").write_text("{}")
            out.mkdir()
            (out / "mine").write_text("kept")
    assert files(tmp_path) == {"out/mine": b"kept"}


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    pid = os.fork()
    if not pid:  # pragma: no cover - ends here
        with claimed(path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 1
    with claimed(path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_claim_is_held_once_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with claimed(path), claimed(tmp_path / "other" / ".." / "out"), claimed(None):
        assert len(list(tmp_path.iterdir())) == 1
    for _ in range(2):
        with claimed_elsewhere(path), pytest.raises(OutputError), claimed(path):
            pass
    assert not list(tmp_path.iterdir())
