"""Engine logs with a full memory breakdown, and how far the estimate is from them."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

from sim.capacity import CapacityEstimate, estimate_capacity
from sim.errors import ConfigError
from sim.hardware import GIB, GpuSpec, load_gpu
from sim.model import ModelArchitecture, load_model

POINTS = Path(__file__).parents[2].parent / "shared/kv_capacity/kv_capacity_points.csv"

GPU_NAMES = {
    "H100-SXM-80GB": "h100_sxm",
    "H100-80GB": "h100_sxm",
    "RTX-4090-24GB": "rtx_4090",
    "RTX-3090-24GB": "rtx_3090",
    "A100-40GB": "a100_sxm_40gb",
}

# Facts of models that are not bundled: judged only with the weights of the log.
UNBUNDLED = {
    "moonshotai/Kimi-VL-A3B-Instruct": ModelArchitecture(
        name="moonshotai/Kimi-VL-A3B-Instruct",
        num_hidden_layers=27,
        hidden_size=2048,
        intermediate_size=11264,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=163840,
        max_position_embeddings=131072,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        num_shared_experts=2,
        num_dense_layers=1,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        has_encoder=True,
    ),
    "meta-llama/Llama-3.2-11B-Vision": ModelArchitecture(
        name="meta-llama/Llama-3.2-11B-Vision",
        num_hidden_layers=40,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        has_encoder=True,
    ),
    # Its state-space layers share the pool: only bytes compare, and only roughly.
    "Qwen3.5-4B": ModelArchitecture(
        name="Qwen3.5-4B",
        num_hidden_layers=32,
        hidden_size=2560,
        intermediate_size=9216,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=248320,
        max_position_embeddings=262144,
    ),
}

# Facts of a row that its own parts contradict: row 65 adds up (64.38 + 7.38 + 0.13 +
# 3.33 = 75.22 GiB) only at a utilisation of 0.95, which its neighbour, row 71, states.
ERRATA = {65: {"gpu_memory_utilization": "0.95"}}

# Rows beyond 5 %, and why; nothing else may be.
CAUSES = {
    71: "activations of 2.12 GiB: another sampler or fewer sequences than the default",
    76: "consumer GPU: 0.385 GiB more held, the size of FlashInfer's workspace",
    86: "V0: the encoder's own activations of 36 GiB",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One row with its estimate."""

    row_id: int
    group: tuple[str, int, str]
    measured: float
    predicted: float
    estimate: CapacityEstimate

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1


def rows_of_quality_a() -> list[dict[str, str]]:
    with POINTS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"].startswith("A")]
    return [row | ERRATA.get(int(row["id"]), {}) for row in rows]


def architecture(row: dict[str, str]) -> ModelArchitecture | None:
    try:
        return load_model(row["model"])
    except ConfigError:
        return UNBUNDLED.get(row["model"])


def gpu_of(row: dict[str, str]) -> GpuSpec:
    gpu = load_gpu(GPU_NAMES[row["gpu"]])
    return replace(gpu, memory_bytes=round(float(row["gpu_total_gib"]) * GIB))


def estimate_row(row: dict[str, str], *, weights_given: bool) -> CapacityEstimate:
    model = architecture(row)
    assert model is not None
    version = row["vllm_version"].rstrip("~")
    scheme = row["quantization"] or None
    if scheme in {"compressed-tensors", "gptq_marlin"}:
        scheme = None  # the checkpoint's own scheme is a bundled fact
    weights = row["weights_gib"] if weights_given else ""
    return estimate_capacity(
        model,
        gpu_of(row),
        tensor_parallel_size=int(row["tp"]),
        block_size=int(row["block_size"] or 16),
        gpu_memory_utilization=float(row["gpu_memory_utilization"]),
        dtype=row["dtype"],
        kv_cache_dtype=row["kv_cache_dtype"] or "auto",
        quantization=scheme,
        max_num_seqs=int(row["max_num_seqs"] or 0) or None,
        max_num_batched_tokens=int(row["max_num_batched_tokens"] or 0) or None,
        engine_version=version if version.startswith("0.") else "0.27",
        enforce_eager=row["enforce_eager"] == "true",
        weights_gib=float(weights) if weights else None,
    )


def judge(row: dict[str, str], *, weights_given: bool) -> Judged:
    estimate = estimate_row(row, weights_given=weights_given)
    if row["num_gpu_blocks"]:
        measured: float = int(row["num_gpu_blocks"])
        predicted: float = estimate.num_gpu_blocks
    else:
        measured = float(row["available_kv_gib"])
        predicted = estimate.available_kv_bytes / GIB
    group = (row["model"], int(row["tp"]), row["vllm_version"])
    return Judged(int(row["id"]), group, measured, predicted, estimate)


def judge_all(*, weights_given: bool) -> tuple[list[Judged], list[str]]:
    """Return the judged rows, and the others with the reason."""
    judged, skipped = [], []
    for row in rows_of_quality_a():
        name = f"row {row['id']} ({row['model']})"
        if row["pp"] != "1":
            skipped.append(f"{name}: pipeline parallelism is refused")
        elif architecture(row) is None or (
            not weights_given and row["model"] in UNBUNDLED
        ):
            skipped.append(f"{name}: architecture not bundled")
        else:
            judged.append(judge(row, weights_given=weights_given))
    return judged, skipped


def group_errors(judged: list[Judged]) -> dict[tuple[str, int, str], float]:
    """Return one absolute error a (model, TP, version): the median of its rows."""
    groups: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for point in judged:
        groups[point.group].append(abs(point.error))
    return {group: median(errors) for group, errors in groups.items()}


def median_and_p90(errors: list[float]) -> tuple[float, float]:
    return median(errors), quantiles(errors, n=10, method="inclusive")[8]


def table(judged: list[Judged]) -> str:
    lines = []
    for point in sorted(judged, key=lambda point: point.row_id):
        model, tp, version = point.group
        cause = CAUSES.get(point.row_id, "") if abs(point.error) > 0.05 else ""
        lines.append(
            f"{point.row_id:>4} {model[-46:]:<46} tp{tp} {version:<7}"
            f" {point.measured:>10.2f} {point.predicted:>10.2f}"
            f" {100 * point.error:>+7.2f} % {cause}"
        )
    return "\n".join(lines)
