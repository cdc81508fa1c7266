"""Keys act, or `docs/configuration.md` says that they do not: by generation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from sim.config.engine import EngineConfig
from sim.config.tables import parse_config
from sim.config.workload import SOURCES, WorkloadConfig
from sim.errors import ConfigError, SwapSpaceError
from sim.results.schema import TRAFFIC
from sim.scheduler.generations import GENERATION_KEYS, OURS
from sim.simulation.simulate import simulate
from tests.sim.config.test_config import minimal
from tests.test_configuration_page import meanings

if TYPE_CHECKING:
    from pathlib import Path

PRESSURE: dict[str, Any] = {
    "num_gpu_blocks_override": 40,
    "max_model_len": 200,
    "max_num_seqs": 8,
    "block_size": 16,
}
CHUNKS: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 64,
    "max_num_partial_prefills": 3,
}
POOL: dict[str, Any] = {"num_gpu_blocks_override": None}
NO_MARGIN: dict[str, Any] = {"safety_margin": 0.0}
SWAP: dict[str, Any] = {"preemption_mode": "swap"}
OPEN: dict[str, dict[str, Any]] = {"sglang": {"schedule_conservativeness": 0.02}}
"""What lets a generation admit more than it can hold."""
EVERYWHERE: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpu": ("h100_sxm", {}),
    "model": ("Qwen/Qwen2.5-7B", {}),
    "tensor_parallel_size": (2, {}),
    "interconnect": ("pcie3", {"tensor_parallel_size": 2}),
    "dtype": ("float32", {}),
    "quantization": ("fp8", {}),
    "kv_cache_dtype": ("fp8", {}),
    "block_size": (32, {}),
    "gpu_memory_utilization": (0.3, POOL | {"gpu_memory_utilization": 0.2}),
    "num_gpu_blocks_override": (60, {}),
    "kv_cache_memory_bytes": (2**28, POOL | {"kv_cache_memory_bytes": 2**27}),
    "max_model_len": (100, {}),
    "max_num_seqs": (4, {}),
    "max_num_batched_tokens": (201, {}),
    "enforce_eager": (True, {}),
}
"""A value of each key, and what stands beside it to let it act."""
OWN: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "cacheflow": {
        "preemption_victim": ("most_blocks", {}),
        "watermark": (0.2, {}),
        "engine_version": ("0.1.1", {}),
        "preemption_mode": ("swap", {}),
        "swap_space": (0.001, SWAP),
    },
    "v0_2": {
        "preemption_victim": ("most_blocks", {}),
        "watermark": (0.2, {}),
        "engine_version": ("0.2.0", {}),
        "preemption_mode": ("swap", {}),
        "swap_space": (0.001, SWAP),
        "sliding_window": (32, {}),
        "max_paddings": (0, {}),
        "cudagraph_capture_sizes": ([512], {}),
    },
    "v0": {
        "preemption_victim": ("most_blocks", {}),
        "watermark": (0.2, {}),
        "engine_version": ("0.7.0", {}),
        "preemption_mode": ("swap", {}),
        "swap_space": (0.001, SWAP),
        "scheduling_policy": ("priority", {}),
        "enable_prefix_caching": (True, {}),
        "enable_chunked_prefill": (True, {}),
        "long_prefill_token_threshold": (100, CHUNKS),
        "sliding_window": (32, {}),
        "scheduler_delay_factor": (2.0, {}),
        "num_lookahead_slots": (8, {}),
        "max_num_partial_prefills": (3, CHUNKS | {"max_num_partial_prefills": 1}),
        "max_long_partial_prefills": (
            2,
            CHUNKS | {"long_prefill_token_threshold": 16},
        ),
        "cudagraph_capture_sizes": ([512], {}),
        "override_generation_config": ({"top_p": 0.9}, {}),
    },
    "v1": {
        "preemption_victim": ("most_blocks", {}),
        "admission": ({"kind": "watermark", "share": 0.2}, {}),
        "watermark": (0.2, {}),
        "engine_version": ("0.11", {}),
        "preemption_mode": ("recompute", {}),
        "swap_space": (0.0, {}),
        "scheduling_policy": ("priority", {}),
        "enable_prefix_caching": (False, {}),
        "max_num_batched_tokens": (64, {}),
        "enable_chunked_prefill": (
            False,
            {"max_num_batched_tokens": 130, "max_model_len": 130},
        ),
        "long_prefill_token_threshold": (16, {}),
        "sliding_window": (32, {}),
        "max_num_active_seqs": (2, {}),
        "max_num_scheduled_tokens": (32, {}),
        "scheduler_reserve_full_isl": (False, {"max_num_batched_tokens": 64}),
        "long_prefill_token_threshold_adaptive": (
            True,
            {"long_prefill_token_threshold": 4, "max_num_batched_tokens": 64},
        ),
        "prefill_schedule_interval": (4, {}),
        "async_scheduling": (False, {}),
        "cudagraph_capture_sizes": ([512], {}),
        "override_generation_config": ({"top_k": 20}, {}),
        "speculative_config": ({"method": "mtp", "num_speculative_tokens": 2}, {}),
    },
    "hf_fifo": {
        "preemption_victim": ("most_blocks", NO_MARGIN),
        "engine_version": ("5.17.0", {}),
        "preemption_mode": ("recompute", NO_MARGIN | {"swap_space": 1.0}),
        "swap_space": (1.0, NO_MARGIN),
        "enable_prefix_caching": (False, {}),
        "safety_margin": (0.0, {}),
        "max_blocks_per_request": (0, {}),
    },
    "sglang": {
        "engine_version": ("0.5.10", {}),
        "preemption_mode": ("recompute", {}),
        "swap_space": (0.0, {}),
        "enable_prefix_caching": (False, {}),
        "max_num_batched_tokens": (64, {}),
        "enable_chunked_prefill": (False, POOL),
        "async_scheduling": (False, {}),
        "max_prefill_tokens": (64, {}),
        "prefill_max_requests": (1, {}),
        "max_queued_requests": (2, {}),
        "enable_mixed_chunk": (True, {}),
        "schedule_policy": ("lof", {}),
        "schedule_conservativeness": (2.0, {}),
        "radix_eviction_policy": ("mru", {}),
        "enable_priority_scheduling": (True, {}),
        "schedule_low_priority_values_first": (
            True,
            {"enable_priority_scheduling": True},
        ),
        "priority_scheduling_preemption_threshold": (
            0,
            {"enable_priority_scheduling": True},
        ),
    },
}
"""The same for keys whose value depends on the generation."""
SEEN: dict[str, tuple[str, ...]] = {}
"""Runs that were made: most keys are tried beside the same one."""


def pressed(
    generation: str,
    engine: dict[str, Any],
    workload: dict[str, Any] | None = None,
) -> tuple[str, ...]:
    """Return what the engine did in a small run with preemptions, or why it ended."""
    data = minimal(scheduler=generation, **PRESSURE | OPEN.get(generation, {}) | engine)
    data["cost"] = {"kind": "roofline"}
    data["workload"]["synthetic"] |= {
        "num_requests": 30,
        "arrivals": {"kind": "poisson", "rate": 115.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 120},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    data["workload"] |= {"max_tokens": 60, "priority": {0: 0.5, 1: 0.5}}
    data["workload"]["acceptance"] = {"kind": "constant", "rate": 0.5}
    data["workload"] |= workload or {}
    if repr(data) not in SEEN:
        SEEN[repr(data)] = tables_of(data)
    return SEEN[repr(data)]


def tables_of(data: dict[str, Any]) -> tuple[str, ...]:
    try:
        results = simulate(parse_config(data))
    except SwapSpaceError as error:
        return (str(error),)
    requests = results.requests.drop(columns=list(TRAFFIC))
    tables = (requests, results.steps, results.preemptions)
    return tuple(table.to_json() for table in tables)


def keys_of(generation: str) -> set[str]:
    lacking = GENERATION_KEYS - OURS[generation].keys
    return set(EngineConfig.model_fields) - lacking


@pytest.mark.parametrize(
    "generation",
    [
        name if name in {"v1", "sglang"} else pytest.param(name, marks=pytest.mark.slow)
        for name in OURS
    ],
)
def test_keys_without_effect_are_those_that_the_page_names(generation: str) -> None:
    tried = EVERYWHERE | OWN[generation]
    same = {
        key
        for key, (value, beside) in tried.items()
        if pressed(generation, beside) == pressed(generation, beside | {key: value})
    }
    said = {key for key, text in meanings().items() if text.startswith("No effect")}
    # A release of these is a name only; v1 neither swaps nor has CPU blocks; and a
    # batch reads more than the pool has slots only where prompts share blocks
    # (tests/sim/scheduler/test_hf_fifo.py).
    none = {
        "v1": {"preemption_mode", "swap_space"},
        "hf_fifo": {"engine_version", "max_blocks_per_request"},
        # tests/sim/scheduler/test_sglang.py: prompts that share, and more pressure
        "sglang": {
            "preemption_mode",
            "swap_space",
            "enable_prefix_caching",
            "engine_version",
            "priority_scheduling_preemption_threshold",
            "radix_eviction_policy",
            "schedule_policy",
        },
    }
    assert same == said | none.get(generation, {"engine_version"})
    # Shown elsewhere: the choice of a generation itself, invariant 7, classes, and by
    # test_groups_run.py what only models with windows or states have, by
    # test_ranks_run.py ranks, by test_speculative_run.py drafts (tests/sim/simulation).
    shown = {"scheduler", "admission_check", "pipeline_parallel_size", "evictor"}
    shown |= {"prefix_cache_retention_interval", "prefix_match_unit"}
    shown |= {"disable_hybrid_kv_cache_manager"}
    # tests/sim/scheduler/test_sglang_windows.py
    shown |= {"disable_hybrid_swa_memory", "swa_full_tokens_ratio"}
    shown |= {"disable_cascade_attn"}  # tests/sim/costs/test_cascade.py
    shown |= {"mamba_cache_dtype", "mamba_ssm_cache_dtype", "gdn_prefill_backend"}
    shown |= {"data_parallel_size", "api_server_count", "enable_expert_parallel"}
    shown |= {"all2all_backend", "network", "speculative_config"}
    # tests/sim/simulation/test_offloading_run.py
    shown |= {key for key in EngineConfig.model_fields if key.startswith("kv_off")}
    shown |= {"kv_transfer_config"}
    if OURS[generation].enable_prefix_caching is None:
        shown.add("enable_prefix_caching")  # only ever false
    assert keys_of(generation) - shown <= set(tried) <= keys_of(generation)


def test_generations_differ() -> None:
    tables = [pressed(name, {}, {"best_of": 2}) for name in OURS]
    assert len(set(tables)) == len(OURS)
    # All of them under pressure: there is a first preemption.
    assert all('"0":' in preemptions for *_, preemptions in tables)


def test_keys_of_some_generations_name_them_on_the_page() -> None:
    for key in GENERATION_KEYS:
        named = set(
            re.findall(r"`(\w+)`", " ".join(re.findall(r"\(.*?\)", meanings()[key])))
        )
        owners = {name for name, g in OURS.items() if key in g.keys}
        assert named == (owners if len(owners) < len(OURS) else set()), key


@pytest.mark.parametrize("generation", OURS)
def test_how_requests_sample_shows(generation: str) -> None:
    beams = {"beam_width": 2}
    by_priority = {"scheduling_policy": "priority"}
    cases: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
        ("best_of", 2, {}, {}),
        ("best_of", {1: 0.5, 2: 0.5}, {}, {}),
        ("beam_width", 2, {}, {}),
        ("beam_switch_share", 1.0, beams | {"beam_switch_share": 0.0}, {}),
        ("max_tokens", 20, {}, {}),
        ("max_concurrent_users", 5, {}, {}),
        ("split", {"num_replicas": 2}, {}, {}),
    ]
    if "scheduling_policy" in OURS[generation].keys:
        cases.append(("priority", 0, {}, by_priority))
    engine = {"max_model_len": 180}
    if generation == "hf_fifo":
        # A beam asks for one token; blocks of who ends with its first are not shared,
        # but for those of earlier chunks.
        engine["max_num_batched_tokens"] = 64
    for key, value, workload, more in cases:
        before = pressed(generation, engine | more, workload)
        assert before != pressed(generation, engine | more, workload | {key: value}), (
            key
        )
    if generation in ("v1", "sglang"):
        engine["async_scheduling"] = False
    # Without the policy, priorities change nothing but their draws, which are apart.
    plain = pressed(generation, engine)
    assert plain == pressed(generation, engine, {"priority": 0})
    # A service level is for reports, whatever the engine.
    assert plain == pressed(generation, engine, {"slo_class": {"a": 0.5, "b": 0.5}})
    # One step at a time, all that ends has ended when the next one is scheduled; but
    # SGLang lets requests in by the limits of their outputs.
    known = pressed(generation, engine, {"output_end": "length"})
    assert (plain == known) == (generation != "sglang")
    tried = {key for key, *_ in cases} | {"priority", "slo_class", "output_end"}
    # Below, in tests/sim/simulation/test_speculative_run.py, and in
    # tests/sim/engine/test_patience.py.
    elsewhere = {"resample", "acceptance", "client"}
    assert tried == set(WorkloadConfig.model_fields) - set(SOURCES) - elsewhere


def test_a_resampled_trace_is_other_traffic_with_each_seed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0,{i + 1},5" for i in range(300))
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    data = minimal()
    data["workload"] = {"trace": {"kind": "azure", "path": str(trace)}}
    lengths = []
    for resample, seed in ((None, 0), ({"window_s": 20.0}, 0), ({"window_s": 20.0}, 1)):
        data["workload"]["resample"] = resample
        requests = simulate(parse_config(data | {"seed": seed})).requests
        lengths.append(tuple(requests["num_prompt_tokens"]))
    assert lengths[0] == tuple(range(1, 301))
    assert len(set(lengths)) == 3
    assert {len(each) for each in lengths} == {300}


def test_only_a_trace_is_resampled() -> None:
    data = minimal()
    data["workload"]["resample"] = {"window_s": 20.0}
    with pytest.raises(
        ConfigError, match=r"workload\.resample: draws windows of a trace"
    ):
        parse_config(data)
    del data["workload"]["resample"]
    data["workload"] |= {"split": {"num_replicas": 2}, "max_concurrent_users": 3}
    with pytest.raises(ConfigError, match=r"workload\.split: users in a closed loop"):
        parse_config(data)
