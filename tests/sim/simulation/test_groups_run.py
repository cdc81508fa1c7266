"""Runs of models with layers of several kinds, from their configuration on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import load_config
from sim.errors import ConfigError, UserError
from sim.hardware.capacity import estimate_capacity
from sim.hardware.gpus import load_gpu
from sim.simulation.run import Simulation

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """\
workload:
  synthetic:
    num_requests: 60
    arrivals: {kind: poisson, rate: 40.0}
    prompt_tokens: {kind: lognormal, median: 900, sigma: 0.8, max: 4000}
    output_tokens: {kind: lognormal, median: 60, sigma: 0.8, max: 300}
engine: {model: openai/gpt-oss-120b, gpu: h200_sxm, max_num_seqs: 32}
seed: 3
"""
GPU = "h200_sxm"
MODELS = {
    "openai/gpt-oss-20b": 1400,
    "google/gemma-3-27b-it": 2200,
    "ibm-granite/granite-4.0-h-small": 120,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "groups.yaml"
    path.write_text(CONFIG)
    return path


def result(path: Path, *settings: str, stepwise: bool = False) -> Any:
    return Simulation(load_config(path, settings), stepwise=stepwise).run()


@pytest.mark.parametrize("caching", ["true", "false"])
@pytest.mark.parametrize("model", MODELS)
def test_both_paths_do_the_same_and_everybody_is_served(
    path: Path, model: str, caching: str
) -> None:
    settings = (
        f"engine.model={model}",
        f"engine.num_gpu_blocks_override={MODELS[model]}",
        f"engine.enable_prefix_caching={caching}",
    )
    fast, stepwise = (result(path, *settings, stepwise=each) for each in (False, True))
    assert (fast.requests["status"] == "finished_stopped").all()
    assert fast.requests.equals(stepwise.requests)
    assert fast.steps.equals(stepwise.steps)
    assert fast.summary["kv_cache_usage_max"] > 0.3
    # What is stored fits what is held.
    room = fast.steps["num_physical_blocks"] * fast.summary["block_size"]
    assert (fast.steps["num_physical_tokens"] <= room).all()


def test_who_can_never_be_served_is_rejected(path: Path) -> None:
    found = result(path, "engine.num_gpu_blocks_override=250")
    rejected = found.requests[found.requests["status"] == "finished_rejected"]
    assert 0 < len(rejected) < 60
    assert rejected["reason"].str.contains("max_model_len|blocks").all()


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("engine.engine_version=0.29", "engine_version must be 0.30 or later for l"),
        ("engine.evictor=lru", "eviction policies know one KV cache group"),
        ("engine.prefix_cache_retention_interval=7", "7"),
        ("engine.prefix_cache_retention_interval=often", "retention_interval"),
        ("engine.prefix_match_unit=7", "prefix_match_unit must divide .* got 7"),
        ("engine.mamba_cache_mode=align", "no effect in 0.33, enable_prefix_caching"),
        ("engine.mamba_block_size=64", "no effect in 0.33, blocks of states are as"),
        ("engine.mamba_cache_dtype=int8", "mamba_cache_dtype"),
        ("engine.num_gpu_blocks_override=2", "a pool of 2 blocks holds no request"),
    ],
)
def test_what_is_not_known_of_groups_is_refused(
    path: Path, setting: str, match: str
) -> None:
    with pytest.raises(UserError, match=match):
        Simulation(load_config(path, [setting]))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.yaml"
    path.write_text(
        CONFIG[: CONFIG.index("  synthetic")]
        + "  sessions:\n"
        + "    kind: chat\n"
        + "    num_sessions: 6\n"
        + "    arrivals: {kind: poisson, rate: 2.0}\n"
        + "    turns: {kind: fixed, number: 6}\n"
        + "    prompt_tokens: {kind: fixed, tokens: 300}\n"
        + "    output_tokens: {kind: fixed, tokens: 280}\n"
        + "    think_s: {kind: fixed, value_s: 2.0}\n"
        + CONFIG[CONFIG.index("engine") :]
    )
    return path


@pytest.mark.slow
def test_a_unit_of_hits_finds_prefixes_inside_blocks(chats: Path) -> None:
    model = "engine.model=ibm-granite/granite-4.0-h-small"
    unit = "engine.prefix_match_unit=16"
    whole, fast = result(chats, model), result(chats, model, unit)
    assert whole.summary["prefix_cache_hits"] % 528 == 0
    assert fast.summary["prefix_cache_hits"] > whole.summary["prefix_cache_hits"]
    copied = fast.steps["num_copied_blocks"]
    assert copied.sum() > 0
    # gathered, then written: each block is read twice and written twice
    block_bytes = estimate_capacity("ibm-granite/granite-4.0-h-small", GPU).block_bytes
    bandwidth = load_gpu(GPU).memory_bandwidth_bytes_per_s
    seconds = 10e-6 + copied * 4 * block_bytes / (0.8 * bandwidth)
    assert fast.steps["copy_s"].to_list() == pytest.approx(
        seconds.where(copied > 0, 0.0)
    )
    stepwise = result(chats, model, unit, stepwise=True)
    assert fast.requests.equals(stepwise.requests)
    assert fast.steps.equals(stepwise.steps)


def test_without_the_hybrid_manager_windows_keep_their_blocks(path: Path) -> None:
    off = "engine.disable_hybrid_kv_cache_manager=true"
    two, one = result(path), result(path, off)
    assert "kv_cache_groups" not in one.summary
    assert len(two.summary["kv_cache_groups"]) == 2
    # half as many blocks, each of all layers
    assert one.summary["num_gpu_blocks"] == two.summary["num_gpu_blocks"] // 2


def test_a_lone_window_gives_up_its_blocks(path: Path) -> None:
    mistral = (
        "engine.model=mistralai/Mistral-7B-v0.1",
        "workload.synthetic.prompt_tokens={kind: fixed, tokens: 9000}",
        "engine.max_num_batched_tokens=2048",
    )
    now, before = (
        result(path, *mistral),
        result(path, *mistral, "engine.engine_version=0.29"),
    )
    by_hand = result(path, *mistral, "engine.sliding_window=4096")
    used = [each.summary["kv_cache_usage_max"] for each in (now, by_hand, before)]
    assert used[0] == used[1] < 0.8 * used[2]


def test_precise_states_take_larger_blocks_and_more_time(path: Path) -> None:
    model = "engine.model=ibm-granite/granite-4.0-h-small"
    usual = result(path, model)
    matrices = result(path, model, "engine.mamba_ssm_cache_dtype=float32")
    all_of_them = result(path, model, "engine.mamba_cache_dtype=float32")
    sizes = [each.summary["block_size"] for each in (usual, matrices, all_of_them)]
    assert sizes == [528, 1040, 1056]
    times = [each.summary["mean_tpot_ms"] for each in (usual, matrices, all_of_them)]
    assert times[0] < times[1] < times[2]


def test_an_interval_keeps_more_of_a_conversation(chats: Path) -> None:
    hits = [
        result(chats, *settings).summary["prefix_cache_hits"]
        for settings in (
            (),
            ("engine.prefix_cache_retention_interval=0",),
            ("engine.prefix_cache_retention_interval=256",),
            ("engine.prefix_cache_retention_interval=dense",),
        )
    ]
    assert 0 < hits[0] == hits[1] < hits[2] <= hits[3]


def test_a_scheduler_of_ones_own_is_told_what_to_keep(chats: Path) -> None:
    mine = chats.parent / "mine.py"
    mine.write_text(
        "from sim.scheduler.v1 import V1Scheduler\n\n\nclass Mine(V1Scheduler):\n"
        "    pass\n"
    )
    dense = "engine.prefix_cache_retention_interval=dense"
    ours = f"engine.scheduler={{kind: '{mine}:Mine'}}"
    own, built_in = result(chats, dense, ours), result(chats, dense)
    assert own.summary["prefix_cache_hits"] == built_in.summary["prefix_cache_hits"]


def test_without_windows_or_states_there_is_nothing_to_retain(path: Path) -> None:
    settings = [
        "engine.model=Qwen/Qwen3-8B",
        "engine.prefix_cache_retention_interval=0",
    ]
    with pytest.raises(ConfigError, match="keeps every block alike; leave it out"):
        Simulation(load_config(path, settings))
