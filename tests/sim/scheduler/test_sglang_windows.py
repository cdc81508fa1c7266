"""gpt-oss on SGLang 0.5.23: both pools in a run, and the budget of the second one."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.errors import CapacityError, ConfigError, SchedulerError
from sim.scheduler.sglang.scheduler import SglangScheduler
from sim.scheduler.sglang.settings import Disaggregation, Settings, WindowPool
from sim.scheduler.sglang.windows import WindowBudget
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.shared import shared

SWA = WindowPool(sliding_window_size=10, max_total_num_tokens=64)


def settings(**more: Any) -> Settings:
    given: dict[str, Any] = {"max_total_num_tokens": 256, "swa": SWA}
    return Settings(**given | {"engine_version": "0.5.23"} | more)


def budget(**more: Any) -> WindowBudget:
    given = settings(**more)
    return WindowBudget(given, SglangScheduler(given).cache)


# -- the budget -------------------------------------------------------------------


def test_a_request_takes_its_chunk_before_the_window_then_a_window_and_a_page() -> None:
    found = budget()
    assert found.needed(30, 5, None) == 20 + 10 + 1
    assert found.needed(30, 5, 16) == 6 + 10 + 1
    assert found.needed(3, 5, 16) == 0 + 8 + 1
    assert budget(page_size=4).needed(12, 40, None) == 2 + 10 + 4


def test_others_wait_but_for_what_never_fits() -> None:
    found = budget()
    assert found.remaining == 64
    assert found.chunk_for(30, 5, 40) == (True, 40)
    found.take(30, 5, 40)
    assert found.remaining == 64 - 31
    # for now there is no room: it waits, whole
    assert found.chunk_for(50, 5, 60) == (False, None)
    # there never will be: its chunk is as large as what is left beside its outputs
    assert found.chunk_for(90, 5, 80) == (True, 33 - 6)
    assert found.chunk_for(90, 5, None) == (False, None)


def test_pages_cut_what_is_left() -> None:
    found = budget(page_size=4)
    assert found.chunk_for(100, 5, 96) == (True, (64 - 9) // 4 * 4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"engine_version": "0.5.22"}, "are SGLang 0.5.23, got engine_version 0.5.22"),
        ({"swa": WindowPool(10, 63), "page_size": 2}, "multiple of page_size 2"),
    ],
)
def test_what_does_not_fit_together(more: dict[str, Any], said: str) -> None:
    with pytest.raises(SchedulerError, match=said):
        settings(**more)


def test_prefill_and_decode_apart_are_refused() -> None:
    with pytest.raises(SchedulerError, match="not built for prefill and decode"):
        settings(kv_transfer=Disaggregation("prefill"))


# -- runs -------------------------------------------------------------------------


def data_of(**engine: Any) -> dict[str, Any]:
    return {
        "engine": {
            "scheduler": "sglang",
            "engine_version": "0.5.23",
            "model": "openai/gpt-oss-20b",
            "gpu": "h100_sxm",
        }
        | engine,
        "workload": {
            "sessions": {
                "kind": "chat",
                "num_sessions": 12,
                "arrivals": {"kind": "poisson", "rate": 3.0},
                "turns": {"kind": "fixed", "number": 3},
                "prompt_tokens": {"kind": "uniform", "low": 100, "high": 1500},
                "output_tokens": {"kind": "uniform", "low": 20, "high": 400},
                "think_s": {"kind": "fixed", "value_s": 1.0},
            },
            "max_tokens": 400,
        },
    }


def test_a_run_tells_both_pools() -> None:
    simulation = Simulation(parse_config(data_of()))
    results = simulation.run()
    summary = results.summary
    assert summary["completed"] == 36
    assert summary["path"] == "stepwise"
    assert "layers that have a window" in summary["path_reason"]
    assert summary["max_total_num_tokens"] == 1_255_182
    assert summary["swa_max_total_num_tokens"] == 1_004_145
    full, window = summary["kv_cache_groups"]
    assert (full["num_blocks"], window["num_blocks"]) == (1_255_182, 1_004_145)
    # a decode holds its window and what waits to be given back, a prompt its chunk
    most = summary["num_running_max"] * (127 + 128 + 1) + 2 * 8192
    assert 127 < window["num_blocks_max"] <= most
    assert window["num_blocks_mean"] < full["num_blocks_mean"] / 3
    usage = summary["kv_cache_usage_max"]
    assert usage == pytest.approx(full["num_blocks_max"] / 1_255_182)
    assert summary["prefix_cache_hits"] > 0  # of turns before
    rows = results.recording.group_table
    assert rows is not None
    assert {*rows["kind"]} == {0, 1}
    for scheduler in simulation.schedulers:
        scheduler.check()


def test_a_pool_without_windows_keeps_all_tokens() -> None:
    summary = simulate(parse_config(data_of(disable_hybrid_swa_memory=True))).summary
    assert summary["path"] == "fast"
    assert "kv_cache_groups" not in summary
    assert summary["max_total_num_tokens"] == 1_129_664


def test_short_pools_drop_windows_and_reuse_less() -> None:
    """The same tree with fewer windows in it: fewer prompts go on from an answer."""
    hits = {}
    for ratio in (1.0, 0.02):
        data = data_of(max_total_tokens=60_000, swa_full_tokens_ratio=ratio)
        data["engine"]["chunked_prefill_size"] = 512
        summary = simulate(parse_config(data)).summary
        assert summary["completed"] == 36, ratio
        hits[ratio] = summary["prefix_cache_hits"]
    assert hits[1.0] > hits[0.02]


def test_a_whole_prompt_that_never_fits_is_refused() -> None:
    data = data_of(
        max_total_tokens=4000, swa_full_tokens_ratio=0.2, chunked_prefill_size=-1
    )
    requests = simulate(parse_config(data)).requests
    refused = requests[requests["status"] == "finished_rejected"]
    assert len(refused)
    assert (
        "is never let in whole: layers with a window have slots for 800"
        in (refused["reason"].iloc[0])
    )


def test_a_ratio_without_a_second_pool_is_refused() -> None:
    data = data_of(model="meta-llama/Llama-3.1-8B", swa_full_tokens_ratio=0.5)
    with pytest.raises(CapacityError, match="swa_full_tokens_ratio divides two pools"):
        simulate(parse_config(data))
    with pytest.raises(ConfigError, match="the v1 generation has no such key"):
        parse_config(
            data_of(scheduler="v1", engine_version=None, swa_full_tokens_ratio=0.5)
        )


def test_a_fleet_has_two_pools_each() -> None:
    data = data_of() | {"fleet": {"pools": [{"name": "main", "replicas": 2}]}}
    summary = simulate(parse_config(data)).summary
    assert summary["completed"] == 36


@pytest.mark.slow
def test_gpt_oss_serves_a_real_trace() -> None:
    """Mooncake's conversations, whose long prompts fill the pool of full layers."""
    data = data_of()
    data["workload"] = {
        "trace": {
            "kind": "mooncake",
            "path": str(shared("traces/mooncake_fast25_conversation.jsonl")),
            "limit": 600,
            "spread_arrivals": True,
        },
        "max_tokens": 2000,
    }
    simulation = Simulation(parse_config(data))
    summary = simulation.run().summary
    assert summary["completed"] == 600
    full, window = summary["kv_cache_groups"]
    assert full["num_blocks_max"] > 0.5 * full["num_blocks"]
    assert window["num_blocks_max"] < 0.1 * window["num_blocks"]
    for scheduler in simulation.schedulers:
        scheduler.check()
