"""Recorded traffic on both paths: equal results, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import RunConfig, parse_config
from tests.identity.compare import (
    ONLY_THE_END,
    Comparison,
    Look,
    assert_equal_paths,
)
from tests.identity.regimes import regimes_of
from tests.shared import shared

AZURE = "traces/azure_llm_2023_conv.csv"
MOONCAKE = "traces/mooncake_fast25_conversation.jsonl"


def config(kind: str, trace: dict[str, Any], engine: dict[str, Any]) -> RunConfig:
    path = str(shared(AZURE if kind == "azure" else MOONCAKE))
    return parse_config(
        {
            "workload": {"trace": {"kind": kind, "path": path} | trace},
            "engine": {
                "model": "meta-llama/Llama-3.1-8B",
                "gpu": "h200_sxm",
                "async_scheduling": False,
            }
            | engine,
            "cost": {"kind": "roofline"},
        }
    )


def equal(config: RunConfig, look: Look = ONLY_THE_END) -> Comparison:
    compared = assert_equal_paths(config, look)
    assert compared.chosen.path == "fast", compared.chosen.path_reason
    return compared


AZURE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "light": (
        {"rate_scale": 1.0, "limit": 1000},
        {"enable_prefix_caching": False},
        {"five quiet steps"},
    ),
    "loaded": (
        {"rate_scale": 3.0, "limit": 3000},
        {"enable_prefix_caching": False},
        {"partial prefills"},
    ),
    "cache of 6,000 blocks": (
        {"rate_scale": 3.0, "limit": 2000},
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 6000},
        {"preemptions"},
    ),
    "cache of 2,000 blocks, small steps": (
        {"rate_scale": 2.0, "limit": 800},
        {
            "enable_prefix_caching": False,
            "num_gpu_blocks_override": 2000,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 256,
            "scheduler_reserve_full_isl": False,
        },
        {"preemptions", "blocked heads", "partial prefills"},
    ),
    "with caching": (
        {"rate_scale": 3.0, "limit": 1200},
        {"num_gpu_blocks_override": 6000},
        {"evictions"},
    ),
    "with caching, under the oldest rules": (
        {"rate_scale": 2.0, "limit": 600},
        {"num_gpu_blocks_override": 2000, "engine_version": "0.11"},
        {"evictions", "preemptions"},
    ),
}


@pytest.mark.parametrize("name", AZURE_CASES)
def test_azure_conversations(name: str) -> None:
    trace, engine, regimes = AZURE_CASES[name]
    compared = equal(config("azure", trace, engine))
    assert regimes <= regimes_of(compared)


MOONCAKE_CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "endless": ({"num_gpu_blocks_override": 700_000}, {"hits", "shared blocks"}),
    "ample": (
        {"num_gpu_blocks_override": 60_000},
        {"hits", "evictions", "shared blocks"},
    ),
    "full": (
        {"num_gpu_blocks_override": 9_000},
        {"hits", "evictions", "blocked heads"},
    ),
    "full, blocks of 64 tokens": (
        {"num_gpu_blocks_override": 2_200, "block_size": 64, "engine_version": "0.12"},
        {"hits", "evictions", "preemptions"},
    ),
    "without caching": (
        {"num_gpu_blocks_override": 20_000, "enable_prefix_caching": False},
        {"partial prefills"},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in {"ample", "endless", "full, blocks of 64 tokens"}
        else name
        for name in MOONCAKE_CASES
    ],
)
def test_mooncake_conversations(name: str) -> None:
    engine, regimes = MOONCAKE_CASES[name]
    trace = {"rate_scale": 1.0, "limit": 600}
    compared = equal(config("mooncake", trace, engine))
    assert regimes <= regimes_of(compared)


AHEAD = {"async_scheduling": True}


@pytest.mark.parametrize(
    ("kind", "trace", "engine", "regimes"),
    [
        (
            "azure",
            {"rate_scale": 3.0, "limit": 500},
            {"enable_prefix_caching": False, "num_gpu_blocks_override": 1500},
            {"preemptions", "five quiet steps"},
        ),
        (
            "mooncake",
            {"rate_scale": 1.0, "limit": 150},
            {"num_gpu_blocks_override": 9_000},
            {"hits", "evictions", "blocked heads"},
        ),
    ],
    ids=["azure", "mooncake"],
)
def test_conversations_a_step_ahead(
    kind: str, trace: dict[str, Any], engine: dict[str, Any], regimes: set[str]
) -> None:
    compared = equal(config(kind, trace, engine | AHEAD))
    assert regimes <= regimes_of(compared)


def test_between_steps_queues_and_tables_are_equal_too() -> None:
    trace = {"rate_scale": 3.0, "limit": 400}
    engine = {"num_gpu_blocks_override": 3000}
    compared = equal(config("azure", trace, engine), Look(97, told=True))
    assert compared.reference.trail is not None
    assert len(compared.reference.trail.states) > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(
    ("rate_scale", "engine"),
    [
        (1.0, {}),
        (3.0, {}),
        (4.0, {"max_num_batched_tokens": 2048, "max_num_seqs": 256}),
        (3.0, {"num_gpu_blocks_override": 6000}),
        (3.0, {"num_gpu_blocks_override": 2000, "engine_version": "0.12"}),
    ],
    ids=["light", "loaded", "saturated", "preempting", "storm"],
)
def test_the_whole_azure_trace(
    rate_scale: float, engine: dict[str, Any], caching: bool
) -> None:
    engine = {"enable_prefix_caching": caching} | engine
    equal(config("azure", {"rate_scale": rate_scale}, engine))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rate_scale", [0.4, 1.0])
@pytest.mark.parametrize(
    "engine",
    [
        {"num_gpu_blocks_override": 7_000_000},
        {"num_gpu_blocks_override": 55_000},
        {"num_gpu_blocks_override": 9_000, "scheduler_reserve_full_isl": False},
        {"num_gpu_blocks_override": 3_000, "block_size": 64, "engine_version": "0.11"},
    ],
    ids=["endless", "bounded", "full", "old rules"],
)
def test_the_whole_mooncake_trace(rate_scale: float, engine: dict[str, Any]) -> None:
    equal(config("mooncake", {"rate_scale": rate_scale}, engine))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "rate_scale", "engine"),
    [
        ("azure", 3.0, {"enable_prefix_caching": False}),
        ("azure", 3.0, {"num_gpu_blocks_override": 6000}),
        ("mooncake", 1.0, {"num_gpu_blocks_override": 55_000}),
        ("mooncake", 0.4, {"num_gpu_blocks_override": 9_000}),
    ],
    ids=["loaded", "preempting", "bounded", "full"],
)
def test_whole_traces_a_step_ahead(
    kind: str, rate_scale: float, engine: dict[str, Any]
) -> None:
    equal(config(kind, {"rate_scale": rate_scale}, engine | AHEAD))
