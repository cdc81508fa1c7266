"""Ctrl-C at every stage, and directories that must survive."""

from __future__ import annotations

import json
import pkgutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from tests.sim.commands import files, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def interrupting(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str, int], None]]:
    """Send Ctrl-C to ourselves when `name` is called for the n-th time."""
    # A shell starts background jobs with the signal ignored; a user's is not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def install(name: str, nth: int) -> None:
        module_name, _, attribute = name.rpartition(".")
        owner: Any = pkgutil.resolve_name(module_name)
        original = getattr(owner, attribute)
        calls = iter(range(1, 1_000_000))

        def wrapped(*args: Any, **more: Any) -> Any:
            if next(calls) == nth:
                signal.raise_signal(signal.SIGINT)
            return original(*args, **more)

        monkeypatch.setattr(owner, attribute, wrapped)

    yield install
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("options", "place", "nth"),
    [
        (
            ["--set", "engine.async_scheduling=false", "--stepwise"],
            "sim.scheduler.v1.scheduler.Scheduler.update",
            200,
        ),
        ([], "sim.scheduler.v1.scheduler.Scheduler.quiet_steps", 100),
    ],
    ids=["stepwise", "fast"],
)
def test_ctrl_c_in_the_loop_keeps_what_was_finished(
    *,
    options: list[str],
    place: str,
    nth: int,
    config: Path,
    tmp_path: Path,
    interrupting: Callable[[str, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupting(place, nth)
    out = tmp_path / "out"
    assert kvsim(["run", str(config), "--out", str(out), *options]) == 130
    summary = json.loads((out / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["num_steps"] == 200 or not options
    assert 0 < summary["completed"] < 120 == summary["num_requests"]
    assert summary["unfinished"] + summary["unsent"] == 120 - summary["completed"]
    assert len(list((out / "figures").glob("*.png"))) == 6
    assert "interrupted; what was finished is in" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run.yaml"]


@pytest.mark.slow
def test_ctrl_c_while_writing_or_drawing_keeps_the_tables(
    config: Path, tmp_path: Path, interrupting: Callable[[str, int], None]
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--quiet", "--out", str(out)]
    interrupting("sim.results.run.write_table", 2)
    assert kvsim(arguments) == 130
    assert len(files(out)) == 12
    interrupting("sim.views.plots.output.to_png", 3)
    assert kvsim([*arguments, "--overwrite"]) == 130
    assert not (out / "figures").exists()
    assert len(files(out)) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run.yaml"]


def test_ctrl_c_before_the_loop_says_so_and_leaves_nothing(
    config: Path,
    tmp_path: Path,
    interrupting: Callable[[str, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupting("workloads.workload.SyntheticWorkload.requests", 1)
    assert kvsim(["run", str(config), "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "kvsim: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_ctrl_c_while_old_results_are_replaced_loses_neither(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--no-figures", "--quiet", "--out", str(out)]
    assert kvsim(arguments) == 0
    before = files(tmp_path)
    rename = Path.rename
    calls = iter(range(1, 100))

    def interrupted(path: Path, target: Path) -> Path:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    assert kvsim([*arguments, "--overwrite"]) == 130
    assert files(tmp_path) == before


def test_the_working_directory_is_not_replaced(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    line = refused(["run", str(config), "--out", ".", "--overwrite"], capsys, tmp_path)
    assert "is or holds the working directory" in line
    long = refused(["run", str(config), "--out", "x" * 300], capsys, tmp_path)
    assert "File name too long" in long
