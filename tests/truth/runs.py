"""The measured runs that are published, as configurations."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.config.tables import parse_config
from tests.shared import shared

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sim.config.tables import RunConfig
    from sim.results.run import Results

NOTHING: Mapping[str, Any] = MappingProxyType({})
RTX = "ground_truth/llmservingsim_bench_vllm0190/RTXPRO6000_Llama-3.1-8B"
"""vLLM 0.19.0, Llama-3.1-8B, one RTX PRO 6000, 300 ShareGPT requests, 10 a second."""
CLOSED_LOOP = "ground_truth/aiconfigurator_silicon_closed_loop/vllm_agg.csv"
"""vLLM 0.12.0, Qwen3-32B, four H100 SXM, users that ask again at once."""


def rtx_config(
    cost: dict[str, Any] | None = None,
    *,
    async_scheduling: bool | None = None,
    more: Mapping[str, Any] = NOTHING,
) -> RunConfig:
    """The engine of the open-loop run, with the arguments that were recorded.

    It schedules ahead, as this release does unless told otherwise; `more` are further
    arguments of the engine.
    """
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
        "async_scheduling": async_scheduling,
    } | dict(more)
    workload = {"trace": trace, "output_end": "length"}
    data: dict[str, Any] = {"workload": workload, "engine": engine}
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

    def config(
        self, cost: dict[str, Any], more: Mapping[str, Any] = NOTHING
    ) -> RunConfig:
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
            }
            | dict(more),
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


CODE_LLAMA_34B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The published ``config.json`` of CodeLlama-34b, as far as it counts."""
_SHARE: float = 0.1
"""Of each stage so much is simulated: arrivals are even over all of it."""
_NUM_COLD: int = 100
"""Requests whose prompts are not in the cache yet: the first of each, which are not
judged, as they are one in thirty to seventy of the run and one in three here."""


@dataclass(frozen=True, slots=True)
class StageRun:
    """A run of vLLM 0.15.1 on H100s: stages of even arrivals, prompts that repeat.

    Source: ``ground_truth/h100_vllm0151_stages.md``.
    """

    name: str
    model: str
    tensor_parallel_size: int
    num_gpu_blocks: int
    stages: tuple[tuple[int, int], ...]
    """Requests a second and seconds of each."""
    num_question_tokens: int
    num_system_tokens: int
    num_output_tokens: int
    ttft_ms: tuple[float, ...]
    """Of each stage, as measured: the median, as the mean has a warm-up of seconds."""
    tpot_ms: tuple[float, ...]
    e2el_ms: tuple[float, ...]
    """Means."""

    def config(
        self,
        folder: Path,
        cost: dict[str, Any],
        *,
        async_scheduling: bool | None = None,
        front_end: bool = True,
        more: Mapping[str, Any] = NOTHING,
    ) -> RunConfig:
        """Draw traffic of the same kind: a hundred prompts in turn, ten openings."""
        trace = folder / f"{self.name}.jsonl"
        trace.write_text("\n".join(map(json.dumps, self._rows())), encoding="utf-8")
        model = self.model
        if model == "codellama/CodeLlama-34b-Instruct-hf":
            path = folder / "codellama_34b.json"
            path.write_text(json.dumps(CODE_LLAMA_34B), encoding="utf-8")
            model = str(path)
        reader = {"kind": "mooncake", "path": str(trace), "block_tokens": 16}
        data = {
            "workload": {
                "trace": reader | {"full_blocks_only": True},
                "output_end": "length",
            },
            "front_end": {} if front_end else None,
            "engine": {
                "model": model,
                "gpu": "h100_sxm",
                "tensor_parallel_size": self.tensor_parallel_size,
                "engine_version": "0.15",
                "max_num_seqs": 128,
                "max_num_batched_tokens": 2048,
                "max_model_len": 4096,
                "enable_prefix_caching": True,
                "num_gpu_blocks_override": self.num_gpu_blocks,
                "async_scheduling": async_scheduling,
            }
            | dict(more),
            "cost": cost,
        }
        return parse_config(data)

    def _rows(self) -> list[dict[str, Any]]:
        random = np.random.default_rng(0)
        rows: list[dict[str, Any]] = []
        start_s = 0.0
        num_tokens = self.num_question_tokens + self.num_system_tokens
        for rate, seconds in self.stages:
            lasting_s = seconds * _SHARE
            gaps = random.exponential(size=round(rate * lasting_s))
            for arrival_s in start_s + np.cumsum(gaps) * lasting_s / gaps.sum():
                prompt = len(rows) % 100
                opening = self.num_system_tokens // 16
                own = num_tokens // 16 - opening
                hashes = [1000 * (prompt % 10 + 1) + i for i in range(opening)]
                hashes += [10**6 + 1000 * prompt + i for i in range(own)]
                rows.append(
                    {
                        "timestamp": float(1e3 * arrival_s),
                        "input_length": num_tokens,
                        "output_length": self.num_output_tokens,
                        "hash_ids": hashes,
                    }
                )
            start_s += lasting_s
        return rows

    def errors(self, result: Results) -> dict[str, list[float]]:
        """Return signed errors of each stage in percent, by latency.

        Stages are told apart by the arrival of requests.
        """
        found: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2el": []}
        start_s, requests = 0.0, result.requests[_NUM_COLD:]
        for stage, (_, seconds) in enumerate(self.stages):
            end_s = start_s + seconds * _SHARE
            own = requests[requests["arrival_s"].between(start_s, end_s)]
            for name, predicted_s, measured_ms in (
                ("ttft", own["ttft_s"].median(), self.ttft_ms),
                ("tpot", own["tpot_s"].mean(), self.tpot_ms),
                ("e2el", own["e2el_s"].mean(), self.e2el_ms),
            ):
                error = 1e3 * float(predicted_s) / measured_ms[stage] - 1.0
                found[name].append(100.0 * error)
            start_s = end_s
        return found


STAGE_RUNS = (
    StageRun(
        "mixtral_8x7b",
        "mistralai/Mixtral-8x7B-v0.1",
        2,
        27_511,
        ((5, 600), (10, 600)),
        *(466, 100, 247),
        (53.0, 56.8),
        (18.11, 19.09),
        (4519, 4754),
    ),
    StageRun(
        "codellama_34b",
        "codellama/CodeLlama-34b-Instruct-hf",
        2,
        26_603,
        ((8, 600), (20, 600)),
        *(447, 100, 248),
        (45.4, 53.5),
        (14.77, 17.00),
        (3694, 4252),
    ),
    StageRun(
        "llama_2_7b",
        "meta-llama/Llama-2-7b-hf",
        1,
        7_463,
        ((5, 600), (10, 600)),
        *(466, 100, 247),
        (24.3, 28.9),
        (7.26, 8.89),
        (1810, 2216),
    ),
    StageRun(
        "llama_2_70b",
        "meta-llama/Llama-2-70b-hf",
        4,
        31_357,
        ((6, 1200),),
        *(600, 150, 251),
        (53.5,),
        (18.03,),
        (4562,),
    ),
)
