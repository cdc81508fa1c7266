"""Printed pools of hybrid and latent-attention models, and the arguments of each."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sim.hardware.capacity import CapacityEstimate, estimate_capacity
from sim.hardware.gpus import GIB, load_gpu
from sim.hardware.models.bundled import load_model
from tests.shared import shared

if TYPE_CHECKING:
    from sim.hardware.gpus import GpuSpec

QWEN_27B, QWEN_35B = "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B"
FP8 = "the checkpoint's cache is FP8"
DRAFT = "three draft tokens of the model's own head, as its neighbours state"


@dataclass(frozen=True, slots=True)
class Known:
    """Facts of a row that its log does not say, or says in words."""

    model: str
    engine_version: str
    arguments: dict[str, Any] = field(default_factory=dict)
    because: str = ""


# Rows whose pool is given in bytes, or whose log states what was left for it.
POOLS = {
    1001: Known(QWEN_27B, "0.29"),
    1003: Known(QWEN_35B, "0.20", {"kv_cache_dtype": "fp8"}, FP8),
    1005: Known(
        QWEN_27B, "0.32", {"num_speculative_tokens": 3}, "MTP n=3; before 0.33"
    ),
    1009: Known(QWEN_35B, "0.24"),
    1011: Known(
        QWEN_27B, "0.24", {"kv_cache_dtype": "fp8", "num_speculative_tokens": 3}, DRAFT
    ),
    1015: Known(QWEN_27B, "0.24", {"num_speculative_tokens": 4}, "MTP, four tokens"),
    1017: Known(
        QWEN_35B, "0.28", {"kv_cache_dtype": "fp8", "num_speculative_tokens": 3}, DRAFT
    ),
    1019: Known("Qwen/Qwen3.5-122B-A10B", "0.19", {"kv_cache_dtype": "fp8"}, FP8),
    1023: Known(
        "google/gemma-4-31B",
        "0.29",
        {"max_num_batched_tokens": 8192},
        "the release's batch of 8,192; its drafts share the model's cache",
    ),
    1025: Known(
        "google/gemma-4-26B-A4B",
        "0.19",
        {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 2048},
        "twice the tokens of BF16, a small device's batch",
    ),
    1037: Known("moonshotai/Kimi-K2-Thinking", "0.11"),
    1059: Known("Qwen/Qwen3-235B-A22B-Instruct-2507", "0.10.2"),
    1063: Known("Qwen/Qwen3-235B-A22B", "0.10", {}, "SGLang: a token is one slot"),
}

# Rows that print tokens, length and concurrency, but not the memory: they must agree.
RATIOS = {
    1039: ("deepseek-ai/DeepSeek-V3.2", 64),
    1061: ("Qwen/Qwen3-32B", 16),  # full attention, as Seed-OSS has
    1065: ("MiniMaxAI/MiniMax-M2", 16),
}

NOT_JUDGED = {
    1007: "Qwen3.8-Flash-Next: its layers are not public",
    1013: "DFlash2: the drafter's layers are not known",
    1021: "an NPU's own planning, and no memory in the log",
    1029: "Gemma-4-E4B shares caches between layers, which is refused",
    1031: "the model is not named",
    1035: "192 GB class, release roughly known: no GPU, no batch, no tokens",
    1041: "GLM-5.3-Flash: its layers are not public",
    1043: "GLM-5.3-Flash: its layers are not public; a fork",
    1045: "DeepSeek-V4's compressed attention is not modelled",
    1047: "DeepSeek-V4's compressed attention is not modelled",
    1049: "DeepSeek-V4's compressed attention is not modelled",
    1051: "DeepSeek-V4's compressed attention is not modelled",
    1053: "decode context parallelism is not modelled; a fork",
    1055: "the number of ranks and of draft layers is not known",
    1057: "the layers of its drafter (dspark) are not known",
}

# Rows that say enough for the whole sum, GiB by GiB.
WHOLE = {
    1001: ("rtx_pro_6000_server", {}),
    1037: ("h200_sxm", {}),
    1059: ("l40s", {"quantization": "fp8-block128", "use_flashinfer_sampler": False}),
}
NOT_COUNTED = {
    1059: "its 27.72 GiB are an eighth of the model on four ranks: experts spread over"
    " eight, which the row does not say",
}
CAUSES = {
    1001: "its log holds 2.58 GiB of activations and 0.3 of graphs; 1,024 sequences of"
    " the release's default would be 3.66, and its graphs are estimated at 0.76",
}


def rows() -> dict[int, dict[str, str]]:
    path = shared("kv_capacity/kv_capacity_hybrid_mla.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return {int(row["id"]): row for row in csv.DictReader(file)}


def _arguments(row: dict[str, str], known: Known) -> dict[str, Any]:
    told = {
        "max_model_len": int(row["max_model_len"] or 0) or None,
        "max_num_batched_tokens": int(row["max_num_batched_tokens"] or 0) or None,
        "tensor_parallel_size": int(row["tp"]),
        "engine_version": known.engine_version,
        **known.arguments,
    }
    dtype = row["kv_cache_dtype"]
    if dtype and dtype != "auto":
        told["kv_cache_dtype"] = dtype
    return told


def planned(row: dict[str, str]) -> CapacityEstimate:
    """Return the pool that the row's memory for the cache makes."""
    known = POOLS[int(row["id"])]
    return estimate_capacity(
        known.model,
        "b200_sxm",
        kv_cache_memory_bytes=round(float(row["available_kv_gib"]) * GIB),
        weights_gib=1.0,
        max_num_seqs=16,
        **_arguments(row, known),
    )


def whole(row: dict[str, str], *, weights_given: bool) -> CapacityEstimate:
    """Return the estimate of a row that names its GPU."""
    gpu_name, more = WHOLE[int(row["id"])]
    known = POOLS[int(row["id"])]
    gpu: GpuSpec = load_gpu(gpu_name)
    gpu = replace(gpu, memory_bytes=round(float(row["gpu_total_gib"]) * GIB))
    given = float(row["weights_gib"] or 0) if weights_given else 0
    return estimate_capacity(
        load_model(known.model),
        gpu,
        gpu_memory_utilization=float(row["gpu_memory_utilization"] or 0) or None,
        weights_gib=given or None,
        **_arguments(row, known) | more,
    )
