"""Every generation on a real trace, with every preemption mode, samples and beams."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.scheduler.generations import OURS
from sim.simulation.run import Simulation
from tests.shared import shared

MODES = {
    name: (None, "recompute", "swap") if generation.has_cpu_tier else (None,)
    for name, generation in OURS.items()
}
MODES["hf_fifo"] = (None, "recompute")  # swapping cannot be forced
LIMIT = 130
WIDTHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "best_of": {"best_of": {1: 0.7, 2: 0.2, 4: 0.1}},
    "beams": {"beam_width": {1: 0.95, 3: 0.05}},
}


def config(trace: str, limit: int, workload: dict[str, Any], **engine: Any) -> Any:
    kind = "azure" if "azure" in trace else "mooncake"
    path = str(shared(f"traces/{trace}"))
    return parse_config(
        {
            "workload": workload
            | {
                "trace": {"kind": kind, "path": path, "limit": limit, "rate_scale": 4.0}
            },
            "engine": {
                "model": "meta-llama/Llama-3.1-8B",
                "gpu": "h200_sxm",
                "num_gpu_blocks_override": 1100,
                "max_model_len": 8192,
            }
            | engine,
        }
    )


@pytest.mark.parametrize(
    ("scheduler", "mode", "width"),
    [
        # A forced mode meets groups in its beams; the rest is for make test-all.
        pytest.param(name, mode, width, marks=pytest.mark.slow)
        if (mode is not None) == (width != "beams")
        else (name, mode, width)
        for name, modes in MODES.items()
        for mode in modes
        for width in WIDTHS
    ],
)
def test_under_pressure_every_request_ends(
    scheduler: str, mode: str | None, width: str
) -> None:
    groups = OURS[scheduler].schedules_groups
    limit = 40 if width == "beams" and not groups else LIMIT
    # Its own blocks and its margin would keep the pressure off.
    own: dict[str, Any] = {
        "hf_fifo": {"safety_margin": 0.0, "block_size": 16},
        "sglang": {"schedule_conservativeness": 0.01, "block_size": 16},
    }.get(scheduler, {})
    simulation = Simulation(
        config(
            "azure_llm_2023_conv.csv",
            limit,
            WIDTHS[width] | {"max_tokens": 400},
            scheduler=scheduler,
            preemption_mode=mode,
            swap_space=16.0,
            max_num_batched_tokens=8192,
            **own,
        )
    )
    results = simulation.run(check_every=40)
    summary = results.summary
    assert summary["completed"] + summary["rejected"] == summary["num_requests"]
    assert summary["completed"] > 0
    modes = set(results.preemptions["mode"])
    if mode is not None:
        assert modes <= {mode}
    if limit == LIMIT:
        assert modes
    if "swap" in modes:
        assert summary["swapped_out_blocks"] == summary["swapped_in_blocks"] > 0
        assert results.steps["swap_s"].sum() > 0
    if "recompute" in modes:
        assert summary["recomputed_tokens"] > 0
    if width != "plain" and groups:
        assert summary["copied_blocks"] > 0
        assert results.steps["copy_s"].sum() > 0
        shared_blocks = results.steps["num_logical_blocks"]
        assert (shared_blocks > results.steps["num_physical_blocks"]).any()


@pytest.mark.parametrize("chunked", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_v0_with_and_without_chunks_and_caching(chunked: bool, caching: bool) -> None:
    engine = {"enable_chunked_prefill": chunked, "enable_prefix_caching": caching}
    simulation = Simulation(
        config("mooncake_fast25_conversation.jsonl", 150, {}, scheduler="v0", **engine)
    )
    summary = simulation.run(check_every=40).summary
    assert summary["completed"] + summary["rejected"] == 150
    assert (summary["prefix_cache_hits"] > 0) == caching


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", list(OURS))
def test_the_whole_conversation_trace_ends(scheduler: str) -> None:
    """2,158 prompts exceed the 2,560 tokens of cacheflow's step (invariant 7)."""
    whole = config("azure_llm_2023_conv.csv", 10**6, {}, scheduler=scheduler)
    engine = whole.engine.model_copy(
        update={
            "num_gpu_blocks_override": 20_000,
            "max_model_len": None,
            "max_num_batched_tokens": 2560,
        }
    )
    summary = Simulation(whole.model_copy(update={"engine": engine})).run().summary
    assert summary["completed"] + summary["rejected"] == 19_366
    chunks = scheduler in ("v0", "v1", "hf_fifo", "sglang")
    assert summary["rejected"] == (0 if chunks else 2158)
