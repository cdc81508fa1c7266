"""Random decision workloads for V1 with a CPU tier behind a pool that is too small."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from sim.scheduler.v1.dialect import dialect_of
from sim.studies.conformance.random_groups import drawn_engine
from sim.studies.conformance.random_v1 import (
    ABORTED_SHARE,
    as_workload,
    random_config,
    random_requests,
    stop_some,
    withdraw_some,
)

if TYPE_CHECKING:
    from sim.studies.conformance.workload import DecisionWorkload

_LIMITED_SHARE = 0.15
_FAILING_SHARE = 0.3
_TIGHT_SHARE = 0.7
_REPEATED_SHARE = 0.3


def random_offload_workload(
    seed: int, release: str, *, async_scheduling: bool = False
) -> DecisionWorkload:
    """Return the workload of a seed, for an engine of a release.

    With asynchronous scheduling it is the same but for outputs that end early.
    Blocks have two tokens at least: in blocks of one, the release looks up a prompt of
    one token that it has loaded for ever, as none of it is computed.
    """
    draw, dialect = Random(f"conform offload {seed}"), dialect_of(release)
    while (config := random_config(draw, dialect))["block_size"] == 1:
        pass
    config.pop("sliding_window", None)
    config["offload"] = random_tier(draw, config)
    config["worker"] = random_pace(draw)
    requests = random_requests(draw, config)
    if draw.random() < ABORTED_SHARE:
        withdraw_some(draw, requests)
    if draw.random() < _LIMITED_SHARE:
        for request in requests:
            _limit(draw, config, request)
    name = f"offload, seed {seed}"
    if async_scheduling:
        config["async_scheduling"] = True
        name += ", asynchronous"
        stop_some(Random(f"stops {seed}"), requests)
    return as_workload(name, release, config, requests)


def random_group_offload_workload(
    seed: int, release: str, *, async_scheduling: bool = False
) -> DecisionWorkload:
    """Return the workload of a seed, of layers that need caches of several kinds."""
    draw = Random(f"conform group offload {seed}")
    core: dict[str, Any] = {"async_scheduling": True} if async_scheduling else {}
    while True:
        engine = drawn_engine(draw, core, release, ("attention", "attention", "latent"))
        layout = engine.layout(release)
        assert layout is not None
        if layout.block_size > 1:
            break
    config = engine.config
    config["offload"] = random_tier(draw, {"block_size": layout.block_size})
    config["offload"]["cpu_chunks"] *= len(layout.groups)
    if draw.random() < _TIGHT_SHARE:  # then heads find in the tier what has left it
        engine.kv["num_gpu_blocks_override"] = engine.num_needed_blocks(release)
    if "prefix_cache_retention_interval" in engine.kv and draw.random() < 0.5:
        engine.kv["prefix_cache_retention_interval"] = None
    interval = engine.kv.get("prefix_cache_retention_interval", 0)
    if interval:
        config["offload"]["blocks_per_chunk"] = 1
    config["worker"] = random_pace(draw)
    if len(layout.groups) > 1:
        config["worker"].pop("fail_loads", None)  # a release cannot tell of which
    requests = random_requests(draw, config)
    for place, request in enumerate(requests[1:], start=1):
        if draw.random() < _REPEATED_SHARE:  # a window is kept at a prompt's end
            request["prompt"] = requests[draw.randrange(place)]["prompt"]
    if draw.random() < ABORTED_SHARE:
        withdraw_some(draw, requests)
    if draw.random() < _LIMITED_SHARE:
        for request in requests:
            _limit(draw, config, request)
    name = f"groups, offload, seed {seed}"
    if async_scheduling:
        name += ", asynchronous"
        stop_some(Random(f"stops {seed}"), requests)
    return as_workload(name, release, config, requests, engine.kv)


def random_tier(draw: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Return a CPU tier of an engine."""
    most_loaded = draw.randint(1, 12) * config["block_size"]
    return {
        "cpu_chunks": draw.choice((draw.randint(1, 6), draw.randint(4, 40), 200)),
        "blocks_per_chunk": draw.choice((1, 1, 1, 2, 3)),
        "eviction_policy": draw.choice(("lru", "lru", "arc")),
        "offload_prompt_only": draw.random() < 0.5,
        "store_threshold": draw.choice((0, 0, 0, 2, 3)),
        "max_tracker_size": draw.choice((3, 10, 64_000)),
        "sync_load_budget_tokens": draw.choice((0, 0, 0, most_loaded)),
        "kv_load_failure_policy": draw.choice(("fail", "recompute")),
    }


def random_pace(draw: Random) -> dict[str, Any]:
    """Return durations; at most one load of a step fails, as a rule."""
    pace: dict[str, Any] = {
        name: [draw.choice((0, 1, 1, 3, 8)), draw.choice((0, 1, 2, 4))]
        for name in ("store", "load")
    }
    if draw.random() < _FAILING_SHARE:
        first, apart = draw.randint(0, 3), draw.randint(2, 4)
        pace["fail_loads"] = [
            [each, draw.randint(0, 5)] for each in range(first, 40, apart)
        ]
    return pace


def _limit(draw: Random, config: dict[str, Any], request: dict[str, Any]) -> None:
    for name in ("max_load_tokens", "max_offload_tokens"):
        if draw.random() < 0.3:
            request[name] = draw.randint(0, config["max_model_len"])
