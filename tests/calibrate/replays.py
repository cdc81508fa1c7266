"""Small schedules of every generation, on the disk, for tests of replays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from calibrate.replay.compare import Timing
from calibrate.replay.log import Facts, Schedule
from calibrate.replay.tokens import WorkloadTexts
from sim.simulation.workload import make_workload
from tests.sim.recordings import lines_of, listed, record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from calibrate.replay.log import Step
    from sim.config.tables import RunConfig

REQUESTS = [
    (0, [[7, 9]], 14),
    (0, [[7, 8], [8, 5]], 12),
    (2, [[7, 8], [9, 3]], 9),
    (3, [[5, 17]], 15),
    (5, [[7, 9]], 10),
]
"""Arrival, prompt and answer: prefixes are shared, and memory is short."""
HF_BLOCK_GIB = 2.0**-11
"""Of four tokens, of Llama-3.1-8B."""
MODES = [
    ("cacheflow", {"preemption_mode": "swap"}, 2),
    ("cacheflow", {"preemption_mode": "recompute"}, 1),
    ("v0_2", {"preemption_mode": "swap"}, 2),
    ("v0_2", {"preemption_mode": "recompute"}, 1),
    ("v0", {"preemption_mode": "swap"}, 2),
    ("v0", {"preemption_mode": "swap", "enable_prefix_caching": True}, 2),
    ("v0", {"preemption_mode": "recompute", "enable_prefix_caching": True}, 1),
    ("v0", {"enable_chunked_prefill": True, "max_num_batched_tokens": 8}, 1),
    ("v1", {"enable_prefix_caching": False}, 1),
    ("v1", {"enable_prefix_caching": True}, 1),
    ("v1", {"enable_prefix_caching": True, "max_num_batched_tokens": 8}, 2),
    ("hf_fifo", {"swap_space": 8 * HF_BLOCK_GIB, "safety_margin": 0}, 1),
    ("hf_fifo", {"swap_space": 0, "enable_prefix_caching": False}, 1),
]
"""Generation, engine keys, and samples of every other request."""


def small_run(generation: str, keys: dict[str, Any], samples: int) -> RunConfig:
    """Five requests that do not fit together."""
    requests = [
        {"at": float(at), "prompt": prompt, "out": out, "seg": 100 + index}
        | {"max_tokens": out, "best_of": samples if index % 2 else 1}
        for index, (at, prompt, out) in enumerate(REQUESTS)
    ]
    engine = {"num_gpu_blocks_override": 9 if generation == "v1" else 16}
    if generation == "hf_fifo":
        engine["num_gpu_blocks_override"] = 10
    elif generation != "v1":
        engine["watermark"] = 0
    return listed(
        requests, scheduler=generation, admission_check=False, **engine | keys
    )


def texts_of(config: RunConfig) -> WorkloadTexts:
    """Return the texts of a small run; the engine numbers samples as they come."""
    specs = make_workload(config.workload, config.seed).requests()
    groups = config.engine.scheduler_kind not in {"v1", "hf_fifo"}
    numbered = [spec for spec in specs for _ in range(1 if groups else spec.best_of)]
    return WorkloadTexts({str(place): spec for place, spec in enumerate(numbered)})


def written(
    config: RunConfig,
    folder: Path,
    spoil: Callable[[list[dict[str, Any]]], None] | None = None,
) -> Schedule:
    """The schedule of a run, changed by `spoil` before it is read."""
    header, lines = lines_of(record(config, stepwise=True).schedule)
    if spoil is not None:
        spoil(lines)
    path = folder / "schedule.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    return Schedule(path)


def facts(**changes: Any) -> Facts:
    """Of a schedule of Llama-3.1-8B on one GPU."""
    known: dict[str, Any] = {
        "scheduler": "v1",
        "engine_version": "0.33",
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "tensor_parallel_size": 1,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "num_gpu_blocks": 20_000,
        "num_cpu_blocks": 0,
        "max_model_len": 8192,
    }
    return Facts(**known | changes)


class SeemingExecutor:
    """Takes as long as a function of the step says."""

    def __init__(self, device_s: Callable[[Step], float], host_s: float = 0.0) -> None:
        self.variants = {"graphs": "decodes", "decode_attention": "split_kv"}
        self.device_s = device_s
        self.host_s = host_s
        self.worst_graph_error = 0.0
        self.executed: list[int] = []

    def time(self, step: Step, repeats: int) -> Timing:
        """Look a step up."""
        assert repeats >= 1
        self.executed.append(step.number)
        device_s = self.device_s(step)
        return Timing(device_s + self.host_s, device_s, 0.0)
