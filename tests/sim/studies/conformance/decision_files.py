"""Small decision workloads, made here, for tests of `kvsim decisions`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sim.studies.conformance import DecisionDriver
from sim.studies.conformance.workload import parse_workload

if TYPE_CHECKING:
    from pathlib import Path

COMMON: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks": 6,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}
TWO_TIERS = COMMON | {"num_cpu_blocks": 6, "watermark": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "0.1.0": TWO_TIERS,
    "0.2.7": TWO_TIERS | {"max_model_len": 64},
    "0.7.3": TWO_TIERS | {"max_model_len": 64},
    "0.8.5": COMMON | {"max_model_len": 64},
    "0.11.2": COMMON | {"max_model_len": 64},
    "0.12.0": COMMON | {"max_model_len": 64},
    "0.24.0": COMMON | {"max_model_len": 64},
    "0.31.0": COMMON | {"max_model_len": 64},
    "0.33.0": COMMON | {"max_model_len": 64},
}


def request(name: str, num_prompt_tokens: int, output_len: int, **more: Any) -> Any:
    """A request that arrives at step 0 with a prompt of its own."""
    seed = sum(map(ord, name))
    return {
        "id": name,
        "arrival_step": 0,
        "prompt": [[2 * seed, num_prompt_tokens]],
        "output_len": output_len,
        "out_seed": 2 * seed + 1,
    } | more


def workload(release: str, requests: list[Any], **config: Any) -> dict[str, Any]:
    """A workload of 6 blocks of 4 tokens (and 6 on the CPU), unless said otherwise."""
    return {
        "schema": 1,
        "name": "small",
        "reference": f"vllm {release}",
        "seed": 1,
        "config": CONFIGS[release] | config,
        "requests": requests,
    }


def decide(data: dict[str, Any], *, check: bool = True) -> list[dict[str, Any]]:
    """The log of a workload, invariants proved at every step."""
    parsed = parse_workload(json.dumps(data), "workload.json")
    return list(DecisionDriver(parsed, check=check).lines())


def write_workload(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def column(lines: list[dict[str, Any]], field: str) -> list[Any]:
    """One field of every line; None where it is absent."""
    return [line.get(field) for line in lines]
