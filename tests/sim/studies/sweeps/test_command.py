"""`kvsim sweep` as a user meets it: results, refusals, interruptions, going on."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.results.output import write_json
from tests.shared import ROOT
from tests.sim.commands import TRACE, claimed_elsewhere, files, refused
from tests.sim.studies.sweeps.files import tiny, write_sweep

if TYPE_CHECKING:
    from pathlib import Path

GRID = {"engine.max_num_seqs": [4, 8, 16], "workload.synthetic.rate_scale": [0.5, 2.0]}
MODELS = ["meta-llama/Llama-3.1-8B", "moonshotai/Kimi-Dev-72B"]

SLOW = """
import time
from sim.costs.constant import ConstantCost

class Slow(ConstantCost):
    def describe(self):
        time.sleep(0.15)
        return super().describe()
"""


def sweep(path: Path, *options: str) -> int:
    return kvsim(["sweep", str(path), "--out", str(path.parent / "out"), *options])


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_told_with_the_remedy(tmp_path: Path) -> None:
    """A limit of file sizes, as on a shared machine; a full disk is said alike."""
    write_sweep(tmp_path, repeats=2)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))

    done = subprocess.run(
        [sys.executable, "-m", "kvsim", "sweep", "sweep.yaml", "--workers", "1"],
        cwd=tmp_path,
        # Compiled modules would be cut at the limit, and break whoever reads them next.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    assert done.stderr.endswith("; make room and go on with --resume\n")


def test_a_sweep_is_a_dataset_that_opens_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, grid=GRID, repeats=2)
    assert sweep(path, "--workers", "2") == 0
    printed = capsys.readouterr().out
    assert "runs     12 of 12: 12 done" in printed
    assert f"dataset  {tmp_path / 'out' / 'runs'}" in printed
    assert f"to look  kvsim report {tmp_path / 'out'} --out out.html" in printed
    out = tmp_path / "out"
    assert sorted(files(out)) == [
        "run.json",
        "runs/runs.parquet",
        "sweep.json",
        "sweep.yaml",
    ]
    table = pd.read_parquet(out / "runs")
    columns = ["run", "repeat", *GRID, "seed", "status", "error"]
    assert list(table.columns[: len(columns)]) == columns
    assert table["run"].tolist() == list(range(12))
    assert table["repeat"].tolist() == table["seed"].tolist() == [0, 1] * 6
    assert table["engine.max_num_seqs"].tolist() == [4] * 4 + [8] * 4 + [16] * 4
    assert set(table["status"]) == {"done"}
    # A row is what `kvsim run` finds for its configuration.
    config = tmp_path / "row.yaml"
    config.write_text(table["config"][7])
    single = tmp_path / "single"
    arguments = ["run", str(config), "--out", str(single), "--no-figures", "--quiet"]
    assert kvsim(arguments) == 0
    summary = json.loads((single / "summary.json").read_text())
    for key, value in summary.items():
        cell = table[key][7]
        if isinstance(value, dict | list):
            assert json.loads(cell) == value
        else:
            assert cell == value or (value is None and pd.isna(cell))


@pytest.mark.slow
@pytest.mark.parametrize("is_drawn", [True, False])
def test_repeats_that_the_seed_does_not_change_are_told(
    is_drawn: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny(num_gpu_blocks_override=100, max_model_len=1000)
    if not is_drawn:
        (tmp_path / "trace.csv").write_text(TRACE)
        trace = {"kind": "azure", "path": str(tmp_path / "trace.csv")}
        base["workload"] = {"trace": trace}
    grid = {"engine.max_num_seqs": [1, 2]}
    path = write_sweep(tmp_path, base=base, grid=grid, repeats=2)
    assert sweep(path, "--workers", "1") == 0
    said = "warning: repeats of each combination are the same"
    assert (said in capsys.readouterr().err) is not is_drawn


def test_the_dataset_opens_in_duckdb_and_polars(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    polars = pytest.importorskip("polars", reason="polars is not installed")
    path = write_sweep(tmp_path, grid=GRID, repeats=2)
    assert sweep(path, "--quiet") == 0
    runs = tmp_path / "out" / "runs"
    expected = pd.read_parquet(runs).groupby("engine.max_num_seqs")["mean_ttft_ms"]
    query = (
        'SELECT "engine.max_num_seqs", avg(mean_ttft_ms) '
        f"FROM '{runs}/*.parquet' WHERE status = 'done' GROUP BY 1 ORDER BY 1"
    )
    with duckdb.connect() as connection:
        found = dict(connection.execute(query).fetchall())
    assert found == pytest.approx(expected.mean().to_dict())
    frame = polars.read_parquet(runs)
    assert frame.height == 12
    by_seqs = frame.group_by("engine.max_num_seqs").agg(polars.mean("mean_ttft_ms"))
    assert dict(by_seqs.iter_rows()) == pytest.approx(expected.mean().to_dict())


def test_engines_and_numbers_of_workers_leave_the_same_bytes(tmp_path: Path) -> None:
    grid = GRID | {"engine.model": MODELS, "engine.num_gpu_blocks_override": [None, 20]}
    path = write_sweep(tmp_path, base=tiny(gpu="l40s"), grid=grid)
    found = []
    for workers in ("1", "3"):
        assert sweep(path, "--workers", workers, "--overwrite", "--quiet") == 0
        found.append(files(tmp_path / "out"))
        del found[-1]["run.json"]
    assert found[0] == found[1]
    table = pd.read_parquet(tmp_path / "out" / "runs")
    assert table["status"].value_counts().to_dict() == {"done": 12, "refused": 12}


def test_runs_that_end_badly_are_told_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from sim.costs.constant import ConstantCost\n"
        "class Bad(ConstantCost):\n"
        "    def batch_total(self, *numbers):\n"
        "        raise ValueError('no price')\n"
        "    step = batch_total\n"
    )
    grid = {"engine.gpu": ["l40s"], "engine.model": MODELS}
    base = tiny(num_gpu_blocks_override=None)
    path = write_sweep(tmp_path, base=base, grid=grid, repeats=4)
    assert sweep(path, "--json") == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert printed == {
        "dataset": str(tmp_path / "out" / "runs"),
        "num_runs": 8,
        "done": 4,
        "refused": 4,
    }
    lines = captured.err.strip().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("kvsim: warning: run ")
    assert "refused" in lines[0]
    assert "Traceback" not in captured.err


def test_a_dry_run_prints_the_runs_and_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, grid=GRID, repeats=2, seed=5)
    assert sweep(path, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    assert lines[0] == (
        "run=0  engine.max_num_seqs=4  workload.synthetic.rate_scale=0.5  seed=5"
    )
    assert lines[-1] == "12 runs; none was started"
    assert sweep(path, "--dry-run", "--json") == 0
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert runs[11] == {
        "run": 11,
        "engine.max_num_seqs": 16,
        "workload.synthetic.rate_scale": 2.0,
        "seed": 6,
    }
    assert [each.name for each in tmp_path.iterdir()] == ["sweep.yaml"]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ({"grid": {"engine.max_num_seq": [4]}}, [], "did you mean 'max_num_seqs'?"),
        ({"grid": {"engine.block_size": ["8"]}}, [], "should be a valid integer"),
        ({"grid": {"engine.block_size": []}}, [], "list of values, not empty"),
        (
            {"random": {"num_runs": 5, "ranges": {"seed": {"int": [9, 1]}}}},
            [],
            "random.ranges: seed: the range is empty: 9 is not below 1",
        ),
        (
            {"random": {"num_runs": 9**6, "ranges": {"seed": {"int": [0, 9]}}}},
            [],
            "the sweep has 531,441 runs; more than 10,000 are started only with --yes",
        ),
        (
            {"random": {"num_runs": 10**30, "ranges": {"seed": {"int": [0, 9]}}}},
            ["--dry-run"],
            "runs; one sweep has at most 1,000,000: leave out values, or make several",
        ),
        (
            {"grid": GRID, "repeats": 10**12},
            ["--yes"],
            "runs; one sweep has at most 1,000,000: leave out values, or make several",
        ),
        ({"grid": GRID}, ["--workers", "0"], "--workers takes a number of at least 1"),
        (
            {"grid": GRID},
            ["--workers", "2", "--address", "auto"],
            "--workers is for this machine and --address for a cluster",
        ),
        ({"grid": GRID}, ["--resume", "--overwrite"], "leave one out"),
        ({"grid": GRID}, ["--resume"], "there is no sweep to resume in"),
        (
            {"grid": GRID},
            ["--set", "grid={engine.block_size: [8]}"],
            "--set grid: --set reaches the base configuration, not the sweep; write "
            "grid in ",
        ),
        ({"grid": GRID}, ["--set", "repeats=3"], "write repeats in "),
        ({"grid": GRID}, ["--set", "engine"], "--set takes key.path=value"),
        ({"grid": GRID}, ["--set", "engine.gpu=h20_sxm"], "did you mean"),
    ],
)
def test_bad_sweeps_are_answered_in_a_line(
    spec: Any,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_sweep(tmp_path, **spec)
    arguments = ["sweep", str(path), "--out", str(tmp_path / "new" / "out"), *options]
    assert message in refused(arguments, capsys, tmp_path)


def test_a_folder_that_exists_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, grid=GRID)
    out = tmp_path / "out"
    arguments = ["sweep", str(path), "--out", str(out), "--workers", "1", "--quiet"]
    assert kvsim(arguments) == 0
    before = files(out)
    assert "exists already" in refused(arguments, capsys, tmp_path)
    (out / "notes.txt").write_text("mine")
    line = refused([*arguments, "--overwrite"], capsys, tmp_path)
    assert "also holds 'notes.txt'" in line
    (out / "notes.txt").unlink()
    # One that is at work is left alone.
    with claimed_elsewhere(out):
        for option in ("--resume", "--overwrite"):
            line = refused([*arguments, option], capsys, tmp_path)
            assert "another kvsim is writing to" in line
    # Going on with one that is complete runs nothing.
    assert kvsim([*arguments, "--resume"]) == 0
    assert json.loads((out / "run.json").read_text())["wall_seconds"]["runs"] == 0
    after = files(out)
    del before["run.json"], after["run.json"]
    assert after == before
    # Results of a single run are not a sweep's.
    foreign = tmp_path / "single"
    foreign.mkdir()
    (foreign / "summary.json").write_text("{}")
    arguments[3] = str(foreign)
    line = refused([*arguments, "--overwrite"], capsys, tmp_path)
    assert "does not hold results of a sweep" in line


def test_only_the_same_sweep_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    base = tiny(num_gpu_blocks_override=100, max_model_len=1024)
    base["workload"] = {"trace": {"kind": "azure", "path": "trace.csv"}}
    path = write_sweep(tmp_path, base=base, repeats=2)
    out = tmp_path / "out"
    arguments = ["sweep", str(path), "--out", str(out), "--workers", "1", "--quiet"]
    assert kvsim(arguments) == 0
    arguments.append("--resume")
    write_sweep(tmp_path, base=base, repeats=3)
    line = refused(arguments, capsys, tmp_path)
    assert "it holds another sweep, of 2 runs, or this one has changed" in line
    write_sweep(tmp_path, base=base, repeats=2)
    trace.write_text(TRACE.replace("396", "397"))
    assert "trace.csv' has changed since it began" in refused(
        arguments, capsys, tmp_path
    )
    trace.write_text(TRACE)
    facts = json.loads((out / "sweep.json").read_text())
    facts["versions"]["numpy"] = "1.0"
    write_json(out / "sweep.json", facts)
    line = refused(arguments, capsys, tmp_path)
    assert "it began with numpy 1.0, this is " in line


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    """Start a sweep as a shell does: a process group of its own."""
    out = str(path.parent / "out")
    return subprocess.Popen(
        [sys.executable, "-m", "kvsim", "sweep", str(path), "--out", out, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_rows(directory: Path, process: subprocess.Popen[str], num: int) -> None:
    while process.poll() is None and len(list(directory.glob("*.parquet"))) < num:
        time.sleep(0.05)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Twenty-four runs of some tenths of a second."""
    (tmp_path / "slow.py").write_text(SLOW)
    base = tiny() | {"cost": {"kind": f"{tmp_path / 'slow.py'}:Slow", "step_s": 0.01}}
    return write_sweep(tmp_path, base=base, grid=GRID, repeats=4)


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_sweep_goes_on_to_the_same_bytes(
    stop: signal.Signals, slow: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "out" / "runs"
    process = start(slow, "--workers", "2")
    wait_for_rows(runs, process, 1)
    os.killpg(process.pid, stop)
    out, err = process.communicate()
    assert "Traceback" not in err
    table = pd.read_parquet(runs)
    assert 0 < len(table) < 24
    assert set(table["status"]) == {"done"}
    if stop is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert f"{len(table)} of 24 runs are in" in err
        notice, told = err.splitlines()
        assert notice.startswith("kvsim: runs the file")
        assert "stopped" in told or "interrupted" in told
        assert f"{len(table)} of 24: {len(table)} done" in out
        assert not list(runs.glob(".*"))
    assert sweep(slow, "--workers", "3", "--resume", "--quiet") == 0
    resumed = files(tmp_path / "out")
    assert sweep(slow, "--workers", "2", "--overwrite", "--quiet") == 0
    whole = files(tmp_path / "out")
    del resumed["run.json"], whole["run.json"]
    assert resumed == whole


@pytest.mark.slow
def test_workers_leave_with_a_killed_parent(slow: Path, tmp_path: Path) -> None:
    process = start(slow, "--workers", "2")
    wait_for_rows(tmp_path / "out" / "runs", process, 1)
    process.kill()
    # Their ends of our pipes are closed when they are gone.
    process.communicate(timeout=60)


def test_what_is_written_runs_again(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(tiny()))
    path = write_sweep(tmp_path, base="base.yaml", grid=GRID)
    change = ["--set", "engine.block_size=8"]
    assert sweep(path, "--quiet", "--workers", "1", *change) == 0
    first = files(tmp_path / "out")
    table = pd.read_parquet(tmp_path / "out" / "runs")
    assert set(table["block_size"]) == {8}
    kept = tmp_path / "kept.yaml"
    kept.write_bytes(first["sweep.yaml"])
    base.unlink()
    assert sweep(kept, "--quiet", "--workers", "1", "--overwrite") == 0
    assert files(tmp_path / "out")["runs/runs.parquet"] == first["runs/runs.parquet"]
