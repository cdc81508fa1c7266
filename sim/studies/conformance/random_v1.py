"""Random decision workloads for V1: short of blocks most of the time.

Every workload can be served: no request is longer than the pool, and the settings fit
together as vLLM wants them to.
"""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

from sim.scheduler.v1.dialect import dialect_of
from sim.studies.conformance.workload import DecisionWorkload, parse_workload

if TYPE_CHECKING:
    from sim.scheduler.v1.dialect import V1Dialect

MOST_REQUESTS = 16
MOST_BLOCKS = 40

ABORTED_SHARE = 0.3
_SPREADS = (0, 0, 2, 10, 40)
"""Steps over which requests arrive; all at once in two of five."""


def random_workload(
    seed: int,
    release: str,
    *,
    async_scheduling: bool = False,
    speculative: bool = False,
) -> DecisionWorkload:
    """Return the workload of a seed, for an engine of a release.

    With asynchronous scheduling or drafts it is the same but for outputs that end
    early, and limits that leave room for drafts.
    """
    draw = Random(f"conform {seed}")
    config = random_config(draw, dialect_of(release))
    requests = random_requests(draw, config)
    if draw.random() < ABORTED_SHARE:
        withdraw_some(draw, requests)
    name = f"seed {seed}"
    if async_scheduling:
        config["async_scheduling"] = True
        name += ", asynchronous"
    if speculative:
        drafts = Random(f"drafts {seed}")
        config |= with_drafts(drafts, config)
        accept_some(drafts, requests)
        name += ", speculative"
    if async_scheduling or speculative:
        stop_some(Random(f"stops {seed}"), requests)
    return as_workload(name, release, config, requests)


def as_workload(
    name: str,
    release: str,
    config: dict[str, Any],
    requests: list[dict[str, Any]],
    kv: dict[str, Any] | None = None,
    *,
    engine: str = "vllm",
) -> DecisionWorkload:
    """Return a workload as if it were read from a file."""
    raw = {
        "schema": 1,
        "name": name,
        "reference": f"{engine} {release}",
        "config": config,
        "kv": kv,
        "requests": requests,
    }
    return parse_workload(json.dumps(raw), name)


def random_config(draw: Random, dialect: V1Dialect) -> dict[str, Any]:
    """Return an engine of a release; its longest request fits the pool."""
    block_size = draw.choice((1, 2, 4, 4, 8, 16))
    num_gpu_blocks = draw.randint(4, draw.choice((12, MOST_BLOCKS)))
    longest = (num_gpu_blocks - 1) * block_size
    max_model_len = draw.randint(max(2, longest // 2), max(2, longest))
    chunked = draw.random() < 0.8
    max_num_seqs = draw.choice((1, 3, 4, 8, 8, 16, 16))
    least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    budget = max(least, draw.choice((4, 8, 16, 32, 64, 256, max_model_len)))
    config = {
        "block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "chunked_prefill": chunked,
        "enable_prefix_caching": draw.random() < 0.6,
        "policy": draw.choice(("fcfs", "priority")),
        "long_prefill_token_threshold": draw.choice(
            (
                0,
                0,
                draw.randint(1, max_model_len),
                draw.randint(1, min(8, max_model_len)),
            )
        ),
    }
    if draw.random() < 0.15:
        config["sliding_window"] = draw.randint(2, max(2, max_model_len))
    return config | later_keys(draw, dialect, config)


def later_keys(
    draw: Random, dialect: V1Dialect, config: dict[str, Any]
) -> dict[str, Any]:
    """Return keys that the release has; all are drawn, so that seeds mean the same."""
    drawn = {
        "watermark": draw.choice((0.0, 0.0, 0.02, 0.1, 0.3)),
        "scheduler_reserve_full_isl": draw.random() < 0.4,
        "long_prefill_token_threshold_adaptive": draw.random() < 0.5,
        "max_num_active_seqs": draw.choice(
            (None, None, draw.randint(1, config["max_num_seqs"]))
        ),
        "prefill_schedule_interval": draw.choice((1, 1, 2, 3, 6)),
        "max_num_scheduled_tokens": draw.choice(
            (None, None, draw.randint(1, config["max_num_batched_tokens"]))
        ),
    }
    if not config["chunked_prefill"]:
        # A budget below the longest prompt would block the queue for good.
        drawn["max_num_scheduled_tokens"] = None
    return {
        key: value
        for key, value in drawn.items()
        if value is not None and dialect.has_key(key)
    }


def random_requests(
    draw: Random, config: dict[str, Any], most: int = MOST_REQUESTS
) -> list[dict[str, Any]]:
    """Return requests, at most `most`, that the engine can serve; some share text."""
    num_requests = draw.randint(2, most)
    spread = draw.choice(_SPREADS)
    steps = sorted(draw.randint(0, spread) for _ in range(num_requests))
    requests: list[dict[str, Any]] = []
    for index, step in enumerate(steps):
        longest = max(1, config["max_model_len"] // draw.choice((1, 2, 3, 4, 8)))
        prompt = _prompt(draw, requests, draw.randint(1, longest))
        length = sum(num_tokens for _, num_tokens in prompt)
        room = config["max_model_len"] - length
        output_len = draw.randint(1, draw.choice((4, 20, 60, 60)))
        if draw.random() < 0.9:  # else it is cut at max_model_len
            output_len = min(output_len, max(1, room))
        request = {
            "id": f"r{index}",
            "arrival_step": step,
            "prompt": prompt,
            "output_len": output_len,
            # Equal prompts with equal answers share what both compute.
            "out_seed": draw.choice((7, 1000 + index)),
        }
        if config["policy"] == "priority":
            request["priority"] = draw.choice((0, 0, 1, 2, 5))
        requests.append(request)
    return requests


def _prompt(draw: Random, earlier: list[dict[str, Any]], most: int) -> list[list[int]]:
    """Return a prompt of up to `most` tokens: new, shared, or a conversation's."""
    kind = draw.random()
    if earlier and kind < 0.25:
        before = draw.choice(earlier)
        answer = [before["out_seed"], draw.randint(1, before["output_len"])]
        return cut([*before["prompt"], answer, [draw.randint(100, 999), most]], most)
    if kind < 0.6:
        shared = [draw.choice((1, 2)), draw.randint(1, most)]
        return cut([shared, [draw.randint(100, 999), most]], most)
    return [[draw.randint(100, 999), most]]


def cut(prompt: list[list[int]], most: int) -> list[list[int]]:
    """Return the first `most` tokens of a prompt."""
    cut: list[list[int]] = []
    for seed, num_tokens in prompt:
        if taken := min(num_tokens, most):
            cut.append([seed, taken])
        most -= taken
    return cut


def withdraw_some(draw: Random, requests: list[dict[str, Any]]) -> None:
    """Let some requests be aborted, wherever they stand by then."""
    for request in requests:
        if draw.random() < 0.3:
            request["abort_step"] = request["arrival_step"] + draw.randint(0, 30)


def with_drafts(draw: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Return keys of a configuration with drafts; its other limits leave room for them.

    Parameters
    ----------
    draw
        Of drafts only.
    config
        The same without them.
    """
    methods = ["eagle", "eagle3", "mtp", "draft_model"]
    methods += ["ngram"] if config.get("async_scheduling") else ["ngram"] * 3
    num_tokens = draw.choice((1, 1, 2, 3, 3, 5, 8))
    drafts: dict[str, Any] = {
        "method": draw.choice(methods),
        "num_speculative_tokens": num_tokens,
    }
    flag = draw.choice((None, None, None, "eagle_block_drop", "lookahead_block_hashes"))
    if flag:
        drafts[f"disable_{flag}"] = True
    keys: dict[str, Any] = {"speculative": drafts}
    return keys | room_for_drafts(config | keys)


def room_for_drafts(config: dict[str, Any]) -> dict[str, int]:
    """Return limits of a configuration that would be too small for its drafts."""
    if "speculative" not in config:
        return {}
    num_tokens, keys = config["speculative"]["num_speculative_tokens"], {}
    for key in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        if config.get(key) is not None:
            keys[key] = max(config[key], num_tokens + 2)
    if threshold := config.get("long_prefill_token_threshold"):
        least, most = num_tokens + 1, config.get("max_model_len", num_tokens + 1)
        threshold = max(threshold, least) if least <= most else 0
        keys["long_prefill_token_threshold"] = threshold
    return keys


def accept_some(draw: Random, requests: list[dict[str, Any]]) -> None:
    """Let drafts of each request be right, and be found, in a share of cases."""
    for request in requests:
        request["acc_seed"] = draw.randint(0, 1 << 20)
        request["acc_pct"] = draw.choice((0, 30, 60, 80, 95, 100))
        request["draft_pct"] = draw.choice((0, 50, 80, 100, 100))


def stop_some(draw: Random, requests: list[dict[str, Any]]) -> None:
    """Let some outputs end with a stop token, which no scheduler can foresee."""
    for request in requests:
        if draw.random() < 0.4:
            request["stop_after"] = draw.randint(1, request["output_len"])
