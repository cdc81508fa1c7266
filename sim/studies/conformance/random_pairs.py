"""Random decision workloads for V1: some engines prefill, others decode."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, get_args

from sim.config.pairs import ORDERS
from sim.scheduler.v1.dialect import dialect_of
from sim.studies.conformance.played_pair import Chooses
from sim.studies.conformance.random_offload import random_pace, random_tier
from sim.studies.conformance.random_v1 import (
    ABORTED_SHARE,
    MOST_REQUESTS,
    accept_some,
    as_workload,
    random_config,
    random_requests,
    stop_some,
    with_drafts,
    withdraw_some,
)

if TYPE_CHECKING:
    from sim.scheduler.v1.dialect import V1Dialect
    from sim.studies.conformance.workload import DecisionWorkload

_LOST_SHARE = 0.2
_FAILING_SHARE = 0.3


def random_pair_workload(
    seed: int,
    release: str,
    *,
    async_scheduling: bool = False,
    speculative: bool = False,
    offload: bool = False,
) -> DecisionWorkload:
    """Return the workload of a seed, for two engines of a release.

    Blocks and the longest sequence are the same on both, all else is drawn for each.
    With `offload` some have a CPU tier behind their pool, at least one.
    With asynchronous scheduling on one of them, or both, or with drafts, it is the same
    but for outputs that end early, and limits that leave room for drafts.
    """
    draw, dialect = Random(f"conform pairs {seed}"), dialect_of(release)
    prefill = _side(draw, dialect)
    decode = _alike(_side(draw, dialect), prefill)
    requests = random_requests(draw, prefill | {"policy": decode["policy"]})
    way = along_the_way(draw, requests)
    name = f"pairs, seed {seed}"
    if async_scheduling:
        ahead = Random(f"ahead {seed}").choice(
            ((True, True), (True, False), (False, True))
        )
        prefill["async_scheduling"], decode["async_scheduling"] = ahead
        name += ", asynchronous"
    if speculative:
        drafts = Random(f"drafts {seed}")
        verify_some(drafts, [prefill, decode], num_prefillers=1)
        accept_some(drafts, requests)
        name += ", speculative"
    if async_scheduling or speculative:
        stop_some(Random(f"stops {seed}"), requests)
    if offload:
        name += ", with tiers"
        _offload_some(Random(f"tiers {seed}"), way, [prefill, decode])
    config = {"pd": way, "prefill": prefill, "decode": decode}
    return as_workload(name, release, config, requests)


def random_pools_workload(
    seed: int,
    release: str,
    *,
    prefillers: int = 0,
    decoders: int = 0,
    async_scheduling: bool = False,
    speculative: bool = False,
    offload: bool = False,
) -> DecisionWorkload:
    """Return the workload of a seed, for prefillers and decoders behind a proxy.

    As many as given, or one to four of each; routers are drawn, and which of both is
    chosen first. Decoders compute some prompts themselves. For the rest see
    `random_pair_workload`.
    """
    draw, dialect = Random(f"conform pools {seed}"), dialect_of(release)
    num_prefillers, num_decoders = draw.randint(1, 4), draw.randint(1, 4)
    sides = [_side(draw, dialect)]
    num_sides = (prefillers or num_prefillers) + (decoders or num_decoders)
    while len(sides) < num_sides:
        sides.append(_alike(_side(draw, dialect), sides[0]))
    policies = sorted({side["policy"] for side in sides})
    requests = random_requests(
        draw, sides[0] | {"policy": policies[-1]}, MOST_REQUESTS + 4 * num_sides
    )
    way = along_the_way(draw, requests)
    way |= along_the_way_to_pools(draw, requests)
    name = f"pools, seed {seed}"
    num_prefillers = prefillers or num_prefillers
    if async_scheduling:
        schedule_some_ahead(seed, sides, requests)
        name += ", asynchronous"
    if speculative:
        drafts = Random(f"drafts {seed}")
        verify_some(drafts, sides, num_prefillers=num_prefillers)
        accept_some(drafts, requests)
        name += ", speculative"
        if not async_scheduling:
            stop_some(Random(f"stops {seed}"), requests)
    if offload:
        name += ", with tiers"
        _offload_some(Random(f"tiers {seed}"), way, sides)
    config = {
        "pd": way,
        "prefill": sides[:num_prefillers],
        "decode": sides[num_prefillers:],
    }
    return as_workload(name, release, config, requests)


def schedule_some_ahead(
    seed: int, sides: list[dict[str, Any]], requests: list[dict[str, Any]]
) -> None:
    """Let some of the engines, at least one, schedule ahead; some outputs end early."""
    ahead = Random(f"ahead {seed}")
    for side in sides:
        side["async_scheduling"] = ahead.random() < 0.7
    ahead.choice(sides)["async_scheduling"] = True
    stop_some(Random(f"stops {seed}"), requests)


def along_the_way_to_pools(
    draw: Random, requests: list[dict[str, Any]]
) -> dict[str, Any]:
    """Keep some prompts from prefillers; return how engines of pools are chosen."""
    way: dict[str, Any] = {
        key: draw.choice(get_args(Chooses)) for key in ("router", "decode_router")
    }
    way["order"] = draw.choice(ORDERS)
    local_share = draw.choice((0.0, 0.0, 0.2, 0.5))
    for request in requests:
        if draw.random() < local_share:
            request["remote_prefill"] = False
    return way


def verify_some(
    draw: Random,
    sides: list[dict[str, Any]],
    *,
    num_prefillers: int,
    method: str | None = None,
) -> None:
    """Let engines verify drafts, by a method that is given or drawn.

    All have a drafter's cache, or none has one: both ends of a pull need the same
    layers. Drafts that are looked up are a matter of each engine.
    """
    method = method or with_drafts(draw, sides[-1])["speculative"]["method"]
    finders = [draw.random() < 0.3 for _ in range(num_prefillers)]
    finders += [draw.random() < 0.7 for _ in sides[num_prefillers:]]
    finders[-1] = True
    for side, finds in zip(sides, finders, strict=True):
        keys = with_drafts(draw, side)
        keys["speculative"]["method"] = method
        if finds or method != "ngram":
            side.update(keys)


def _offload_some(
    draw: Random, way: dict[str, Any], sides: list[dict[str, Any]]
) -> None:
    """Put CPU tiers behind the pools of some engines; see `random_offload_workload`.

    Blocks of one token are made blocks of two there, and so they are here.
    """
    block_size = max(sides[0]["block_size"], 2)
    way["asks_tier_first"] = draw.random() < 0.5
    with_tiers = [draw.random() < 0.6 for _ in sides]
    with_tiers[draw.randrange(len(sides))] = True
    for side, has_tier in zip(sides, with_tiers, strict=True):
        side["block_size"] = block_size
        if has_tier:
            side["offload"] = random_tier(draw, side)
            side["worker"] = random_pace(draw)


def along_the_way(draw: Random, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Withdraw and delay some requests; return how they come from one to the other."""
    if draw.random() < ABORTED_SHARE:
        withdraw_some(draw, requests)
    for request in requests:
        if draw.random() < 0.2:
            request["route_delay"] = draw.choice((0, 1, 10))
    return _way(draw, [request["id"] for request in requests])


def _side(draw: Random, dialect: V1Dialect) -> dict[str, Any]:
    config = random_config(draw, dialect)
    config.pop("sliding_window", None)
    return config


def _alike(config: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return an engine with the blocks and the longest sequence of another one."""
    block_size, longest = other["block_size"], other["max_model_len"]
    needed = -(-longest // block_size) + 1
    changes = {
        "block_size": block_size,
        "max_model_len": longest,
        "num_gpu_blocks": max(config["num_gpu_blocks"], needed),
        "long_prefill_token_threshold": min(
            config["long_prefill_token_threshold"], longest
        ),
    }
    if not config["chunked_prefill"]:
        changes["max_num_batched_tokens"] = max(
            config["max_num_batched_tokens"], longest
        )
    return config | changes


def _way(draw: Random, names: list[str]) -> dict[str, Any]:
    """Return how requests and blocks come from one engine to the other."""
    way: dict[str, Any] = {
        "kv_lease_duration": draw.choice((1, 5, 6, 12, 30, 30, 60)),
        "kv_load_failure_policy": draw.choice(("fail", "recompute")),
        "route_delay": draw.choice((0, 0, 1, 4, 20)),
        "pull": [draw.choice((0, 0, 1, 3, 12)), draw.choice((0, 0, 1, 2, 5))],
    }
    if draw.random() < _LOST_SHARE:
        way["lost"] = [name for name in names if draw.random() < 0.3]
    if draw.random() < _FAILING_SHARE:
        way["fail_pulls"] = sorted(draw.sample(range(16), draw.randint(1, 8)))
    return way
