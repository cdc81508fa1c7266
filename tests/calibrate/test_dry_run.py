"""The whole of a calibration on a fake clock: finished, killed, resumed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from calibrate.harness import dry_run
from calibrate.harness.checkpoint import Checkpoint
from calibrate.harness.dry_run import DryRunDevice, DryTask
from calibrate.harness.grid import PRESETS, build_grid
from calibrate.harness.output import profile_of
from calibrate.harness.recorded import RecordedDevice
from calibrate.harness.session import Session
from calibrate.measurement import canonical
from sim.cli.main import run
from sim.errors import UserError
from tests.calibrate.calibrations import SeemingH200
from tests.calibrate.runs import DyingDevice, Killed, calibrated, geometry, settings
from tests.shared import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from calibrate.harness.device import Task
    from calibrate.measurement import Point

MODEL = ("--model", "meta-llama/Llama-3.1-8B")


def test_a_profile_holds_every_operation(tmp_path: Path) -> None:
    profile = calibrated(tmp_path / "c", settings(), DryRunDevice())
    assert profile["format"] == "kvprofile/1"
    assert profile["kind"] == "dry-run"
    assert profile["units"] == {"size": "byte", "time": "s"}
    rest = {name: part for name, part in profile.items() if name != "id"}
    digest = hashlib.sha256(canonical(rest).encode()).hexdigest()
    assert profile["id"] == f"sha256:{digest}"
    names = {table["operation"] for table in profile["ops"]}
    assert names >= {
        *("decode_attention", "decode_attention_skewed", "prefill_attention"),
        *("mixed_attention", "gemm", "swap", "copy", "layer", "launch"),
        *("decode_attention.eager", "decode_attention.host", "swap.host"),
    }
    layers = {table["constants"].get("layer") for table in profile["ops"]}
    assert layers >= {"norm", "rope", "activation", "cache_write", "sampler"}


def test_tables_are_columns_of_one_length(tmp_path: Path) -> None:
    profile = calibrated(tmp_path / "c", settings(), DryRunDevice())
    for table in profile["ops"]:
        times = table["quantiles"]
        columns = [*table["axes"].values(), *times.values(), table["n"]]
        assert {len(column) for column in columns} == {len(table["n"])}
        assert min(table["n"]) >= 5
        for low, middle, high, most in zip(
            times["p10_s"], times["p50_s"], times["p90_s"], times["p99_s"], strict=True
        ):
            assert 0 < low <= middle <= high <= most
        points = list(zip(*table["axes"].values(), strict=True))
        assert len(set(points)) == len(points)


def test_provenance_says_how_and_nothing_about_where(tmp_path: Path) -> None:
    provenance = calibrated(tmp_path / "c", settings(), DryRunDevice())["provenance"]
    assert "nothing was measured" in provenance["device"]["name"]
    assert provenance["date"] == "1970-01-01T00:00:00Z"
    assert provenance["model"]["num_kv_heads"] == 8
    assert provenance["backends"]["swap/loop"] == "dry-run"
    assert provenance["stability"]["stable"] is True
    assert str(tmp_path) not in canonical(provenance)


def test_the_same_seed_gives_the_same_file_and_another_does_not(tmp_path: Path) -> None:
    asked = settings(operations=("gemm", "swap"))
    once, again = (
        calibrated(tmp_path / name, asked, DryRunDevice()) for name in ("a", "b")
    )
    assert canonical(once) == canonical(again)
    other = calibrated(tmp_path / "c", settings(seed=1), DryRunDevice())
    assert other["id"] != once["id"]


@pytest.mark.parametrize("last_visit", [1, 58, 1200])
def test_killed_and_resumed_it_gives_the_same_file(
    tmp_path: Path, last_visit: int
) -> None:
    """In the grid, at a block's edge, and among the points that are added."""
    asked = settings("default", ("decode_attention", "swap", "gemm"))
    whole = calibrated(tmp_path / "whole", asked, DryRunDevice())
    path = tmp_path / "killed"
    with pytest.raises(Killed):
        calibrated(path, asked, DyingDevice(last_visit))
    path.write_bytes(path.read_bytes() + b'{"block":"grid/0/')  # cut by the kill
    with pytest.raises(Killed):
        calibrated(path, asked, DyingDevice(40), resume=True)
    resumed = calibrated(path, asked, DryRunDevice(), resume=True)
    assert canonical(resumed) == canonical(whole)


@pytest.mark.parametrize("last_visit", [95, 130])
def test_a_checkpoint_is_finished_without_its_device(
    tmp_path: Path, last_visit: int
) -> None:
    """Each point was visited once, of two times: its samples of then are all."""
    asked = settings("brief", operations=("gemm",))
    whole = calibrated(tmp_path / "whole", asked, SeemingH200())
    path = tmp_path / "killed"

    class Dying(SeemingH200, DyingDevice):
        """Is an H200 until then."""

    with pytest.raises(Killed):
        calibrated(path, asked, Dying(last_visit))
    before = path.read_bytes()
    device = RecordedDevice(Checkpoint(path))
    outcome = Session(device, asked, Checkpoint(path)).run(resume=False, finish=True)
    finished = profile_of(outcome, asked, device)
    assert path.read_bytes() == before
    cut = finished["provenance"]["cut_short"]
    assert cut["asked"] // 2 <= cut["visits"] < cut["asked"]
    assert "cut_short" not in whole["provenance"]
    assert finished["provenance"]["device"]["name"] == "NVIDIA H200"
    tables = zip(finished["ops"], whole["ops"], strict=True)
    for mine, theirs in tables:
        assert mine["axes"] == theirs["axes"]
        assert sum(mine["n"]) <= sum(theirs["n"])
    assert sum(sum(t["n"]) for t in finished["ops"]) < sum(
        sum(t["n"]) for t in whole["ops"]
    )
    with pytest.raises(UserError, match="times nothing"):
        device.overlap({}, {}, 0)


def test_a_checkpoint_that_lacks_points_is_not_finished(tmp_path: Path) -> None:
    asked = settings("brief", operations=("gemm",))
    path = tmp_path / "c"
    with pytest.raises(Killed):
        calibrated(path, asked, DyingDevice(30))
    session = Session(DryRunDevice(), asked, Checkpoint(path))
    with pytest.raises(UserError, match=r"lacks \d+ of 84 points .* until each was"):
        session.run(resume=False, finish=True)
    with pytest.raises(UserError, match="no datasheet of 'dry run"):
        RecordedDevice(Checkpoint(path))


KILL = """
import os, signal, sys
from calibrate.harness import dry_run
class Dying(dry_run.DryRunDevice):
    visits = 0
    def prepare(self, point, backend, seed):
        self.visits += 1
        if self.visits == 77:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prepare(point, backend, seed)
dry_run.DryRunDevice = Dying
from sim.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_the_command_survives_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "profile.json", tmp_path / "whole.json"
    arguments = ["calibrate", *MODEL, "--preset", "quick", "--dry-run", "--quiet"]
    command = [sys.executable, "-c", KILL, *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert out.with_name("profile.json.checkpoint").exists()
    assert run([*arguments, "--out", str(out)]) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert run([*arguments, "--out", str(out), "--resume"]) == 0
    assert run([*arguments, "--out", str(whole)]) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "profile.json",
        "whole.json",
    ]


def even(batch: int, context: int) -> tuple[int, int, int]:
    return batch, batch * context, context


def test_points_are_added_where_the_curve_bends(tmp_path: Path) -> None:
    asked = settings("default", ("decode_attention",))
    device = DryRunDevice()
    profile = calibrated(tmp_path / "c", asked, device)
    choices = device.choices("auto", asked.operations)
    grid = build_grid(PRESETS["default"], geometry(), device.limits, choices)
    planned = {(point.curve.variant, point.values) for point in grid}
    measured = {
        (table["variant"], values if len(values) == 3 else even(*values))
        for table in profile["ops"]
        if "." not in table["operation"]
        for values in zip(*table["axes"].values(), strict=True)
    }
    assert planned < measured
    assert len(measured) <= 1.2 * len(planned)


class Drifting(DryRunDevice):
    """Slows down by a fifth in a hundred visits."""

    visits = 0

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        task = super().prepare(point, backend, seed)
        assert isinstance(task, DryTask)
        self.visits += 1
        task._base_s *= 1 + self.visits / 500
        return task


def test_a_device_that_drifts_is_called_unstable(tmp_path: Path) -> None:
    profile = calibrated(tmp_path / "c", settings(), Drifting())
    stability = profile["provenance"]["stability"]
    assert stability["stable"] is False
    assert max(stability["ratios"].values()) > 1.05


def test_another_calibration_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(Killed):
        calibrated(path, settings(), DyingDevice(30))
    with pytest.raises(UserError, match="seed was 0, now it is 1; repeat the same"):
        calibrated(path, settings(seed=1), DryRunDevice(), resume=True)
    larger = replace(settings(), geometry=replace(geometry(), block_size=32))
    with pytest.raises(UserError, match=r"geometry\.block_size was 16, now it is 32;"):
        calibrated(path, larger, DryRunDevice(), resume=True)
    with pytest.raises(UserError, match=r"no checkpoint at .* start without --resume"):
        calibrated(tmp_path / "none", settings(), DryRunDevice(), resume=True)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "garbage\n", *lines[1:]]))
    with pytest.raises(UserError, match="damaged"):
        calibrated(path, settings(), DryRunDevice(), resume=True)
    path.write_text('{"format":"kvsim-calibration/2"}\n')
    with pytest.raises(UserError, match="no checkpoint of the format"):
        calibrated(path, settings(), DryRunDevice(), resume=True)
    path.write_text("".join([lines[0], *lines[2:]]))
    with pytest.raises(UserError, match=r"holds the block .* where 'gate' belongs"):
        calibrated(path, settings(), DryRunDevice(), resume=True)


def test_the_command_shows_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    arguments = ["calibrate", *MODEL, "--preset", "quick", "--dry-run"]
    assert run([*arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "dry run (nothing was measured): meta-llama/Llama-3.1-8B" in shown
    assert "decode, best KV bandwidth" in shown
    assert "sentinels, p95 over p5" in shown
    assert json.loads(out.read_text())["interference"]["points"]


def test_provenance_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", *MODEL, "--dry-run", "--json", "--preset", "quick"]
    out = str(tmp_path / "p.json")
    assert run([*arguments, "--ops", "gemm,swap", "--out", out]) == 0
    assert json.loads(capsys.readouterr().out)["preset"] == "quick"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--preset", "huge"], "unknown preset: 'huge'; use quick, brief, default,"),
        (["--backend", "cudnn"], "unknown backend: 'cudnn'; use auto, vllm"),
        (["--ops", "gem"], "unknown operation: 'gem'; use decode_attention"),
        (["--time-limit", "0"], "time_limit must be a number of seconds above 0; got"),
        (["--time-limit", "nan"], "time_limit must be a number of seconds above 0;"),
        (["--block-size", "12"], "block_size must be a power of two; got 12"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size must divide"),
        (["--backend", "triton"], "--dry-run runs no kernels and takes no --backend"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    line: str,
) -> None:
    out = str(tmp_path / "p.json")
    assert run(["calibrate", *MODEL, "--out", out, "--dry-run", *given]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_a_profile_is_not_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    out.write_text("mine")
    arguments = ["calibrate", *MODEL, "--dry-run", "--ops", "gemm", "--out", str(out)]
    assert run(arguments) == 2
    assert "exists; take another name, or --overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert run([*arguments, "--overwrite", "--quiet"]) == 0
    assert out.read_text() != "mine"
    assert run([*arguments[:-1], str(tmp_path / "no" / "p.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_time_limit_ends_at_the_edge_of_a_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "p.json", tmp_path / "whole.json"
    arguments = ["calibrate", *MODEL, "--dry-run", "--ops", "gemm,decode_attention"]
    assert run([*arguments, "--quiet", "--out", str(whole)]) == 0
    needed_s = json.loads(whole.read_text())["provenance"]["duration_s"]
    limit = ["--time-limit", f"{needed_s / 4:.3f}", "--quiet", "--out", str(out)]
    assert run([*arguments, *limit]) == 130
    assert "finished blocks are in" in capsys.readouterr().err
    assert not out.exists()
    runs = 1
    while run([*arguments, *limit, "--resume"]) == 130:
        assert capsys.readouterr().err.count("\n") == 1
        runs += 1
        assert runs < 20
    assert runs >= 4
    assert out.read_bytes() == whole.read_bytes()


def test_an_interruption_keeps_what_is_finished(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(DryRunDevice):
        visits = 0

        def prepare(self, point: Point, backend: str, seed: int) -> Task:
            self.visits += 1
            if self.visits == 60:
                raise KeyboardInterrupt
            return super().prepare(point, backend, seed)

    monkeypatch.setattr(dry_run, "DryRunDevice", Interrupted)
    out = tmp_path / "p.json"
    arguments = ["calibrate", *MODEL, "--dry-run", "--preset", "quick", "--quiet"]
    assert run([*arguments, "--out", str(out)]) == 130
    said = capsys.readouterr().err
    assert "finished blocks are in" in said
    assert "interrupted" in said
    assert not out.exists()
    lines = out.with_name("p.json.checkpoint").read_text().splitlines()
    assert len(lines) == 4  # what it is, the gate, and two blocks
