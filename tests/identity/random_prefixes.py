"""Random configurations of requests that share a beginning, which steps read once."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from tests.identity.compare import Look
from tests.identity.random_configs import LISTED_TRACE, Case

if TYPE_CHECKING:
    from tests.identity.random_requests import Request

_MODELS = (
    "meta-llama/Llama-3.1-8B",
    "Llama-2-7b-hf",  # as many KV heads as query heads
)
_GPUS = ("h200_sxm", "a100_sxm", "rtx_pro_6000_server")


def draw_prefix_case(seed: int) -> Case:
    """Return the case of a seed.

    A request begins as all others do, or so far, or not at all; prompts may quote what
    others answer, block by block, while these are still at it.
    """
    rng = Random(seed)
    block_size = rng.choice([8, 16, 16, 32])
    requests = _requests(rng, block_size)
    minor = rng.choice([8, 9, 11, 11, 12, 13, 14, 15, 16, 17, 18, 24, 31])
    patch = rng.choice(["", ".2"])
    is_ahead = minor >= 14 and rng.random() < 0.7
    longest = max(_num_tokens(each) for each in requests)
    num_blocks = -(-longest // block_size)
    engine: dict[str, Any] = {
        "model": rng.choice(_MODELS),
        "gpu": rng.choice(_GPUS),
        "engine_version": f"0.{minor}{patch}",
        "block_size": block_size,
        "num_gpu_blocks_override": 1 + round(num_blocks * rng.choice([1.2, 3, 9, 60])),
        "max_num_seqs": rng.choice([8, 16, 32, 64]),
        "max_num_batched_tokens": rng.choice([128, 300, 2048]),
        "enable_prefix_caching": True,
        "async_scheduling": is_ahead,
        "max_model_len": longest + 1,
    }
    if minor >= 18 or rng.random() < 0.1:
        engine["disable_cascade_attn"] = rng.random() < 0.1
    if rng.random() < 0.2:
        engine["cudagraph_capture_sizes"] = "release"
    if minor >= 11 and not is_ahead and rng.random() < 0.15:
        engine["scheduling_policy"] = "priority"
    workload: dict[str, Any] = {"trace": {"kind": LISTED_TRACE, "requests": requests}}
    if rng.random() < 0.2:
        workload["max_concurrent_users"] = rng.choice([8, 9, 20])
    cost = {"kind": "roofline", "launch_s": rng.choice([0.0, None, 95e-6, 3e-4])}
    data = {"workload": workload, "engine": engine, "cost": cost, "seed": seed}
    look = Look(rng.choice([0, 0, 0, 1, 7]), rng.random() < 0.2)
    return Case(parse_config(data), look)


def _requests(rng: Random, block_size: int) -> list[Request]:
    stem = rng.choice([256, 256 + block_size, 400, 700])
    alike = rng.choice([0.9, 0.98, 1.0, 1.0])
    gap_s = rng.choice([0.0, 0.0, 1e-3, 0.01, 0.05])
    longest = rng.choice([5, 60, 60, 150])
    requests: list[Request] = []
    at_s = 0.0
    for index in range(rng.randint(10, 60)):
        prompt = [[0, stem]]
        if rng.random() >= alike:
            prompt = [[rng.choice([0, 2]), rng.randint(1, stem)]]
        if requests and rng.random() < 0.1:
            other = rng.choice(requests[-12:])
            prompt = [*other["prompt"], [other["seg"], other["out"]]]
        if rng.random() < 0.7:
            prompt.append([2 * (100 + index), rng.randint(1, 3 * block_size)])
        requests.append(
            {
                "at": at_s,
                "prompt": prompt,
                "out": rng.randint(1, longest),
                "seg": 2 * index + 1,
            }
        )
        at_s += rng.expovariate(1.0 / gap_s) if gap_s else 0.0
    return requests


def _num_tokens(request: Request) -> int:
    return sum(length for _, length in request["prompt"]) + int(request["out"])
