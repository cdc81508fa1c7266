"""How far a capacity estimate may be off, and why, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.hardware.capacity import constants
from sim.hardware.gpus import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.hardware.capacity.arguments import EngineArguments
    from sim.hardware.capacity.parts import MemoryParts


def uncertainty(
    arguments: EngineArguments, parts: MemoryParts
) -> tuple[int, tuple[str, ...]]:
    """Return the half-width of the interval in bytes, and the reasons.

    Inside the data (H100, releases 0.11 to 0.19, their tensor-parallel sizes, 8,192
    tokens and 1,024 sequences, known models) the width is that of the residuals, and
    there is no reason to give.
    """
    terms = [
        *_device_terms(arguments),
        *_version_terms(arguments, parts),
        *_model_terms(arguments, parts),
    ]
    margin = constants.MARGINS.measured + sum(gib for gib, _ in terms)
    return round(margin * GIB), tuple(reason for _, reason in terms)


def _device_terms(arguments: EngineArguments) -> Iterator[tuple[float, str]]:
    gpu, margins = arguments.gpu, constants.MARGINS
    if gpu.family != constants.MEASURED_FAMILY:
        yield margins.other_gpu, f"{gpu.name}: the constants were measured on H100"
    if gpu.consumer:
        yield margins.consumer_gpu, f"{gpu.name}: one log of a consumer GPU, 7 % off"
    tp, era = arguments.tensor_parallel_size, constants.era_of(arguments.engine_minor)
    # An era without logs has a reason of its own for the sizes that it carries over.
    if tp not in (era.measured_sizes or era.non_torch_gib):
        yield (
            margins.other_tensor_parallel_size,
            f"tensor_parallel_size {tp}: not measured in this release",
        )


def _version_terms(
    arguments: EngineArguments, parts: MemoryParts
) -> Iterator[tuple[float, str]]:
    minor, margins = arguments.engine_minor, constants.MARGINS
    first, last = constants.FIRST_MEASURED_MINOR, constants.LAST_MEASURED_MINOR
    if not arguments.is_v1:
        yield margins.v0, f"0.{minor} is a V0 engine, held against two logs only"
    elif minor < first:
        yield margins.old_v1, f"0.{minor} is older than 0.{first}, the first measured"
    elif minor > last:
        yield (
            margins.other_version,
            f"0.{minor} is newer than 0.{last}, the last measured",
        )
    if parts.cuda_graph_bytes:
        yield (
            parts.cuda_graph_bytes / GIB,
            "CUDA graphs: the release subtracts its own estimate of them",
        )
    if arguments.enforce_eager and arguments.is_v1:
        yield margins.enforce_eager, "enforce_eager: measured with compiled graphs"


def _model_terms(
    arguments: EngineArguments, parts: MemoryParts
) -> Iterator[tuple[float, str]]:
    if arguments.model.has_encoder:
        yield (
            constants.MARGINS.multimodal,
            "multimodal: the encoder's own peak is not modelled",
        )
        if not arguments.model.num_multimodal_parameters:
            yield (
                constants.MARGINS.uncounted_encoder,
                "multimodal: config.json does not tell the encoder's weights;"
                " give weights_gib",
            )
    weights_gib = 0.0
    if arguments.weights_gib is None:
        weights_gib = parts.weights_bytes / GIB
    for doubt in arguments.model.doubts:
        gib = constants.UNKNOWN_WEIGHTS_SHARE * weights_gib
        yield constants.MARGINS.other_architecture + gib, doubt
    yield from _quantization_terms(arguments, weights_gib)
    yield from _batch_terms(arguments, parts)


def _quantization_terms(
    arguments: EngineArguments, weights_gib: float
) -> Iterator[tuple[float, str]]:
    name = arguments.quantization or ""
    gib = constants.UNCERTAIN_WEIGHTS_SHARE * weights_gib
    packed = ("w4a16", "gptq", "awq", "mxfp4")
    if name.startswith(packed) and arguments.weights_gib is None:
        yield gib, f"{name}: packed layouts differ by kernel"
    if name == "fp8" and arguments.gpu.fp8_flops_per_s is None:
        yield gib, f"{arguments.gpu.name} has no FP8 units: weight-only kernels"


def _batch_terms(
    arguments: EngineArguments, parts: MemoryParts
) -> Iterator[tuple[float, str]]:
    tokens, seqs = constants.MEASURED_BATCH
    batch = (arguments.max_num_batched_tokens, arguments.max_num_seqs)
    if not arguments.is_v1 or batch == constants.MEASURED_BATCH:
        return
    share = constants.OTHER_BATCH_SHARE * parts.activation_peak_bytes / GIB
    yield (
        max(constants.MARGINS.other_batch, share),
        f"max_num_batched_tokens {batch[0]}, max_num_seqs {batch[1]}: measured with"
        f" {tokens} and {seqs} only",
    )
