"""Engine logs with a full memory breakdown, and how far the estimate is from them."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import TYPE_CHECKING

from sim.errors import ConfigError
from sim.hardware.capacity import CapacityEstimate, constants, estimate_capacity
from sim.hardware.capacity.arguments import parse_release
from sim.hardware.gpus import GIB, GpuSpec, load_gpu
from sim.hardware.models.architecture import ModelArchitecture
from sim.hardware.models.bundled import load_model
from tests.shared import shared

if TYPE_CHECKING:
    from collections.abc import Callable

GPU_NAMES = {
    "H100-SXM-80GB": "h100_sxm",
    "H100-80GB": "h100_sxm",
    "RTX-4090-24GB": "rtx_4090",
    "RTX-3090-24GB": "rtx_3090",
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
}

_LATER = (
    "release 0.11 in place of 0.11.0, which is said of row 71 alone and samples"
    " by FlashInfer; this one sorts"
)
# Facts of a row that its own parts contradict, and why.
ERRATA = {
    65: (
        {"gpu_memory_utilization": "0.95", "vllm_version": "0.11"},
        "utilisation corrected from 0.9 to 0.95, because its parts (64.38 + 7.38 + 0.13"
        " + 3.33 GiB) add up only so; its neighbour, row 71, states 0.95; " + _LATER,
    ),
    **{row_id: ({"vllm_version": "0.11"}, _LATER) for row_id in range(66, 71)},
}

# Rows that are not judged, whatever is given.
NOT_JUDGED = {
    25: "pipeline parallelism is refused",
    26: "pipeline parallelism is refused",
    86: "V0 with images is refused: the encoder was profiled with 36 GiB of them",
    110: "release unknown (2026-08), state-space layers not modelled",
}

# Rows beyond 5 %, and why; exactly these may be.
CAUSES: dict[int, str] = {}
CAUSES_COUNTED = CAUSES | {
    65: "MXFP4 as the kernel's layout pads it is 0.35 GiB short of the log's 64.38 GiB,"
    " a tenth of the 3.33 GiB that are left",
}

DEFAULTED = ("max_num_seqs", "max_num_batched_tokens", "block_size", "enforce_eager")


@dataclass(frozen=True, slots=True)
class Judged:
    """One row with its estimate."""

    row_id: int
    group: tuple[str, int, str]
    measured: float
    predicted: float
    estimate: CapacityEstimate
    defaults: str
    """Arguments that the row leaves to the release, with their values."""
    in_sample: bool
    """Whether the row is none of those named as odd, with a cause."""

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1


def rows_of_quality_a() -> list[dict[str, str]]:
    path = shared("kv_capacity/kv_capacity_points.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"].startswith("A")]
    return [row | ERRATA.get(int(row["id"]), ({}, ""))[0] for row in rows]


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
        engine_version=version,
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
    missing = [name for name in DEFAULTED if not row[name]]
    return Judged(
        row_id=int(row["id"]),
        group=(row["model"], int(row["tp"]), row["vllm_version"]),
        measured=measured,
        predicted=predicted,
        estimate=estimate,
        defaults=" ".join(f"{name}={getattr(estimate, name)}" for name in missing),
        in_sample=int(row["id"]) not in CAUSES,
    )


def judge_all(*, weights_given: bool) -> tuple[list[Judged], list[str]]:
    """Return the judged rows, and the others with the reason."""
    judged, skipped = [], []
    for row in rows_of_quality_a():
        reason = NOT_JUDGED.get(int(row["id"]))
        if not weights_given and row["model"] in UNBUNDLED:
            reason = reason or "architecture not bundled"
        if reason:
            skipped.append(f"row {row['id']} ({row['model']}): {reason}")
        else:
            judged.append(judge(row, weights_given=weights_given))
    return judged, skipped


def group_errors(judged: list[Judged]) -> dict[tuple[str, int, str], float]:
    """Return one absolute error a (model, TP, version): the median of its rows."""
    groups: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for point in judged:
        groups[point.group].append(abs(point.error))
    return {group: median(errors) for group, errors in groups.items()}


def median_and_p90(judged: list[Judged]) -> tuple[float, float]:
    errors = list(group_errors(judged).values())
    return median(errors), quantiles(errors, n=10, method="inclusive")[8]


def table(judged: list[Judged], causes: dict[int, str]) -> str:
    lines = [
        f"{'row':>4} {'model':<46} tp  {'release':<7} {'engine':>10} {'kvsim':>10}"
        f" {'error':>9}  ok or odd; by default; remarks"
    ]
    for point in sorted(judged, key=lambda point: point.row_id):
        model, tp, version = point.group
        remarks = [
            point.defaults,
            ERRATA.get(point.row_id, ({}, ""))[1],
            causes.get(point.row_id, ""),
        ]
        lines.append(
            f"{point.row_id:>4} {model[-46:]:<46} tp{tp} {version:<7}"
            f" {point.measured:>10.2f} {point.predicted:>10.2f}"
            f" {100 * point.error:>+7.2f} %  {'ok ' if point.in_sample else 'odd'}"
            f" {'; '.join(filter(None, remarks))}"
        )
    return "\n".join(lines)


def group_table(judged: list[Judged]) -> str:
    errors = group_errors(judged)
    lines = [f"{len(errors)} judged groups (model, TP, release):"]
    for group in sorted(errors, key=lambda group: errors[group]):
        model, tp, version = group
        count = sum(point.group == group for point in judged)
        lines.append(
            f"     {model[-46:]:<46} tp{tp} {version:<7} {100 * errors[group]:>6.3f} %"
            f" ({count} row{'s' * (count > 1)})"
        )
    return "\n".join(lines)


def judge_left_out(
    swap: Callable[[tuple[constants.EngineEra, ...]], None],
) -> list[Judged]:
    """Judge each model with constants that were fitted without it.

    Per era, memory outside PyTorch is the median over the rows of the other models;
    `swap` puts the eras in place.
    """
    rows = [row for row in rows_of_quality_a() if int(row["id"]) not in NOT_JUDGED]
    judged = []
    for model in sorted({row["model"] for row in rows}):
        others = [row for row in rows if row["model"] != model]
        swap(_refitted(others, constants.ERAS))
        judged += [
            judge(row, weights_given=True) for row in rows if row["model"] == model
        ]
    return judged


def _refitted(
    rows: list[dict[str, str]], eras: tuple[constants.EngineEra, ...]
) -> tuple[constants.EngineEra, ...]:
    outside: dict[tuple[tuple[int, int], int], list[float]] = defaultdict(list)
    for row in rows:
        if row["activation_peak_gib"] and row["gpu"].startswith("H100"):
            first = constants.era_of(*parse_release(row["vllm_version"])).first
            outside[first, int(row["tp"])].append(float(row["non_torch_gib"]))
    return tuple(
        replace(
            era,
            non_torch_gib={
                tp: median(outside.get((era.first, tp), [gib]))
                for tp, gib in era.non_torch_gib.items()
            },
        )
        for era in eras
    )
