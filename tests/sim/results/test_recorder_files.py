"""Tables that `kvsim run` writes as it goes, and those of a library user."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import load_config
from sim.results import schema
from sim.results.schema import PERCENTILES
from sim.results.tables.parquet import StepsFile
from sim.results.tables.steps import ParquetSteps
from sim.simulation.simulate import simulate
from tests.sim.commands import files

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("steps.parquet", "requests.parquet", "preemptions.parquet", "itl.parquet")


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a run of some hundred steps fill several batches."""
    for module in ("tables.steps", "recording.step_log", "tables.parquet"):
        monkeypatch.setattr(f"sim.results.{module}.BATCH_ROWS", 64)
    monkeypatch.setattr("sim.results.run._ITL_BATCH_ROWS", 1000)
    for module in ("step_log", "step_columns"):
        monkeypatch.setattr(f"sim.results.recording.{module}.CHUNK_ROWS", 20)
    return 64


@pytest.mark.parametrize("paths", [("--stepwise",), ()])
def test_a_library_user_writes_the_bytes_of_the_command(
    config: Path, tmp_path: Path, small_batches: int, paths: tuple[str, ...]
) -> None:
    out, own = tmp_path / "out", tmp_path / "own"
    own.mkdir()
    options = ["--no-figures", "--quiet", "--itl", "exact", *paths]
    assert kvsim(["run", str(config), "--out", str(out), *options]) == 0
    results = simulate(load_config(config))
    results.write(own, itl=True)
    command, library = files(out), files(own)
    for name in TABLES:
        assert command[name] == library[name]
    steps = ParquetSteps(out / "steps.parquet")
    assert steps.num_steps == results.summary["num_steps"] > 3 * small_batches
    assert pd.read_parquet(out / "steps.parquet").equals(results.steps)
    # Written a second time, after frames were made of everything.
    results.write(own, itl=True)
    assert files(own) == library


def test_every_token_has_its_time(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--no-figures", "--quiet", "--itl", "exact"]
    assert kvsim(["run", str(config), "--out", str(out), *options]) == 0
    summary = json.loads((out / "summary.json").read_text())
    tokens = pd.read_parquet(out / "itl.parquet")
    requests = pd.read_parquet(out / "requests.parquet").set_index("request_id")
    assert tokens.dtypes.astype(str).to_dict() == schema.ITL
    assert len(tokens) == summary["total_output_tokens"]
    assert tokens["request_id"].is_monotonic_increasing
    grouped = tokens.groupby("request_id")
    assert grouped["token_index"].first().eq(1).all()
    assert (
        grouped["token_index"]
        .last()
        .equals(requests["num_output_tokens"].astype("int32").rename("token_index"))
    )
    assert grouped["time_s"].first().eq(requests["first_token_s"]).all()
    assert grouped["time_s"].last().eq(requests["finish_s"]).all()
    intervals_ms = grouped["time_s"].diff().dropna().to_numpy() * 1e3
    assert summary["num_preemptions"] > 0  # pauses count as well
    for percent in PERCENTILES:
        assert summary[f"p{percent}_itl_ms"] == pytest.approx(
            np.percentile(intervals_ms, percent), rel=1e-12
        )
    assert summary["mean_itl_ms"] == pytest.approx(intervals_ms.mean(), rel=1e-12)
    assert summary["std_itl_ms"] == pytest.approx(intervals_ms.std(), rel=1e-9)
    again = ["--overwrite", "--no-figures", "--quiet"]
    assert kvsim(["run", str(config), "--out", str(out), *again]) == 0
    assert not (out / "itl.parquet").exists()
    assert json.loads((out / "summary.json").read_text()) == summary


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("nth", [1, 3])
def test_a_full_disk_in_mid_run_leaves_what_was_there(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nth: int,
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim(arguments) == 0
    before = files(tmp_path)
    write, calls = StepsFile.write, iter(range(1, 1000))

    def full(file: StepsFile, batch: dict[str, Any]) -> None:
        write(file, batch)
        if next(calls) == nth:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(StepsFile, "write", full)
    capsys.readouterr()
    assert kvsim([*arguments, "--overwrite"]) == 2
    assert "No space left on device; make room" in capsys.readouterr().err
    assert files(tmp_path) == before


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("num_signals", [1, 2])
@pytest.mark.parametrize("path", [["--stepwise"], []])
def test_ctrl_c_in_mid_run_leaves_whole_files_or_none(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_signals: int,
    path: list[str],
) -> None:
    write, calls = StepsFile.write, iter(range(1, 1000))

    def interrupted(file: StepsFile, batch: dict[str, Any]) -> None:
        write(file, batch)
        if next(calls) == 3:
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(StepsFile, "write", interrupted)
    out = tmp_path / "out"
    arguments = ["run", str(config), "--out", str(out), "--quiet", "--no-figures"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert kvsim([*arguments, *path]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    if num_signals == 2:
        assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]
        return
    summary = json.loads((out / "summary.json").read_text())
    steps = pd.read_parquet(out / "steps.parquet")
    requests = pd.read_parquet(out / "requests.parquet")
    assert summary["interrupted"]
    assert 3 * 64 <= len(steps) == summary["num_steps"]
    assert steps["step"].tolist() == list(range(len(steps)))
    assert summary["completed"] == steps["num_finished"].sum() < 120
    assert {"finished_stopped", "running"} <= set(requests["status"])


@pytest.mark.usefixtures("small_batches")
def test_row_groups_do_not_depend_on_what_wrote_them(
    config: Path, tmp_path: Path
) -> None:
    written = []
    for name, path in (("stepwise", ["--stepwise"]), ("fast", [])):
        out = tmp_path / name
        options = ["--no-figures", "--quiet", *path]
        assert kvsim(["run", str(config), "--out", str(out), *options]) == 0
        summary = json.loads((out / "summary.json").read_text())
        assert summary["path"] == name
        metadata = pq.read_metadata(out / "steps.parquet")
        groups = [
            metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)
        ]
        assert set(groups[:-1]) == {64}
        assert 0 < groups[-1] <= 64
        written.append([(out / table).read_bytes() for table in TABLES[:3]])
    assert written[0] == written[1]
