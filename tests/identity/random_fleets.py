"""Random small fleets, by seed: pools, routers, ranks, deaths, autoscalers, roles."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from sim.config.tables import parse_config
from sim.errors import UserError
from sim.fleet.routers import ROUTERS
from sim.simulation.run import Simulation
from tests.identity.compare import Look
from tests.identity.random_configs import Case, draw_case
from tests.identity.random_groups import draw_group_case
from tests.identity.random_tiers import MODEL, draw_tier

_OF_V1 = (
    *("preemption_victim", "admission", "evictor", "sliding_window", "engine_version"),
    *("scheduling_policy", "prefill_schedule_interval", "long_prefill_token_threshold"),
    *("speculative_config", "max_num_partial_prefills", "watermark"),
)
_OF_GROUPS = (
    *("model", "block_size", "enable_prefix_caching", "num_gpu_blocks_override"),
    "prefix_cache_retention_interval",
)
_EXPERTS = "Qwen/Qwen3-30B-A3B"


class Shares(NamedTuple):
    """Shares of fleets: that prefill and decode apart, and of those."""

    apart: float
    rooms: float = 0.0
    drafts: float = 0.6
    tiers: float = 0.6


def draw_fleet_case(seed: int) -> Case:
    """Return a fleet whose engines are those of `draw_case`, by seed.

    What does not go together is refused, and drawn anew.
    """
    return _draw(seed, Random(f"fleets {seed}"), Shares(apart=0.15))


def draw_pair_case(seed: int) -> Case:
    """Return a fleet that prefills and decodes apart, by seed.

    A third of them are SGLang's, half of the others have several KV cache groups.
    """
    shares = Shares(apart=1.0, rooms=0.33, drafts=0.2, tiers=0.3)
    return _draw(seed, Random(f"pairs {seed}"), shares)


def _draw(seed: int, rng: Random, shares: Shares) -> Case:
    while True:
        number = rng.randrange(10**6)
        config, _ = draw_case(number)
        data = config.to_data()
        data["engine"] = config.engine.model_dump(exclude_unset=True)
        data["engine"]["async_scheduling"] = rng.random() < 0.5
        trace = data["workload"].get("trace", {})
        end_s = max((each["at"] for each in trace.get("requests", ())), default=10.0)
        has_any_model = data["cost"]["kind"] != "measured"
        data["fleet"] = _fleet(rng, data["engine"], end_s, has_any_model, shares.apart)
        if "links" in data["fleet"]:
            rooms = Random(f"rooms {seed} {number}")
            if rooms.random() < shares.rooms:
                _let_meet_in_rooms(rooms, data)
            else:
                if Random(f"layers {number}").random() < 0.5:
                    _give_groups(data, number)
                _draft_apart(Random(f"drafts {seed}"), data, shares.drafts)
                _offload_apart(Random(f"tiers {seed}"), data, shares.tiers)
        if Random(f"spaced {number}").random() < 0.1:  # one by one, for one pool
            last = data["fleet"]["pools"][-1]
            last["engine"] = last.get("engine", {}) | {"prefill_schedule_interval": 3}
        try:
            case = Case(parse_config(data), Look(rng.choice([0, 0, 1, 7])))
            Simulation(case.config)
        except UserError:
            continue
        return case


def _give_groups(data: dict[str, Any], number: int) -> None:
    """Let engines have a model with several KV cache groups."""
    config = draw_group_case(number).config
    engine = config.engine.model_dump(exclude_unset=True)
    data["engine"] |= {key: engine[key] for key in _OF_GROUPS if key in engine}
    data["cost"] = config.to_data()["cost"]


_OF_SGLANG = (
    *("model", "gpu", "num_gpu_blocks_override", "max_num_seqs", "async_scheduling"),
    *("max_num_batched_tokens", "max_model_len", "enable_prefix_caching"),
)


def _let_meet_in_rooms(rng: Random, data: dict[str, Any]) -> None:
    """Let pools be SGLang's, whose engines get a request at once."""
    engine, fleet = data["engine"], data["fleet"]
    releases = ("0.5.9", "0.5.10", "0.5.19", "0.5.21", "0.5.23")
    data["engine"] = {key: engine[key] for key in _OF_SGLANG if key in engine} | {
        "scheduler": "sglang",
        "engine_version": releases[engine["num_gpu_blocks_override"] % len(releases)],
        "block_size": rng.choice([1, 1, 4, 16]),
        "num_gpu_blocks_override": engine["num_gpu_blocks_override"]
        * engine["block_size"],
    }
    data["engine"]["num_gpu_blocks_override"] //= data["engine"]["block_size"]
    for pool in fleet["pools"]:
        pool.pop("engine", None)
    fleet.pop("proxy", None)
    reserved = rng.choice([0, 1, 8, 64])
    fleet["connector"] = {"num_reserved_decode_tokens": reserved}
    fleet["links"]["handshake_s"] = rng.choice([0.0, 0.7])


def _fleet(
    rng: Random,
    engine: dict[str, Any],
    end_s: float,
    has_any_model: bool,
    share_apart: float,
) -> dict[str, Any]:
    """Return a fleet; some keys of its engines are taken away, or others given."""
    roles = rng.random() < share_apart
    pools: list[dict[str, Any]] = [
        {"name": name, "replicas": rng.choice([1, 1, 2, 3])}
        for name in ("a", "b", "c")[: 2 if roles else rng.choice([1, 1, 2, 3])]
    ]
    fleet: dict[str, Any] = {"pools": pools, "router": _router(rng)}
    kind = rng.random()
    if roles:
        for key in _OF_V1:
            engine.pop(key, None)
        for pool, role in zip(pools, ("prefill", "decode"), strict=True):
            pool["role"] = role
        fleet["decode_router"] = _router(rng)
        fleet["links"] = {
            "bytes_per_s": rng.choice([1e8, 1e10]),
            "latency_s": rng.choice([0.0, 1e-3]),
        }
        if rng.random() < 0.3:
            fleet["proxy"] = {"order": "decode_first"}
        if kind < 0.35:
            _give_ranks(rng, engine, pools, has_experts=has_any_model)
    elif kind < 0.2:
        for key in _OF_V1:
            engine.pop(key, None)
        engine["enable_prefix_caching"] = None
        for pool in pools[1:]:
            pool["engine"] = {
                "scheduler": rng.choice(["v0", "v0_2", "hf_fifo", "sglang"])
            }
    elif kind < 0.35:
        _give_ranks(rng, engine, pools, has_experts=has_any_model)
    else:
        for pool in pools[1:]:
            pool["engine"] = {"max_num_seqs": rng.choice([1, 3, 16])}
    is_mixed = kind < 0.2 and not roles
    if not is_mixed and rng.random() < 0.4:
        own = engine.get("data_parallel_size", 1)
        num_engines = sum(
            each["replicas"] * each.get("engine", {}).get("data_parallel_size", own)
            for each in pools
        )
        fleet["events"] = _events(rng, num_engines, end_s)
    elif not is_mixed and rng.random() < 0.25 and not roles:
        fleet["autoscaler"] = [_autoscaler(rng, pool, end_s) for pool in pools]
    return fleet


def _give_ranks(
    rng: Random,
    engine: dict[str, Any],
    pools: list[dict[str, Any]],
    *,
    has_experts: bool,
) -> None:
    """Let engines be data-parallel ranks, which may divide experts."""
    engine["data_parallel_size"] = rng.choice([2, 3])
    if rng.random() < 0.6 and has_experts:
        engine |= {"model": _EXPERTS, "enable_expert_parallel": True}
    for pool in pools[1:]:
        pool["engine"] = {"data_parallel_size": rng.choice([1, 2])}


def _draft_apart(rng: Random, data: dict[str, Any], share: float) -> None:
    """Let prefillers and decoders have a drafter, or decoders look drafts up."""
    if rng.random() < 1 - share:
        return
    drafts = {"method": "eagle3", "num_speculative_tokens": rng.choice([1, 2, 4])}
    kind = rng.random()
    if kind < 0.5:
        _, behind = data["fleet"]["pools"]
        own = behind.get("engine", {})
        behind["engine"] = own | {"speculative_config": drafts | {"method": "ngram"}}
    else:
        data["engine"]["speculative_config"] = drafts
    data["workload"]["acceptance"] = {"kind": "constant", "rate": rng.random()}
    if data["cost"]["kind"] not in {"roofline", "measured"}:
        data["cost"]["draft_step_s"] = rng.choice([0.0, 1e-4])


def _offload_apart(rng: Random, data: dict[str, Any], share: float) -> None:
    """Give prefillers, decoders or both a tier, which knows of no drafts and ranks."""
    engine, fleet = data["engine"], data["fleet"]
    if rng.random() < 1 - share or "data_parallel_size" in engine:
        return
    engine["model"] = MODEL
    engine.pop("speculative_config", None)
    prefill, decode = fleet["pools"]
    decode.pop("engine", None)
    blocks = engine["block_size"], engine["num_gpu_blocks_override"]
    given = [prefill], [decode], [prefill, decode]
    for pool in rng.choice(given):
        pool["engine"] = draw_tier(rng, *blocks)
        policy = pool["engine"]["kv_transfer_config"].pop("kv_load_failure_policy")
        fleet["connector"] = {"kv_load_failure_policy": policy}
    if "engine" in decode and rng.random() < 0.5:
        fleet["connector"]["asks_tier_first"] = True
    if rng.random() < 0.3:
        fleet["links"]["shares_gpu_port"] = False


def _router(rng: Random) -> dict[str, Any]:
    router: dict[str, Any] = {"kind": rng.choice([*ROUTERS])}
    if router["kind"] == "llm_d" and rng.random() < 0.5:
        router["precise"] = True
    return router


def _events(rng: Random, num_engines: int, end_s: float) -> list[dict[str, Any]]:
    found = []
    for _ in range(rng.choice([1, 2, 4])):
        kind = rng.choice(["die", "die", "drain", "start", "slow"])
        event = {
            "time_s": rng.random() * end_s,
            "kind": kind,
            "engine": rng.randrange(num_engines),
        }
        if kind == "slow":
            event["factor"] = rng.choice([0.5, 2.0, 3.7])
        elif kind == "die":
            event["requests"] = rng.choice(["retry", "lose"])
        found.append(event)
    return found


def _autoscaler(rng: Random, pool: dict[str, Any], end_s: float) -> dict[str, Any]:
    target = rng.choice(["requests_in_flight", "waiting_requests", "kv_cache_usage"])
    return {
        "pool": pool["name"],
        "targets": {target: 0.5 if target == "kv_cache_usage" else rng.choice([1, 3])},
        "min_replicas": rng.choice([0, 1]) and pool["replicas"],
        "max_replicas": pool["replicas"] + rng.choice([1, 3]),
        "start_s": end_s * rng.choice([0.01, 0.1]),
        "interval_s": max(end_s * rng.choice([0.01, 0.05]), 1.0),
    }
