"""Random small configurations of generations that schedule sequence groups."""

from __future__ import annotations

from random import Random
from typing import Any

from sim.config.tables import parse_config
from tests.identity.random_configs import Case, draw_case

_KEPT = (
    "model",
    "gpu",
    "block_size",
    "num_gpu_blocks_override",
    "max_num_seqs",
    "max_model_len",
    "admission_check",
    "watermark",
    "preemption_victim",
)


def draw_sequence_case(seed: int) -> Case:
    """Return `draw_case` of a seed for another generation."""
    config, look = draw_case(seed)
    rng = Random(f"sequences {seed}")
    drawn = config.engine.model_dump(exclude_unset=True)
    engine = {key: drawn[key] for key in _KEPT if key in drawn}
    engine["scheduler"] = scheduler = rng.choice(["cacheflow", "v0_2", "v0", "v0"])
    longest = engine["num_gpu_blocks_override"] * engine["block_size"]
    engine["max_num_batched_tokens"] = longest + rng.choice([0, 10, 2000])
    engine["num_gpu_blocks_override"] += rng.choice([1, 2, 5])
    if rng.random() < 0.5:
        engine["preemption_mode"] = rng.choice(["swap", "recompute"])
    engine["swap_space"] = rng.choice([0.002, 0.02, 0.2, 1])
    if scheduler == "v0":
        engine |= _keys_of_v0(rng, engine)
    elif scheduler == "v0_2" and rng.random() < 0.2:
        engine["sliding_window"] = engine["block_size"] * rng.randint(1, 4)
    if scheduler == "v0_2":
        engine["max_paddings"] = rng.choice([5, 256, 2000])
    data = config.model_dump(exclude_unset=True) | {"engine": engine}
    workload = data["workload"]
    if scheduler != "v0":
        workload.pop("priority", None)
        if engine.get("preemption_victim") == "lowest_priority":
            del engine["preemption_victim"]
    if rng.random() < 0.3:
        workload["best_of"] = {1: 0.9, rng.choice([2, 3]): 0.1}
        if rng.random() < 0.5:
            workload["beam_width"] = {1: 0.9, 2: 0.1}
            workload.pop("best_of")
    if data["cost"]["kind"] == "measured":
        data["cost"] = {"kind": "roofline"}
    return Case(parse_config(data), look)


def _keys_of_v0(rng: Random, engine: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if rng.random() < 0.4:
        keys["enable_chunked_prefill"] = True
        keys["max_num_batched_tokens"] = engine["max_num_seqs"] + rng.choice(
            [0, 1, 10, 50, 2000]
        )
        if rng.random() < 0.3:
            keys["max_num_partial_prefills"] = rng.randint(2, 4)
    draws: dict[str, Any] = {
        "scheduling_policy": "priority",
        "scheduler_delay_factor": rng.choice([0.5, 1.0, 3.0]),
        "num_lookahead_slots": rng.randint(1, 5),
        "enable_prefix_caching": True,
    }
    return keys | {key: draws[key] for key in draws if rng.random() < 0.15}
