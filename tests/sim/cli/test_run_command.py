"""`kvsim run` as a user meets it: files, refusals, exit status, interruptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.results import schema
from sim.scheduler.generations import OURS
from tests.sim.commands import TRACE, files, refused, trace_config
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path


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
    assert out.stat().st_mode & 0o777 == 0o755  # colleagues may look
    summary = json.loads((out / "summary.json").read_text())
    tables = {
        name: pd.read_parquet(out / f"{name}.parquet")
        for name in ("requests", "steps", "preemptions")
    }
    for name, columns in (
        ("requests", schema.REQUESTS | schema.TRAFFIC),
        ("steps", schema.STEPS | schema.AHEAD_STEPS),
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
    assert f"{summary['num_preemptions']:,}, of" in printed
    assert "40 blocks of 16 tokens" in printed
    # The written configuration runs again, to the same bytes.
    again = tmp_path / "again"
    arguments = ["run", str(out / "config.yaml"), "--out", str(again), "--quiet"]
    assert kvsim(arguments) == 0
    first, second = files(out), files(again)
    del first["run.json"], second["run.json"]
    assert first == second


def pressed(workload: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """A run of some requests with several sequences in a cache that is too small."""
    small = {"num_gpu_blocks_override": 45, "max_model_len": 200}
    data = minimal(**small | engine)
    data["workload"]["synthetic"] |= {
        "num_requests": 20,
        "arrivals": {"kind": "poisson", "rate": 400.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 100},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    data["workload"] |= {"max_tokens": 60} | workload
    return data


@pytest.mark.parametrize("generation", OURS)
def test_every_generation_keeps_its_invariants_and_runs_again(
    tmp_path: Path, generation: str
) -> None:
    shares = {"beam_width": {1: 0.5, 3: 0.5}, "best_of": {1: 0.5, 2: 0.5}}
    # Without groups beams are requests for one token, which need little.
    groups = OURS[generation].schedules_groups
    own: dict[str, Any] = {"num_gpu_blocks_override": 45 if groups else 20}
    if generation == "hf_fifo":
        own |= {"block_size": 16, "safety_margin": 0.0, "swap_space": 1.0}
    if generation == "sglang":
        own |= {"block_size": 16, "schedule_conservativeness": 0.01}
    data = pressed(shares, scheduler=generation, **own)
    path = write(tmp_path, data)
    options = ["--no-figures", "--quiet"]
    out = tmp_path / "out"
    assert kvsim(["run", str(path), "--out", str(out), "--check", "1", *options]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_preemptions"] > 0
    modes = set(pd.read_parquet(out / "preemptions.parquet")["mode"])
    assert ("swap" in modes) == OURS[generation].has_cpu_tier
    requests = pd.read_parquet(out / "requests.parquet")
    assert set(requests["status"]) == {"finished_stopped"}
    assert requests["parent_id"].nunique() == 20
    again = tmp_path / "again"
    assert kvsim(["run", str(out / "config.yaml"), "--out", str(again), *options]) == 0
    first, second = files(out), files(again)
    del first["run.json"], second["run.json"]
    assert first == second


@pytest.mark.parametrize("generation", ["cacheflow", "v0_2", "v0"])
def test_a_cpu_pool_too_small_for_a_victim_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], generation: str
) -> None:
    data = pressed({"best_of": 2}, scheduler=generation, swap_space=0.001)
    path = write(tmp_path, data)
    out = tmp_path / "new" / "out"
    line = refused(["run", str(path), "--out", str(out)], capsys, tmp_path)
    assert "swap space is short" in line
    assert "raise swap_space" in line
    # Results of an earlier run stay as they are.
    enough = ["--set", "engine.swap_space=1.0", "--no-figures", "--quiet"]
    arguments = ["run", str(path), "--out", str(tmp_path / "out"), "--overwrite"]
    assert kvsim([*arguments, *enough]) == 0
    before = files(tmp_path)
    refused(arguments, capsys, tmp_path)
    assert files(tmp_path) == before
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["num_preemptions"] > 0


def test_two_processes_write_the_same_bytes(config: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert kvsim(["run", str(config), "--out", str(here)]) == 0
    subprocess.run(
        [sys.executable, "-m", "kvsim", "run", str(config), "--out", str(there)],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "1"},
    )
    outputs = [files(here), files(there)]
    for each in outputs:
        del each["run.json"]
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
    out = tmp_path / "new" / "deep" / "out"
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
    assert "nothing takes 'a b'; write a value behind" in line("run", "c", "a", "b")
    own = "set by --set engine.scheduler"  # where there is such an option
    assert own in line("run", str(config), "--scheduler", "v0")
    assert own not in line("capacity", "--model", "x", "--scheduler", "v0")
    assert "must be a whole number, got 1.7" in line("run", str(config), "--seed=1.7")
    assert "unknown model: 'x'" in line("calibrate", "--model", "x", *out)


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
    deep = str(tmp_path / "new" / "deep")
    line = refused(["run", str(path), "--out", deep], capsys, tmp_path)


def test_an_existing_directory_is_kept_unless_it_holds_results(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim(arguments) == 0
    assert "exists already" in refused(arguments, capsys, tmp_path)
    (out / "notes.txt").write_text("mine")
    line = refused([*arguments, "--overwrite"], capsys, tmp_path)
    assert "also holds 'notes.txt', which --overwrite would delete" in line
    (out / "notes.txt").unlink()
    stale = (out / "run.json").read_bytes()
    assert kvsim([*arguments, "--overwrite"]) == 0
    assert (out / "run.json").read_bytes() != stale
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("mine")
    arguments[3] = str(foreign)
    line = refused([*arguments, "--overwrite"], capsys, tmp_path)
    assert "does not hold results of a run" in line
    arguments[3] = str(config)
    assert "is not a directory" in refused(arguments, capsys, tmp_path)
    arguments[3] = str(config / "below")
    assert "cannot be written: Not a directory" in refused(arguments, capsys, tmp_path)


def test_a_failure_while_writing_leaves_the_old_results(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim(arguments) == 0
    before = files(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sim.results.run.write_table", full)
    assert kvsim([*arguments, "--overwrite"]) == 2
    assert files(tmp_path) == before


def test_what_the_user_should_know_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = minimal(num_gpu_blocks_override=40, max_model_len=9000, max_num_seqs=2)
    data["workload"]["synthetic"]["num_requests"] = 100
    data["cost"]["step_s"] = 0.5
    path = write(tmp_path, data)
    out = ["--out", str(tmp_path / "o"), "--no-figures", "--quiet"]
    assert kvsim(["run", str(path), *out]) == 0
    err = capsys.readouterr().err
    assert "max_model_len is 624, what the cache holds; the one asked for is" in err
    assert "overloaded: " in err
    data["engine"]["admission_check"] = False
    data["workload"]["synthetic"]["prompt_tokens"] = {"kind": "fixed", "tokens": 2000}
    path = write(tmp_path, data)
    assert kvsim(["run", str(path), *out, "--overwrite"]) == 0
    assert "the queue stalled: 100 requests wait" in capsys.readouterr().err


def test_help_needs_no_heavy_import() -> None:
    program = (
        "import sys; from sim.cli.main import run; run(['--help']); "
        "heavy = {'pandas', 'numpy', 'matplotlib', 'simpy', 'pydantic', 'pyarrow'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "capacity" in done.stdout


def test_yaml_dump_of_results_names_everything(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kvsim(["run", str(config), "--out", str(out), "--no-figures", "--quiet"])
    dumped = yaml.safe_load((out / "config.yaml").read_text())
    assert dumped["engine"]["gpu_memory_utilization"] is None
    assert dumped["seed"] == 0


@pytest.mark.parametrize(
    ("scheduler", "caching"),
    [
        ("cacheflow", False),
        ("v0_2", False),
        ("v0", False),
        ("v0", True),
        ("v1", False),
        ("v1", True),
    ],
)
def test_every_generation_prints_its_summary(
    scheduler: str, caching: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = minimal(
        scheduler=scheduler, enable_prefix_caching=caching, num_gpu_blocks_override=40
    )
    data["workload"]["best_of"] = 2
    data["workload"]["max_tokens"] = 40
    data["workload"]["synthetic"] |= {
        "num_requests": 8,
        "arrivals": {"kind": "burst", "burst_size": 8, "interval_s": 1.0},
        "output_tokens": {"kind": "fixed", "tokens": 40},
    }
    out = ["--out", str(tmp_path / "o"), "--no-figures"]
    assert kvsim(["run", str(write(tmp_path, data)), *out]) == 0
    printed = capsys.readouterr().out
    assert ("prompt tokens hit" in printed) == caching
    assert ("blocks evicted" in printed) == caching
    assert ("copied on write" in printed) == (scheduler != "v1")
    assert ("preemptions by swapping" in printed) == (scheduler != "v1")


@pytest.mark.parametrize("text", ["lengths alone", "prompts share"])
def test_no_hits_ask_whether_the_traffic_tells_what_prompts_share(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pressed({}, scheduler="v1", enable_prefix_caching=True)
    if text == "prompts share":
        data["workload"]["synthetic"]["prefixes"] = {
            "kind": "system_prompts",
            "num_groups": 1,
            "tokens": {"kind": "fixed", "tokens": 64},
        }
    out = ["--out", str(tmp_path / "o"), "--no-figures"]
    assert kvsim(["run", str(write(tmp_path, data)), *out]) == 0
    asked = "does the traffic tell what prompts share?" in capsys.readouterr().out
    assert asked == (text == "lengths alone")


def test_too_little_memory_is_said_in_a_line(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("sim.simulation.run.Simulation.run", full)
    arguments = ["run", str(config), "--out", str(tmp_path / "out"), "--quiet"]
    assert "there is not enough memory; take fewer" in refused(
        arguments, capsys, tmp_path
    )
