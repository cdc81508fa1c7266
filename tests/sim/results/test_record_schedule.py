"""``--record schedule``: every decision of a run with its times, on either path."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.results.recording.schedule import ScheduleFile
from sim.scheduler.generations import OURS
from sim.simulation.run import Simulation
from sim.studies.conformance import DecisionDriver, first_difference, read_log
from sim.studies.conformance.workload import parse_workload
from tests.identity.random_configs import draw_case
from tests.shared import ROOT
from tests.sim.build import Run, spec
from tests.sim.cli.test_interruptions import interrupting
from tests.sim.commands import files, refused
from tests.sim.config.test_config import minimal, write
from tests.sim.recordings import (
    RANDOM_RUNS,
    both_paths,
    lines_of,
    listed,
    random_runs,
    record,
    traffic,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.config.tables import RunConfig

__all__ = ["interrupting"]

RELEASES = {
    "cacheflow": "vllm 0.1.0",
    "v0_2": "vllm 0.2.7",
    "v0": "vllm 0.7.3",
    "v1": "vllm 0.33.0",
    "hf_fifo": "transformers 5.17.0",
}


def test_a_schedule_of_two_requests_in_every_detail() -> None:
    requests = [
        {"at": 0.0, "prompt": [[0, 6]], "out": 3, "seg": 1},
        {"at": 0.5, "prompt": [[2, 4]], "out": 2, "seg": 3},
    ]
    small = {"num_gpu_blocks_override": 5, "max_model_len": 16}
    recorded = record(listed(requests, enable_prefix_caching=False, **small))
    assert recorded.path == "fast"
    header, lines = lines_of(recorded.schedule)
    assert header == {
        "format": "kvsim-schedule",
        "version": 1,
        "scheduler": "v1",
        "engine_version": "0.33",
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "tensor_parallel_size": 1,
        "kv_cache_dtype": "auto",
        "block_size": 4,
        "num_gpu_blocks": 5,
        "num_cpu_blocks": 0,
        "max_model_len": 16,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    # Request 0 opens its third block with token 9, after it has ended: it never does.
    assert lines == [
        {
            "t": 0,
            "start_s": 0.0,
            "sched": [["0", 6, "n", 0]],
            "nbt": 6,
            "bt": {"0": [0, [1, 2]]},
            "waiting": [],
            "running": ["0"],
            "free": [2],
            "end_s": 1.0,
            "free_end": [2],
        },
        {
            "t": 1,
            "start_s": 1.0,
            "sched": [["0", 1, "r", 6], ["1", 4, "n", 0]],
            "nbt": 5,
            "bt": {"1": [0, [3]]},
            "waiting": [],
            "running": ["0", "1"],
            "free": [1],
            "end_s": 2.0,
            "free_end": [1],
        },
        {
            "t": 2,
            "start_s": 2.0,
            "sched": [["0", 1, "r", 7], ["1", 1, "r", 4]],
            "nbt": 2,
            "bt": {"1": [1, [4]]},
            "waiting": [],
            "running": ["0", "1"],
            "free": [0],
            "end_s": 3.0,
            "fin": ["0", "1"],
            "free_end": [4],
        },
    ]
    as_written = json.dumps(lines[1], separators=(",", ":"))
    assert as_written in (ROOT / "docs" / "results.md").read_text()


# -- the same decisions as `kvsim decisions` takes ------------------------------


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("generation", OURS)
def test_a_run_takes_the_decisions_that_kvsim_decisions_writes(
    generation: str, *, caching: bool
) -> None:
    if caching and OURS[generation].enable_prefix_caching is None:
        pytest.skip("a generation without prefix caching")
    if generation == "sglang":
        pytest.skip("its driver has steps where a run has time: tests/conformance")
    engine: dict[str, Any] = {"enable_prefix_caching": caching} if caching else {}
    groups = OURS[generation].schedules_groups
    margin: dict[str, Any] = {"watermark": 0.0}
    if generation == "hf_fifo":
        margin = {"safety_margin": 0.0, "max_blocks_per_request": 3}
    requests = [
        {"at": float(at), "prompt": prompt, "out": out, "seg": 100 + index}
        | {"max_tokens": out}
        | ({"best_of": 2} if groups and index % 2 else {})
        for index, (at, prompt, out) in enumerate(
            [
                (0, [[7, 9]], 14),
                (0, [[7, 8], [8, 5]], 12),
                (2, [[7, 8], [9, 3]], 9),
                (3, [[5, 17]], 15),
                (5, [[7, 9]], 10),
            ]
        )
    ]
    config = listed(
        requests,
        scheduler=generation,
        num_gpu_blocks_override=16 if groups else 9,
        admission_check=False,
        **engine | margin | ({} if groups else {"enable_prefix_caching": caching}),
    )
    recorded = record(config, stepwise=True)
    assert recorded.results is not None
    assert recorded.results.summary["num_preemptions"] > 0
    _, lines = lines_of(recorded.schedule)
    capacity = recorded.capacity
    data = {
        "schema": 1,
        "name": "same",
        "reference": RELEASES[generation],
        "seed": 0,
        "config": {
            "block_size": 4,
            "num_gpu_blocks": capacity.num_gpu_blocks,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
        }
        | margin
        | ({"num_cpu_blocks": capacity.num_cpu_blocks} if groups else {})
        | ({} if generation == "cacheflow" else {"max_model_len": 64})
        | engine
        | ({} if groups else {"enable_prefix_caching": caching}),
        "requests": [
            {
                "id": str(index),
                "arrival_step": int(request["at"]),
                "prompt": request["prompt"],
                "output_len": request["out"],
                "out_seed": request["seg"],
                "n": request.get("best_of", 1),
            }
            for index, request in enumerate(requests)
        ],
    }
    driver = DecisionDriver(parse_workload(json.dumps(data), "workload.json"))
    expected = list(driver.lines())
    for line in expected:
        line.pop("hashes", None)
    difference = first_difference(expected, lines)
    assert difference is None, difference.in_words()


# -- both paths -----------------------------------------------------------------


@RANDOM_RUNS
def test_random_runs_write_the_same_bytes_on_both_paths(seeds: range) -> None:
    num_fast = num_preempting = 0
    for seed in seeds:
        chosen, stepwise = random_runs(seed)
        assert chosen.schedule == stepwise.schedule, f"seed {seed}"
        if chosen.results is not None:
            num_fast += chosen.path == "fast"
            num_preempting += chosen.results.summary["num_preemptions"] > 0
    assert num_fast > 5
    assert num_preempting > 2


def ahead(config: RunConfig) -> RunConfig:
    """Return the configuration with steps formed one ahead."""
    known = {"engine_version": "0.33", "async_scheduling": True}
    engine = config.engine.model_copy(update=known)
    return config.model_copy(update={"engine": engine})


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(100, 104), range(104, 130)], ids=str)
def test_steps_ahead_are_recorded_with_the_times_of_their_outputs(
    seeds: range,
) -> None:
    num_fast = num_late = num_preempting = 0
    for seed in seeds:
        chosen, stepwise = both_paths(ahead(draw_case(seed).config))
        assert chosen.schedule == stepwise.schedule, f"seed {seed}"
        if chosen.results is None:
            continue
        num_fast += chosen.path == "fast"
        num_preempting += chosen.results.summary["num_preemptions"] > 0
        _, lines = lines_of(chosen.schedule)
        steps = chosen.results.steps
        assert [line["t"] for line in lines] == steps["step"].tolist()
        ends_s = [line["end_s"] for line in lines]
        assert ends_s == steps["output_s"].tolist()
        assert [len(line.get("fin", ())) for line in lines] == (
            steps["num_finished"].tolist()
        )
        num_late += sum(
            end_s > line["start_s"]
            for end_s, line in zip(ends_s, lines[1:], strict=False)
        )
    assert num_fast > 1
    assert num_preempting > 0
    assert num_late > 100  # the next step has begun by then


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, 50))
def test_many_random_runs_record_the_same_bytes_on_both_paths(first: int) -> None:
    for seed in range(first, first + 50):
        chosen, stepwise = both_paths(draw_case(seed).config)
        assert chosen.schedule == stepwise.schedule, f"seed {seed}"
        assert chosen.blocks == stepwise.blocks, f"seed {seed}"
        chosen, stepwise = both_paths(ahead(draw_case(seed).config))
        assert chosen.schedule == stepwise.schedule, f"seed {seed}, ahead"
        assert chosen.blocks == stepwise.blocks, f"seed {seed}, ahead"


@pytest.mark.parametrize(
    "trace", ["azure", pytest.param("mooncake", marks=pytest.mark.slow)]
)
def test_recorded_traffic_writes_the_same_bytes_on_both_paths(trace: str) -> None:
    chosen, stepwise = traffic(trace)
    assert chosen.path == "fast"
    assert chosen.results is not None
    assert chosen.schedule == stepwise.schedule
    _, lines = lines_of(chosen.schedule)
    check_against_tables(lines, chosen.results)
    check_blocks(lines, chosen.capacity.num_gpu_blocks - 1)
    summary = chosen.results.summary
    assert summary["num_preemptions"] > 0
    num_hits = sum(sum(line.get("cached", {}).values()) for line in lines)
    assert num_hits == (
        summary["prefix_cache_hits"] + summary["prefix_cache_preempted_hits"]
    )
    assert (num_hits > 0) == (trace == "mooncake")


def check_against_tables(lines: list[dict[str, Any]], results: Any) -> None:
    """Times and counts of a schedule are those of the result tables."""
    steps = results.steps
    assert [line["t"] for line in lines] == steps["step"].tolist()
    assert [line["start_s"] for line in lines] == steps["start_s"].tolist()
    assert [line["end_s"] for line in lines[:-1]] == pytest.approx(
        (steps["start_s"] + steps["latency_s"]).tolist()[:-1]
    )
    assert [line["nbt"] for line in lines] == steps["num_batched_tokens"].tolist()
    assert [len(line.get("fin", ())) for line in lines] == (
        steps["num_finished"].tolist()
    )
    finished = {
        int(name): line["end_s"] for line in lines for name in line.get("fin", ())
    }
    served = results.requests[results.requests["finish_s"].notna()]
    by_id = served.set_index("request_id")["finish_s"]
    assert finished == by_id.to_dict()


def check_blocks(lines: list[dict[str, Any]], num_usable_blocks: int) -> None:
    """Tables, read off the lines, hold what is not free, and all that is computed."""
    tables: dict[str, list[int]] = {}
    for line in lines:
        for name, (keep, ids) in line.get("bt", {}).items():
            tables[name] = tables.get(name, [])[:keep] + ids
        held = {block_id for name in line["running"] for block_id in tables[name]}
        assert line["free"] == [num_usable_blocks - len(held)]
        for name, num_tokens, _, computed in line["sched"]:
            assert len(tables[name]) == -(-(computed + num_tokens) // 16)
        going_on = set(line["running"]) - set(line.get("fin", ()))
        held = {block_id for name in going_on for block_id in tables[name]}
        assert line["free_end"] == [num_usable_blocks - len(held)]


# -- the file -------------------------------------------------------------------


def test_withdrawn_requests_are_named_and_nothing_is_kept_of_those_that_left(
    tmp_path: Path,
) -> None:
    run = Run([spec(i, 0.0, 20, 9) for i in range(3)] + [spec(3, 4.0, 5, 2)])
    path = tmp_path / "schedule.jsonl.zst"
    with ScheduleFile(path, run.scheduler, {}) as file:
        run.engine.listeners.append(file)
        run.engine.observe(1, lambda engine: withdraw(run, engine.num_steps))
        run.go()
    lines = list(read_log(path))
    assert [line.get("abort") for line in lines[:4]] == [None, None, ["0", "1"], None]
    assert lines[-1]["free_end"] == [1000]
    assert not file._names
    assert not file._log._tables._logged  # type: ignore[attr-defined]


def withdraw(run: Run, num_steps: int) -> None:
    if num_steps == 2:
        first, second = list(run.scheduler.running)[:2]
        run.engine.abort(second, "the client has left")
        run.engine.abort(first, "the client has left")


def options(*more: str) -> list[str]:
    return ["--no-figures", "--quiet", *more]


def test_the_command_writes_what_is_asked_for_and_replaces_it(
    config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(config), "--out", str(out), *options("--overwrite")]
    assert kvsim([*arguments, "--record", "schedule", "--record", "blocks"]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"schedule.jsonl.zst", "blocks.json"} < names
    assert kvsim([*arguments, "--record", "blocks"]) == 0
    assert names - {path.name for path in out.iterdir()} == {"schedule.jsonl.zst"}
    assert kvsim(arguments) == 0
    assert names - {path.name for path in out.iterdir()} == {
        "schedule.jsonl.zst",
        "blocks.json",
    }


def test_recording_changes_no_result(config: Path, tmp_path: Path) -> None:
    arguments = ["run", str(config), *options()]
    assert kvsim([*arguments, "--out", str(tmp_path / "plain")]) == 0
    both = ["--record", "schedule", "--record", "blocks"]
    assert kvsim([*arguments, *both, "--out", str(tmp_path / "recorded")]) == 0
    plain, recorded = files(tmp_path / "plain"), files(tmp_path / "recorded")
    del plain["run.json"]
    assert plain == {name: recorded[name] for name in plain}


def test_ctrl_c_leaves_a_whole_file(
    config: Path, tmp_path: Path, interrupting: Callable[[str, int], None]
) -> None:
    interrupting("sim.results.recording.schedule.ScheduleFile.scheduled", 200)
    out = tmp_path / "out"
    one_by_one = options("--stepwise", "--set", "engine.async_scheduling=false")
    arguments = ["run", str(config), "--out", str(out), *one_by_one]
    assert kvsim([*arguments, "--record", "schedule", "--record", "blocks"]) == 130
    lines = list(read_log(out / "schedule.jsonl.zst"))
    assert [line["t"] for line in lines] == list(range(200))
    tier = json.loads((out / "blocks.json").read_text())["tiers"]["gpu"]
    (free_end,) = lines[-1]["free_end"]
    assert tier["held_at_end"] == tier["num_blocks"] - free_end > 0


def test_what_cannot_be_recorded_is_refused_in_a_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(config), "--out", str(tmp_path / "out")]
    line = refused([*arguments, "--record", "everything"], capsys, tmp_path)
    assert "schedule" in line
    assert "blocks" in line
    (tmp_path / "mine.py").write_text(OWN_SCHEDULER)
    data = minimal(scheduler={"kind": "mine.py:Mine"})
    path = write(tmp_path, data)
    for kind in ("schedule", "blocks"):
        asked = ["run", str(path), "--out", str(tmp_path / "out"), "--record", kind]
        line = refused(asked, capsys, tmp_path)
        assert f"--record {kind} is built for" in line
        assert "Mine" in line


OWN_SCHEDULER = """
from sim.scheduler.v1 import V1Scheduler

class Mine:
    def __init__(self, num_gpu_blocks, block_size, max_num_batched_tokens,
                 max_num_seqs, max_model_len):
        self._inner = V1Scheduler(
            num_gpu_blocks, block_size, max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    def __getattr__(self, name):
        return getattr(self._inner, name)
"""


# -- `kvsim decisions --diff` ---------------------------------------------------


@pytest.fixture
def schedules(config: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Of the same run with steps twice as long, and so other decisions."""
    paths = []
    for name, more in (("a", []), ("b", ["--set", "cost.step_s=0.02"])):
        out = tmp_path / name
        arguments = ["run", str(config), "--out", str(out), *options(), *more]
        assert kvsim([*arguments, "--record", "schedule"]) == 0
        paths.append(out / "schedule.jsonl.zst")
    return paths[0], paths[1]


def test_diff_reads_schedules(
    schedules: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = map(str, schedules)
    capsys.readouterr()
    assert kvsim(["decisions", "--diff", first, first]) == 0
    assert "take the same decisions" in capsys.readouterr().out
    assert kvsim(["decisions", "--diff", first, second]) == 1
    assert "field '" in capsys.readouterr().out


def test_diff_leaves_times_out_and_a_plain_text_copy_is_the_same_log(
    schedules: tuple[Path, Path], tmp_path: Path
) -> None:
    later = tmp_path / "later.jsonl"
    header, lines = lines_of(schedules[0].read_bytes())
    moved = [line | {"start_s": line["start_s"] + 1.0} for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in [header, *moved])
    later.write_text(text)
    assert kvsim(["decisions", "--diff", str(schedules[0]), str(later), "--quiet"]) == 0
    moved[3]["free"] = [0]
    later.write_text("".join(json.dumps(line) + "\n" for line in [header, *moved]))
    assert kvsim(["decisions", "--diff", str(schedules[0]), str(later), "--quiet"]) == 1


def test_diff_names_a_file_that_is_cut(
    schedules: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.jsonl.zst"
    data = schedules[0].read_bytes()
    cut.write_bytes(data[: len(data) // 2])
    line = refused(["decisions", "--diff", str(cut), str(cut)], capsys, tmp_path)
    assert "cut.jsonl.zst" in line


def test_the_simulation_is_told_step_by_step_only_while_somebody_listens() -> None:
    config = listed([{"at": 0.0, "prompt": [[0, 6]], "out": 30, "seg": 1}])
    assert not Simulation(config).engine.listeners
    recorded = record(config)
    assert len(lines_of(recorded.schedule)[1]) == 30
