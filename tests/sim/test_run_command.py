"""`kvsim run` as a user meets it: files, refusals, exit status, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import yaml

from sim import schema
from sim.cli import run as kvsim
from tests.sim.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run of a second with preemptions."""
    data = minimal(num_gpu_blocks_override=40, max_model_len=600)
    data["workload"]["synthetic"] |= {
        "num_requests": 120,
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 200},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 120},
    }
    return write(tmp_path, data)


def trace_config(tmp_path: Path, text: str, **engine: Any) -> Path:
    (tmp_path / "trace.csv").write_text(text)
    data = minimal(**engine)
    data["workload"] = {"trace": {"kind": "azure", "path": str(tmp_path / "trace.csv")}}
    return write(tmp_path, data)


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_results_are_complete_and_agree(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert kvsim(["run", str(config), "--out", str(out), "--check", "50"]) == 0
    assert {path.name for path in out.iterdir()} == {
        "config.yaml",
        "summary.json",
        "run.json",
        "requests.parquet",
        "steps.parquet",
        "preemptions.parquet",
        "figures",
    }
    assert len(list((out / "figures").glob("*.png"))) == 6
    summary = json.loads((out / "summary.json").read_text())
    tables = {
        name: pd.read_parquet(out / f"{name}.parquet")
        for name in ("requests", "steps", "preemptions")
    }
    for name, columns in (
        ("requests", schema.REQUESTS),
        ("steps", schema.STEPS),
        ("preemptions", schema.PREEMPTIONS),
    ):
        assert list(tables[name].columns) == list(columns)
    assert summary["num_preemptions"] == len(tables["preemptions"]) > 0
    assert summary["num_preemptions"] == tables["steps"]["num_preempted"].sum()
    assert summary["num_steps"] == len(tables["steps"])
    assert summary["completed"] == tables["steps"]["num_finished"].sum() == 120
    assert summary["mean_ttft_ms"] == pytest.approx(
        tables["requests"]["ttft_s"].mean() * 1e3
    )
    printed = capsys.readouterr().out
    assert f"{summary['num_preemptions']:,} of" in printed
    assert "40 blocks of 16 tokens" in printed
    # The written configuration runs again, to the same bytes.
    again = tmp_path / "again"
    arguments = ["run", str(out / "config.yaml"), "--out", str(again), "--quiet"]
    assert kvsim(arguments) == 0
    first, second = files(out), files(again)
    del first["run.json"], second["run.json"]
    assert first == second


def test_two_processes_write_the_same_bytes(config: Path, tmp_path: Path) -> None:
    outputs = []
    for hash_seed in ("1", "2"):
        out = tmp_path / f"out{hash_seed}"
        subprocess.run(
            [sys.executable, "-m", "sim", "run", str(config), "--out", str(out)],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        outputs.append(files(out))
        del outputs[-1]["run.json"]
    assert outputs[0] == outputs[1]
    assert "steps.parquet" in outputs[0]


def test_another_seed_gives_other_results(config: Path, tmp_path: Path) -> None:
    for seed in ("0", "1"):
        arguments = ["--seed", seed, "--out", str(tmp_path / seed), "--no-figures"]
        assert kvsim(["run", str(config), *arguments, "--quiet"]) == 0
    first, second = files(tmp_path / "0"), files(tmp_path / "1")
    assert first["requests.parquet"] != second["requests.parquet"]


def test_json_goes_to_stdout_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    kvsim(["run", str(config), "--out", str(out), "--json", "--no-figures"])
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "summary.json").read_text())
    assert not (out / "figures").exists()


def refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], directory: Path
) -> str:
    """Run, expect a refusal in one line, and nothing new in `directory`."""
    before = sorted(directory.rglob("*"))
    assert kvsim(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    assert sorted(directory.rglob("*")) == before
    return lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "at least one request"),
        ("", "trace.csv"),
        (TRACE.replace("396", "-396"), "trace.csv:3"),
        (TRACE.replace("396", "many"), "trace.csv:3"),
        (TRACE.replace("ContextTokens", "Prompt"), "ContextTokens"),
    ],
)
def test_bad_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = trace_config(tmp_path, text)
    out = tmp_path / "out"
    line = refused(["run", str(path), "--out", str(out)], capsys, tmp_path)
    assert message.lower() in line.lower()


def test_bad_arguments(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(*arguments: str) -> str:
        return refused(list(arguments), capsys, tmp_path)

    out = ["--out", str(tmp_path / "out")]
    assert "no configuration file" in line("run", str(tmp_path / "no.yaml"), *out)
    assert "block_size" in line(
        "run", str(config), "--set", "engine.block_size=0", *out
    )
    assert "rate" in line(
        "run", str(config), "--set", "workload.synthetic.arrivals.rate=.nan", *out
    )
    assert "--check takes" in line("run", str(config), "--check", "-1", *out)
    assert "Did you mean" in line("rum", str(config))
    assert "not built yet" in line("sweep", str(config))
    assert "not built yet" in line("calibrate", "--model", "x")


def test_unsorted_traces_are_sorted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, first, second, third = TRACE.splitlines()
    path = trace_config(tmp_path, "\n".join([header, second, first, third]) + "\n")
    out = tmp_path / "out"
    assert kvsim(["run", str(path), "--out", str(out), "--no-figures"]) == 0
    assert "warning" in capsys.readouterr().err
    requests = pd.read_parquet(out / "requests.parquet")
    assert requests["num_prompt_tokens"].tolist() == [374, 396, 879]
    assert requests["arrival_s"].is_monotonic_increasing


def test_a_prompt_longer_than_the_cache_is_rejected_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_config(tmp_path, TRACE, num_gpu_blocks_override=41)
    out = tmp_path / "out"
    assert kvsim(["run", str(path), "--out", str(out), "--no-figures"]) == 0
    err = capsys.readouterr().err
    assert (
        "1 of 3 requests were rejected, the first (request 2): a prompt of 879" in err
    )
    # Where nobody can be served, that is a mistake in the configuration.
    path = trace_config(tmp_path, TRACE, num_gpu_blocks_override=5)
    line = refused(["run", str(path), "--out", str(tmp_path / "b")], capsys, tmp_path)
    assert "3 of 3 requests were rejected" in line


def test_an_existing_directory_is_kept_unless_it_holds_results(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim(arguments) == 0
    assert "exists already" in refused(arguments, capsys, tmp_path)
    (out / "stale.txt").write_text("old")
    assert kvsim([*arguments, "--overwrite"]) == 0
    assert not (out / "stale.txt").exists()
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("mine")
    arguments[3] = str(foreign)
    line = refused([*arguments, "--overwrite"], capsys, tmp_path)
    assert "does not hold results of a run" in line
    arguments[3] = str(config)
    assert "is not a directory" in refused(arguments, capsys, tmp_path)
    arguments[3] = str(config / "below")
    assert "not a writable directory" in refused(arguments, capsys, tmp_path)


def test_a_failure_while_writing_leaves_the_old_results(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim(arguments) == 0
    before = files(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sim.results._write_parquet", full)
    assert kvsim([*arguments, "--overwrite"]) == 2
    assert files(tmp_path) == before


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    data = minimal()
    data["workload"]["synthetic"]["num_requests"] = 400_000
    path = write(tmp_path, data)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sim",
            "run",
            str(path),
            "--out",
            str(out),
            "--no-figures",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KVSIM_TEST": "1"},
    )
    time.sleep(8)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = json.loads((out / "summary.json").read_text())
    assert summary["interrupted"]
    assert 0 < summary["completed"] < 400_000
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_help_needs_no_heavy_import() -> None:
    program = (
        "import sys; from sim.cli import run; run(['--help']); "
        "heavy = {'pandas', 'numpy', 'matplotlib', 'simpy', 'pydantic', 'pyarrow'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "capacity" in done.stdout


def test_a_fault_of_ours_is_not_hidden(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("sim.recorder.Recorder.step", broken)
    with pytest.raises(ValueError, match="ours"):
        kvsim(["run", str(config), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_yaml_dump_of_results_names_everything(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kvsim(["run", str(config), "--out", str(out), "--no-figures", "--quiet"])
    dumped = yaml.safe_load((out / "config.yaml").read_text())
    assert dumped["engine"]["gpu_memory_utilization"] == 0.9
    assert dumped["seed"] == 0
