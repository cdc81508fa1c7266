"""Random small configurations, by seed, that lead into every regime quickly."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from cache.v1.policies import CACHE_POLICIES
from sim.config.tables import RunConfig, parse_config
from sim.scheduler.v1.dialect import KEYS_SINCE
from sim.scheduler.victims import VICTIMS
from tests.identity.compare import ONLY_THE_END, Look, of_one_group, run
from tests.identity.measured_profile import measured_profile
from tests.identity.random_requests import Request, draw_requests

if TYPE_CHECKING:
    from collections.abc import Callable

LISTED_TRACE = f"{Path(__file__).with_name('listed_trace.py')}:ListedTrace"

_VERSIONS = ("0.8", "0.11", "0.12", "0.20", "0.22", "0.24", "0.31", "0.32", "0.33")

# No launches, those of a slow host, and some that most steps wait for.
_LAUNCHES_S = (0.0, 95e-6, 3e-4)

# A case is to take milliseconds.
_MOST_BLOCKS = 800
_MOST_STEPS = 800


class Case(NamedTuple):
    """A configuration, and how closely to watch it."""

    config: RunConfig
    look: Look


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    rng = Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 4, 8, 8, 16, 16, 32, 64])
    cost, step_s = _cost(rng)
    requests = draw_requests(rng, block_size, step_s)
    engine = _engine(rng, block_size, requests)
    workload = _workload(rng, requests, step_s)
    _add_rarer_keys(rng, engine, workload)
    _drop_unknown_keys(engine)
    if cost["kind"] == "roofline":
        cost["launch_s"] = _LAUNCHES_S[seed % len(_LAUNCHES_S)]
        # the windows of layers are drawn, and no profile has tables of each
        if seed % 2 and "sliding_window" not in engine:
            profile = measured_profile(engine["model"])
            cost |= {"kind": "measured", "profile": profile}
    data = {"workload": workload, "engine": engine, "cost": cost, "seed": seed}
    config = parse_config(data)
    is_open = "trace" in workload and not any("delay_s" in r for r in requests)
    if is_open and cost["kind"] != "constant" and rng.random() < 0.3:
        _meet_a_step_end(rng, config, requests)
        config = parse_config(data)
    every_steps = rng.choice([0, 0, 0, 0, 0, 0, 1, 7, 7, 50])
    told = rng.random() < 0.3
    aborts = _draw_aborts(rng, requests, step_s) if rng.random() < 0.15 else ()
    return Case(config, Look(every_steps, told, aborts))


def draw_plain_case(seed: int) -> Case:
    """Return the case of a seed where ids of blocks matter to no rule.

    Every other one schedules ahead.
    """
    config, look = draw_case(seed)
    ahead = {"engine_version": "0.33", "speculative_config": None} if seed % 2 else {}
    plain = {
        **dict.fromkeys(
            ("preemption_victim", "admission", "evictor", "sliding_window")
        ),
        "enable_prefix_caching": False,
        "scheduling_policy": "fcfs",
        "async_scheduling": bool(ahead),
        **ahead,
    }
    engine = config.engine.model_copy(update=plain)
    return Case(config.model_copy(update={"engine": engine}), look)


def _meet_a_step_end(rng: Random, config: RunConfig, requests: list[Request]) -> None:
    """Let a request arrive when a step ends, to the last bit or one bit beside.

    What arrives later changes nothing before, so the step is there to be met.
    """
    steps = run(config, ONLY_THE_END, of_one_group).tables.get("steps")
    if steps is None:
        return
    end_s = (steps["start_s"] + steps["latency_s"]).to_numpy()
    index = rng.randrange(len(requests))
    earliest_s = requests[index - 1]["at"] if index else 0.0
    met = end_s[(end_s > earliest_s) & (end_s < requests[index]["at"])]
    if len(met):
        towards = rng.choice([0.0, met[-1], met[-1], met[-1], math.inf])
        requests[index]["at"] = math.nextafter(met[-1], towards)


def _cost(rng: Random) -> tuple[dict[str, Any], float]:
    """Return a cost model, and about how long its steps are in seconds."""
    step_s = rng.choice([1.0, 0.5, 0.1, 0.013])
    kind = rng.choice(["constant", "constant", "linear", "linear", "roofline"])
    if kind == "constant":
        return {"kind": kind, "step_s": step_s}, step_s
    if kind == "roofline":
        return {"kind": kind}, 0.006
    return {
        "kind": kind,
        "base_s": step_s,
        "decode_s": step_s * rng.choice([0.0, 0.03125, 0.01]),
        "prefill_token_s": step_s * rng.choice([0.0, 0.015625, 0.003]),
        "decode_context_token_s": step_s * rng.choice([0.0, 0.0009765625, 0.0007]),
        "prefill_context_token_s": step_s * rng.choice([0.0, 0.0001]),
        "prefill_attention_pair_s": step_s * rng.choice([0.0, 0.00001]),
    }, step_s


def _engine(rng: Random, block_size: int, requests: list[Request]) -> dict[str, Any]:
    longest = max(_num_tokens(request) for request in requests)
    num_blocks = -(-longest // block_size)
    roominess = rng.choice([1.0, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 15.0, 60.0])
    if rng.random() < 0.08:
        roominess = 0.7  # some are rejected, or cut
    num_gpu_blocks = round(num_blocks * roominess)
    if num_gpu_blocks > _MOST_BLOCKS:
        num_gpu_blocks = max(num_blocks, _MOST_BLOCKS)
    max_num_seqs = rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 16, 32, 32])
    spare = rng.choice([0, 1, 5, 20, 60, 200, 2000])
    total = sum(_num_tokens(request) for request in requests)
    budget = max_num_seqs + max(spare, total // _MOST_STEPS)
    engine: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "block_size": block_size,
        "num_gpu_blocks_override": max(2, 1 + num_gpu_blocks),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": rng.random() < 0.7,
        "async_scheduling": False,
    }
    if rng.random() < 0.6:
        engine["engine_version"] = rng.choice(_VERSIONS)
    if rng.random() < 0.15:
        engine["max_model_len"] = max(2, round(longest * rng.choice([0.7, 1.0, 1.3])))
    if rng.random() < 0.08:
        engine["admission_check"] = False
    return engine | _admission_keys(rng, max_num_seqs, budget)


def _admission_keys(rng: Random, max_num_seqs: int, budget: int) -> dict[str, Any]:
    """Keys that some releases lack and that the fast path knows."""
    keys: dict[str, Any] = {}
    if rng.random() < 0.3:
        keys["watermark"] = rng.choice([0.01, 0.05, 0.2, 0.5])
    if rng.random() < 0.4:
        keys["scheduler_reserve_full_isl"] = rng.random() < 0.4
    if rng.random() < 0.1:
        keys["preemption_victim"] = "latest_arrival"
    if rng.random() < 0.2:
        share = rng.choice([0.01, 0.2])
        keys["admission"] = rng.choice(
            ["full_prompt", {"kind": "watermark", "share": share}]
        )
    if rng.random() < 0.1:
        keys["max_num_active_seqs"] = rng.randint(1, max_num_seqs)
    if rng.random() < 0.1:
        low = max_num_seqs if rng.random() < 0.7 else 1
        keys["max_num_scheduled_tokens"] = rng.randint(low, budget)
    return keys


def _drop_unknown_keys(engine: dict[str, Any]) -> None:
    """Leave out keys that the release does not have."""
    minor = int(engine.get("engine_version", "0.33").partition(".")[2])
    for key, since in KEYS_SINCE.items():
        if minor < since:
            engine.pop(key, None)
    if minor < 11:
        engine.pop("enable_chunked_prefill", None)
        engine.pop("scheduling_policy", None)


def _num_tokens(request: Request) -> int:
    prompt: list[list[int]] = request["prompt"]
    return sum(length for _, length in prompt) + int(request["out"])


def _workload(rng: Random, requests: list[Request], step_s: float) -> dict[str, Any]:
    if rng.random() < 0.08:
        most = max(_num_tokens(request) for request in requests)
        return {
            "synthetic": {
                "num_requests": len(requests),
                "arrivals": {
                    "kind": "poisson",
                    "rate": rng.choice([0.2, 1.0]) / step_s,
                },
                "prompt_tokens": {"kind": "uniform", "low": 1, "high": most // 2 + 1},
                "output_tokens": {"kind": "uniform", "low": 1, "high": 20},
            }
        }
    workload: dict[str, Any] = {"trace": {"kind": LISTED_TRACE, "requests": requests}}
    if rng.random() < 0.12:
        workload["best_of"] = rng.choice([2, {1: 0.7, 3: 0.3}])
    if rng.random() < 0.08:
        workload["max_concurrent_users"] = rng.choice([1, 2, 5, 20])
    return workload


def _add_rarer_keys(
    rng: Random, engine: dict[str, Any], workload: dict[str, Any]
) -> None:
    """Ask for rules that look at more than the decodes that need a block."""
    budget = engine["max_num_batched_tokens"]
    longest = engine["num_gpu_blocks_override"] * engine["block_size"]
    unchunked = {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": budget + longest,
    }
    draws: dict[float, Callable[[], dict[str, Any]]] = {
        0.1: lambda: {"sliding_window": rng.randint(1, 60)},
        0.15: lambda: {"scheduling_policy": "priority"},
        0.09: lambda: {"prefill_schedule_interval": rng.randint(2, 5)},
        0.2: lambda: {"long_prefill_token_threshold": rng.randint(1, budget)},
        0.08: lambda: unchunked,
        0.16: lambda: {"preemption_victim": rng.choice(list(VICTIMS))},
        0.12: lambda: {"admission": _learned_rule(rng)},
        0.11: lambda: {"evictor": rng.choice(list(CACHE_POLICIES))},
    }
    for share, draw in draws.items():
        if rng.random() < share:
            engine |= draw()
    if "long_prefill_token_threshold" in engine and rng.random() < 0.3:
        engine["long_prefill_token_threshold_adaptive"] = True
    if "enable_chunked_prefill" in engine:
        engine.pop("max_num_scheduled_tokens", None)
        if rng.random() < 0.3:
            engine["max_num_scheduled_tokens"] = budget
            threshold = rng.randint(1, budget)
            engine["long_prefill_token_threshold"] = threshold
    elif rng.random() < 0.1:
        most = engine["max_num_seqs"]
        engine["max_num_scheduled_tokens"] = rng.randint(1, most)
    if "scheduling_policy" in engine or "preemption_victim" in engine:
        workload["priority"] = rng.choice([{0: 0.5, 1: 0.5}, {0: 0.2, 3: 0.5, 9: 0.3}])
    if engine.get("evictor") and not engine["enable_prefix_caching"]:
        engine["enable_prefix_caching"] = True
    if rng.random() < 0.02:
        workload["beam_width"] = {1: 0.9, 3: 0.1}
    if rng.random() < 0.4:
        _schedule_ahead(rng, engine, workload)


def _schedule_ahead(
    rng: Random, engine: dict[str, Any], workload: dict[str, Any]
) -> None:
    """Form steps while the ones before run, mostly with what that is known of."""
    engine |= {"engine_version": rng.choice(["0.33", "0.33", "0.33", "0.31", "0.28"])}
    engine["async_scheduling"] = True
    ends = ["stop", "length", {"stop": 0.5, "length": 0.5}]
    workload["output_end"] = rng.choice(ends)
    if rng.random() < 0.8:
        engine.pop("prefill_schedule_interval", None)


def _learned_rule(rng: Random) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "kind": rng.choice(["conservative", "past_future"]),
        "conservativeness": rng.choice([0.3, 1.0, 1, 2.5]),
    }
    if rng.random() < 0.3:
        rule["output_tokens"] = {"kind": "uniform", "low": 1, "high": 50}
    else:
        rule["window"] = rng.choice([5, 20, 1000])
        rule["min_known"] = rng.choice([1, 3, 5])
    return rule


def _draw_aborts(
    rng: Random, requests: list[Request], step_s: float
) -> tuple[tuple[float, int], ...]:
    """Return when clients withdraw which requests; the bits of a time are its own."""
    return tuple(
        sorted(
            (request["at"] + step_s * 30 * rng.random(), index)
            for index, request in enumerate(requests)
            if rng.random() < 0.15
        )
    )
