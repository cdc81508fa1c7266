"""Models with several KV cache groups: the installed vLLM's scheduler on the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pandas.testing import assert_frame_equal

from sim.config.tables import parse_config
from sim.scheduler.hosted.api import installed_version, nearest_release
from sim.simulation.run import Simulation
from sim.studies.conformance.conform import Coverage, compare
from sim.studies.conformance.random_groups import random_group_workload
from sim.studies.conformance.random_v1 import random_workload
from tests.hosted.test_conform import minor, pytestmark, why_missing

if TYPE_CHECKING:
    from sim.results.run import Results

__all__ = ["pytestmark"]

NUM_WORKLOADS, WORKLOADS_A_TEST = 300, 60
LATENT = "deepseek-ai/DeepSeek-V3"
MODELS: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-120b": {"num_gpu_blocks_override": 800},
    "google/gemma-3-27b-it": {"num_gpu_blocks_override": 1650},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {"num_gpu_blocks_override": 90},
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {"num_gpu_blocks_override": 1600},
    "ibm-granite/granite-4.0-h-small": {"num_gpu_blocks_override": 130},
    LATENT: {"num_gpu_blocks_override": 600},
}
INSIDE = "Qwen/Qwen3-Next-80B-A3B-Instruct"
COUNTED_BY_US = {"num_evictions", "path", "path_reason", "title"}


def chats(scheduler: str, model: str, **engine: Any) -> Results:
    sessions = {
        "kind": "chat",
        "num_sessions": 14,
        "arrivals": {"kind": "poisson", "rate": 2.0},
        "turns": {"kind": "fixed", "number": 4},
        "first_prompt_tokens": {"kind": "uniform", "low": 200, "high": 2500},
        "prompt_tokens": {"kind": "uniform", "low": 50, "high": 400},
        "output_tokens": {"kind": "uniform", "low": 20, "high": 250},
        "think_s": {"kind": "fixed", "value_s": 2.0},
        "prefixes": {
            "kind": "system_prompts",
            "num_groups": 2,
            "tokens": {"kind": "fixed", "tokens": 700},
        },
    }
    config = {
        "workload": {"sessions": sessions},
        "engine": {
            "model": model,
            "gpu": "h200_sxm",
            "tensor_parallel_size": 8,
            "scheduler": scheduler,
            "max_model_len": 6000,
            "max_num_seqs": 32,
            **engine,
        },
        "cost": {"kind": "roofline"},
        "seed": 0,
    }
    return Simulation(parse_config(config)).run(check_every=500)


only_known_groups = pytest.mark.skipif(
    not why_missing() and minor() != "0.33", reason="groups of ours are those of 0.33"
)


@only_known_groups
@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_random_groups_go_as_in_the_real_engine(first: int) -> None:
    release = nearest_release(installed_version())
    coverage = Coverage()
    for seed in range(first, first + WORKLOADS_A_TEST):
        workload = random_group_workload(seed, release)
        comparison = compare(workload)
        assert comparison.difference is None, (
            f"seed {seed}: {comparison.difference.in_words(('vLLM', 'kvsim'))}"
        )
        coverage.add(workload, comparison)
    met = coverage.workloads_with
    for name in ("preemptions", "prefix hits", "junctions", "copied blocks"):
        assert met[name] > 0, name


@only_known_groups
@pytest.mark.parametrize("draw", [random_workload, random_group_workload])
def test_steps_in_flight_go_as_in_the_real_engine(draw: Any) -> None:
    """Scheduled before the output of the step ahead is known, as 0.33 does."""
    release = nearest_release(installed_version())
    coverage = Coverage()
    for seed in range(100):
        workload = draw(seed, release, async_scheduling=True)
        comparison = compare(workload)
        assert comparison.difference is None, (
            f"seed {seed}: {comparison.difference.in_words(('vLLM', 'kvsim'))}"
        )
        coverage.add(workload, comparison)
    for name in ("preemptions", "prefix hits", "wasted tokens", "stale tokens"):
        assert coverage.workloads_with[name] > 0, name


@only_known_groups
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("draw", [random_workload, random_group_workload])
def test_drafts_go_as_in_the_real_engine(draw: Any, ahead: bool) -> None:
    """Verified, rejected, and scheduled before they are known, as 0.33 does."""
    release = nearest_release(installed_version())
    coverage = Coverage()
    for seed in range(100):
        workload = draw(seed, release, async_scheduling=ahead, speculative=True)
        comparison = compare(workload)
        assert comparison.difference is None, (
            f"seed {seed}: {comparison.difference.in_words(('vLLM', 'kvsim'))}"
        )
        coverage.add(workload, comparison)
    for name in ("preemptions", "prefix hits", "accepted drafts", "padded admissions"):
        assert coverage.workloads_with[name] > 0, name


@only_known_groups
@pytest.mark.parametrize(
    ("model", "engine"),
    [
        *((model, {}) for model in MODELS),
        *((model, {"enable_prefix_caching": False}) for model in MODELS),
        (INSIDE, {"prefix_match_unit": 16}),
        (INSIDE, {"prefix_cache_retention_interval": "dense"}),
        ("openai/gpt-oss-120b", {"disable_hybrid_kv_cache_manager": True}),
    ],
)
def test_a_run_takes_the_same_time(model: str, engine: dict[str, Any]) -> None:
    """Every time of every request, every column of every step, and usage by group."""
    engine = MODELS[model] | engine
    release = nearest_release(installed_version())
    hosted = chats("vllm", model, **engine)
    ours = chats("v1", model, engine_version=release, **engine)
    assert hosted.summary["hosted_vllm"] == installed_version()
    assert len(hosted.requests) > 40
    assert_frame_equal(hosted.requests, ours.requests, check_exact=True)
    assert_frame_equal(hosted.steps, ours.steps, check_exact=True)
    for name, told in ours.summary.items():
        if name not in COUNTED_BY_US:
            assert hosted.summary[name] == told, name
    mine, theirs = ours.recording.group_table, hosted.recording.group_table
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        assert theirs.arrow.equals(mine.arrow)
        assert theirs.arrow.num_rows > 100


@pytest.mark.skipif(
    not why_missing() and int(minor().split(".")[1]) < 24,
    reason="older releases know no states in blocks",
)
def test_older_releases_host_groups_too() -> None:
    """With everything kept, which all of them can be told."""
    for model, engine in MODELS.items():
        dense = {"prefix_cache_retention_interval": "dense"}
        run = chats("vllm", model, **engine, **({} if model == LATENT else dense))
        assert run.summary["completed"] > 40
        assert run.summary["prefix_cache_hits"] > 0
