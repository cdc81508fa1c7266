"""How far a capacity estimate may be off, and why, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.capacity import constants
from sim.hardware import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.capacity.arguments import EngineArguments
    from sim.capacity.parts import MemoryParts


def uncertainty(
    arguments: EngineArguments, parts: MemoryParts
) -> tuple[int, tuple[str, ...]]:
    """Return the half-width of the interval in bytes, and the reasons.

    Inside the data (H100, releases 0.11 to 0.19, measured tensor-parallel sizes) the
    width is that of the residuals, and there is no reason to give.
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
        yield margins.consumer_gpu, f"{gpu.name}: one log of a consumer GPU, 7 % lower"
    tp = arguments.tensor_parallel_size
    if tp not in constants.era_of(arguments.engine_minor).non_torch_gib:
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
        yield margins.v0, f"0.{minor} is a V0 engine: two logs only"
        if arguments.model.has_encoder:
            yield margins.v0_multimodal, "V0 profiles as many images as fit"
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
    packed = ("w4a16", "gptq", "awq", "mxfp4")
    scheme = arguments.quantization or ""
    if scheme.startswith(packed) and arguments.weights_gib is None:
        gib = constants.UNCERTAIN_WEIGHTS_SHARE * parts.weights_bytes / GIB
        yield gib, f"{scheme}: packed layouts differ by kernel"
    widest = constants.WIDE_BATCH[0]
    if arguments.is_v1 and arguments.max_num_batched_tokens > widest:
        gib = constants.WIDE_BATCH_SHARE * parts.activation_peak_bytes / GIB
        yield gib, f"max_num_batched_tokens above the measured {widest}"
