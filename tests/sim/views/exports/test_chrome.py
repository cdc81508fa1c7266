"""Traces that Perfetto opens, with the numbers of the tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from sim.views.exports.chrome import Window
from sim.views.exports.formats import export
from sim.views.exports.request_lanes import AFTER_PREEMPTION
from tests.sim.views.exports.runs import run, summary_of
from tests.sim.views.exports.trace_rules import read_trace, seconds_by_name

if TYPE_CHECKING:
    from pathlib import Path


def table(results: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(results / f"{name}.parquet")


def test_steps_counters_and_preemptions_are_those_of_the_tables(
    recorded: Path, tmp_path: Path
) -> None:
    path, lines = export(recorded, "chrome", tmp_path / "trace.json")
    events = read_trace(path)
    summary, steps = summary_of(recorded), table(recorded, "steps")
    assert lines == [f"{len(events):,} events; open it in ui.perfetto.dev"]
    slices = [each for each in events if each["ph"] == "X"]
    assert len(slices) == summary["num_steps"]
    busy_s = sum(each["dur"] for each in slices) / 1e6
    # two in flight: each from its call of the scheduler until its output is there
    assert busy_s == pytest.approx((steps["output_s"] - steps["start_s"]).sum())
    assert {each["tid"] for each in slices} == {1, 4}
    tokens = sum(each["args"].get("num_batched_tokens", 0) for each in slices)
    assert tokens == steps["num_batched_tokens"].sum()
    usage = [
        each["args"]["value"]
        for each in events
        if each["ph"] == "C" and each["name"] == "kv_cache_usage_perc"
    ]
    assert max(usage) == summary["kv_cache_usage_max"]
    preempted = [each["args"] for each in events if each["ph"] == "i"]
    assert len(preempted) == summary["num_preemptions"] > 5
    rows = table(recorded, "preemptions").to_dict("records")
    for args, row in zip(preempted, rows, strict=True):
        assert args.items() <= row.items()
        assert {"request_id", "for_request_id", "reason", "num_tokens_lost"} <= set(
            args
        )


def test_phases_of_a_recorded_run_add_up(recorded: Path, tmp_path: Path) -> None:
    events = read_trace(export(recorded, "chrome", tmp_path / "trace.json")[0])
    requests, preemptions = table(recorded, "requests"), table(recorded, "preemptions")
    seconds = seconds_by_name(events)
    assert seconds.pop("request") == pytest.approx(requests["e2el_s"].sum())
    assert sum(seconds.values()) == pytest.approx(requests["e2el_s"].sum())
    assert seconds["waiting"] == pytest.approx(requests["queue_s"].sum())
    assert set(seconds) == {"waiting", "prefill", "decode", "preempted", "recompute"}
    begun = [each["ts"] for each in events if each.get("name") == "preempted"]
    assert begun == [round(time_s * 1e9) / 1e3 for time_s in preemptions["time_s"]]
    # Who was never preempted decodes from the first token to the last.
    calm = requests[requests["num_preemptions"] == 0]
    shortest = (calm["finish_s"] - calm["first_token_s"]).sum()
    assert seconds["decode"] >= shortest


def test_tables_alone_say_what_they_do_not_know(plain: Path, tmp_path: Path) -> None:
    path, lines = export(plain, "chrome", tmp_path / "trace.json")
    assert "--record schedule" in lines[1]
    seconds = seconds_by_name(read_trace(path))
    requests = table(plain, "requests")
    assert seconds["waiting"] == pytest.approx(requests["queue_s"].sum())
    assert seconds[AFTER_PREEMPTION] > 0
    calm = requests[requests["num_preemptions"] == 0]
    prefills_s = (calm["first_token_s"] - calm["first_scheduled_s"]).sum()
    assert seconds["prefill"] >= prefills_s * 0.999


def test_swaps_have_slices_and_a_phase(swapping: Path, tmp_path: Path) -> None:
    events = read_trace(export(swapping, "chrome", tmp_path / "trace.json")[0])
    summary = summary_of(swapping)
    assert summary["num_preemptions_swap"] == summary["num_preemptions"] > 5
    swaps = [
        each["args"]
        for each in events
        if each["ph"] == "X" and each["name"].startswith("swap")
    ]
    assert sum(each["blocks_in"] for each in swaps) == summary["swapped_in_blocks"]
    assert sum(each["blocks_out"] for each in swaps) == summary["swapped_out_blocks"]
    seconds = seconds_by_name(events)
    assert seconds["swapped"] > 0
    assert "recompute" not in seconds
    e2el_s = table(swapping, "requests")["e2el_s"].sum()
    assert seconds.pop("request") == pytest.approx(e2el_s)
    assert sum(seconds.values()) == pytest.approx(e2el_s)
    names = {each["name"] for each in events if each["ph"] == "C"}
    assert {"num_requests_swapped", "cpu_cache_usage_perc"} <= names


@pytest.mark.parametrize("options", [(), ("--record", "schedule", "--itl", "exact")])
def test_a_step_whose_output_never_came_ends_with_its_price(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """A queue that stalls ahead leaves a step in flight."""
    unchecked = {"admission_check": False, "max_num_batched_tokens": 16}
    stalled = run(tmp_path, *options, max_model_len=20, max_num_seqs=4, **unchecked)
    steps = table(stalled, "steps")
    assert steps["output_s"].isna().tolist()[-1]
    path, _ = export(stalled, "chrome", tmp_path / "trace.json")
    slices = [each for each in read_trace(path) if each["ph"] == "X"]
    assert len([each for each in slices if each["name"].startswith("step ")]) == len(
        steps
    )


def test_a_window_is_cut_out(recorded: Path, tmp_path: Path) -> None:
    steps = table(recorded, "steps")
    begin_s, end_s = steps["start_s"][20], steps["start_s"][60]
    window = Window(begin_s, end_s)
    path, _ = export(recorded, "chrome", tmp_path / "trace.json", window)
    events = read_trace(path)
    shown = [each["name"] for each in events if each["ph"] == "X"]
    assert shown == [f"step {i}" for i in range(20, 60)]
    for event in events:
        if event["ts"]:
            assert begin_s * 1e6 - 1e-3 <= event["ts"] <= end_s * 1e6 + 1e-3
    seconds = seconds_by_name(events)
    requests = table(recorded, "requests")
    alive_s = requests["finish_s"].clip(begin_s, end_s) - requests["arrival_s"].clip(
        begin_s, end_s
    )
    assert seconds.pop("request") == pytest.approx(alive_s.sum())
    assert sum(seconds.values()) == pytest.approx(alive_s.sum())


def test_a_packed_trace_is_the_same(recorded: Path, tmp_path: Path) -> None:
    plain = read_trace(export(recorded, "chrome", tmp_path / "trace.json")[0])
    packed, _ = export(recorded, "chrome", tmp_path / "trace.json.gz")
    assert read_trace(packed) == plain
    before = packed.read_bytes()
    export(recorded, "chrome", packed, overwrite=True)
    assert packed.read_bytes() == before
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["seed"] == 0
