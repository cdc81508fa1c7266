"""The measured runs that are published, as configurations."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from tests.shared import shared

if TYPE_CHECKING:
    from pathlib import Path

    from sim.config.tables import RunConfig

RTX = "ground_truth/llmservingsim_bench_vllm0190/RTXPRO6000_Llama-3.1-8B"
"""vLLM 0.19.0, Llama-3.1-8B, one RTX PRO 6000, 300 ShareGPT requests, 10 a second."""
CLOSED_LOOP = "ground_truth/aiconfigurator_silicon_closed_loop/vllm_agg.csv"
"""vLLM 0.12.0, Qwen3-32B, four H100 SXM, users that ask again at once."""


def rtx_config(cost: dict[str, Any] | None = None) -> RunConfig:
    """The engine of the open-loop run, with the arguments that were recorded."""
    trace = {
        "kind": "mooncake",
        "path": str(shared(f"{RTX}/trace_block16.jsonl")),
        "block_tokens": 16,
        "full_blocks_only": True,
    }
    engine = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "rtx_pro_6000_server",
        "engine_version": "0.19",
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
    }
    data: dict[str, Any] = {"workload": {"trace": trace}, "engine": engine}
    return parse_config(data | ({} if cost is None else {"cost": cost}))


@dataclass(frozen=True, slots=True)
class ClosedLoopPoint:
    """One published point: so many users, each asking again when it has its answer."""

    num_users: int
    num_prompt_tokens: int
    num_output_tokens: int
    tensor_parallel_size: int
    mean_tpot_ms: float
    mean_ttft_ms: float

    def config(self, cost: dict[str, Any]) -> RunConfig:
        """Ten requests a user; the engine's arguments are the release's defaults.

        Neither the arguments nor the number of prompts were published; prefix caching
        is off, as random prompts share nothing.
        """
        synthetic = {
            "num_requests": 10 * self.num_users,
            "arrivals": {"kind": "poisson", "rate": 1e6},
            "prompt_tokens": {"kind": "fixed", "tokens": self.num_prompt_tokens},
            "output_tokens": {"kind": "fixed", "tokens": self.num_output_tokens},
        }
        data = {
            "workload": {
                "synthetic": synthetic,
                "max_concurrent_users": self.num_users,
            },
            "engine": {
                "model": "Qwen/Qwen3-32B",
                "gpu": "h100_sxm",
                "tensor_parallel_size": self.tensor_parallel_size,
                "engine_version": "0.12",
                "enable_prefix_caching": False,
            },
            "cost": cost,
        }
        return parse_config(data)


def closed_loop_points() -> list[ClosedLoopPoint]:
    """Every published point."""
    return _points(shared(CLOSED_LOOP))


def _points(path: Path) -> list[ClosedLoopPoint]:
    with path.open(encoding="utf-8", newline="") as file:
        return [
            ClosedLoopPoint(
                num_users=int(float(row["silicon_concurrency"])),
                num_prompt_tokens=int(row["isl"]),
                num_output_tokens=int(row["osl"]),
                tensor_parallel_size=int(float(row["tp_size"])),
                mean_tpot_ms=float(row["silicon_tpot_ms"]),
                mean_ttft_ms=float(row["silicon_ttft_ms"]),
            )
            for row in csv.DictReader(file)
        ]
