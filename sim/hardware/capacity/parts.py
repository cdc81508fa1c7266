"""The parts of a GPU's memory: what the engine holds before it cuts KV blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sim.errors import CapacityError
from sim.hardware.capacity import constants
from sim.hardware.capacity.activations import (
    activation_peak_bytes,
    benchmarked_bytes,
    sorting_bytes,
)
from sim.hardware.capacity.encoders import deep_buffer_bytes, encoding_bytes
from sim.hardware.capacity.experts import padding_bytes
from sim.hardware.capacity.kernels import (
    flashinfer_workspace_bytes,
    is_amd,
    is_linked_hopper_or_later,
    split_output_bytes,
)
from sim.hardware.gpus import GIB
from sim.hardware.graph_sizes import MOST_TOKENS, strided_sizes
from sim.hardware.models.layers import GatedDeltaNetShape
from sim.hardware.models.quantization import QuantizationScheme, quantization_scheme
from sim.hardware.models.weights import (
    WITHIN_TENSOR_RANKS,
    TensorRole,
    allocated_bytes,
    tensor_bytes,
    weight_bytes,
    weight_tensors,
)
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.hardware.capacity.arguments import EngineArguments


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes of one rank, in the order in which they are subtracted."""

    requested_bytes: int
    weights_bytes: int
    activation_peak_bytes: int
    non_torch_bytes: int
    cuda_graph_bytes: int
    activation_argument: str = "max_num_seqs"
    """The argument that most of the activation peak goes by."""
    expert_bytes: int = 0
    """Of the weights, those of routed experts, where ranks divide them."""
    draft_bytes: int = 0
    """Of the weights, those of the drafter."""

    @property
    def available_kv_bytes(self) -> int:
        """Bytes left for the KV cache; negative where memory is short."""
        held = self.weights_bytes + self.activation_peak_bytes
        return (
            self.requested_bytes - held - self.non_torch_bytes - self.cuda_graph_bytes
        )


def memory_parts(arguments: EngineArguments) -> MemoryParts:
    scheme = quantization_scheme_of(arguments)
    era = arguments.era
    drafter_bytes = _drafter_bytes(arguments, scheme)
    weights = _weights(arguments, scheme) + drafter_bytes
    total = arguments.gpu.memory_bytes
    if weights > total:
        raise CapacityError(
            f"the weights must fit the GPU: {arguments.model.name} has"
            f" {weights / GIB:.2f} GiB a rank, {arguments.gpu.name} {total / GIB:.2f};"
            " use a larger tensor_parallel_size, quantization or a larger GPU"
        )
    graphs = 0
    if era.subtracts_cuda_graphs and not _sets_no_graphs_aside(arguments):
        graphs = cuda_graph_bytes(arguments)
    activation_peak, argument = activation_peak_bytes(arguments, scheme)
    return MemoryParts(
        requested_bytes=math.ceil(total * arguments.gpu_memory_utilization),
        weights_bytes=weights,
        activation_peak_bytes=activation_peak,
        non_torch_bytes=round(_non_torch_gib(arguments) * GIB),
        cuda_graph_bytes=graphs,
        activation_argument=argument,
        expert_bytes=_expert_bytes(arguments, scheme),
        draft_bytes=drafter_bytes,
    )


def _sets_no_graphs_aside(arguments: EngineArguments) -> bool:
    """Whether no memory is kept for graphs before they are captured.

    The second model runner takes them for nothing before 0.29.

    Source: vLLM 0.24 to 0.33, ``v1/worker/gpu/model_runner.py``
    (`profile_cudagraph_memory`).
    """
    if arguments.enforce_eager:
        return True
    is_early = arguments.engine_minor < constants.FIRST_SECOND_RUNNER_GRAPHS_MINOR
    return arguments.has_second_model_runner and is_early


def quantization_scheme_of(arguments: EngineArguments) -> QuantizationScheme | None:
    """Return how linear layers are stored; None where given weights make it moot."""
    if arguments.weights_gib is not None:
        try:
            return quantization_scheme(arguments.quantization)
        except CapacityError:
            return None
    return quantization_scheme(arguments.quantization)


def cuda_graph_bytes(arguments: EngineArguments) -> int:
    """Return what a release estimates that graphs, and capturing them, take."""
    drafter = arguments.drafter
    num_layers = 0 if drafter is None else drafter.model.num_hidden_layers
    num_layers += arguments.model.num_hidden_layers
    pieces, whole = captured_sizes(arguments)
    if arguments.has_second_model_runner:
        kernels = constants.LATENT_PIECES if arguments.model.kv_lora_rank else 1
        graphs = len(pieces) * num_layers * kernels * constants.PIECE_BYTES
        graphs += len(whole) * constants.WHOLE_GRAPH_BYTES
        graphs += split_output_bytes(arguments, sum(whole[-2:]))
    else:
        base, per_layer = constants.CUDA_GRAPH_GIB
        share = min(1.0, (len(pieces) + len(whole)) / constants.MANY_GRAPHS)
        graphs = round((base + per_layer * num_layers) * share * GIB)
    return graphs + flashinfer_workspace_bytes(arguments)


def captured_sizes(
    arguments: EngineArguments,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of graphs in pieces, and of whole ones, which decode alone."""
    decodes = arguments.max_num_seqs * (1 + arguments.num_speculative_tokens)
    most = arguments.max_num_batched_tokens
    given = arguments.cudagraph_capture_sizes
    if given is None:
        sizes = strided_sizes(min(2 * decodes, MOST_TOKENS, most))
    else:
        sizes = tuple(size for size in given if size <= most)
    return sizes, tuple(size for size in sizes if size <= decodes)


def _non_torch_gib(arguments: EngineArguments) -> float:
    """Return memory outside PyTorch in GiB, extrapolated beyond the table."""
    era, ranks = arguments.era, _connected(arguments)
    known = era.non_torch_gib
    early = era.early_non_torch_gib
    if early is not None and not is_linked_hopper_or_later(arguments.gpu):
        known = early
    if ranks in known:
        return known[ranks]
    nearest = max(size for size in known if size <= ranks)
    doublings = math.log2(ranks / nearest)
    return known[nearest] + constants.NON_TORCH_PER_DOUBLING_GIB * doublings


def _connected(arguments: EngineArguments) -> int:
    """Return the GPUs that exchange anything with one: with experts, of all ranks."""
    tp = arguments.tensor_parallel_size
    if not arguments.model.num_moe_layers:
        return tp
    return tp * arguments.experts.data_parallel_size


def _weights(arguments: EngineArguments, scheme: QuantizationScheme | None) -> int:
    if arguments.weights_gib is not None:
        return round(arguments.weights_gib * GIB)
    held = weight_bytes(
        arguments.model,
        arguments.tensor_parallel_size,
        arguments.itemsize_bytes,
        scheme,
        arguments.experts,
    )
    held += deep_buffer_bytes(arguments) + padding_bytes(arguments)
    return held - _embeddings_elsewhere(arguments)


def _drafter_bytes(
    arguments: EngineArguments, scheme: QuantizationScheme | None
) -> int:
    """Return the weights of a drafter; a head of the target is stored as the target.

    Measured weights hold them already.
    """
    drafter = arguments.drafter
    if drafter is None or arguments.weights_gib is not None:
        return 0
    if drafter.method != "mtp":
        scheme = quantization_scheme(drafter.model.quantization)
    return drafter.weight_bytes(
        arguments.tensor_parallel_size,
        arguments.itemsize_bytes,
        scheme,
        arguments.experts,
    )


def _embeddings_elsewhere(arguments: EngineArguments) -> int:
    """Return the bytes of embedding and head that other stages hold.

    The first stage has the one, the last the other; tied ones stand on both.
    """
    if arguments.pipeline_parallel_size == 1:
        return 0
    embedding = next(weight_tensors(arguments.model, arguments.tensor_parallel_size))
    num_here = (arguments.stage == 0) + arguments.is_last_stage
    one = allocated_bytes(tensor_bytes(embedding, arguments.itemsize_bytes, None))
    return (embedding.count - num_here) * one


def _expert_bytes(arguments: EngineArguments, scheme: QuantizationScheme | None) -> int:
    if arguments.experts == WITHIN_TENSOR_RANKS or arguments.weights_gib is not None:
        return 0
    return _held_experts(arguments, scheme)


def _held_experts(arguments: EngineArguments, scheme: QuantizationScheme | None) -> int:
    model, tp, itemsize = (
        arguments.model,
        arguments.tensor_parallel_size,
        arguments.itemsize_bytes,
    )
    return sum(
        tensor.count * allocated_bytes(tensor_bytes(tensor, itemsize, scheme))
        for tensor in weight_tensors(model, tp, experts=arguments.experts)
        if tensor.role is TensorRole.EXPERT
    )


# -- how far off the estimate may be, and why, in words ------------------------------


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
        *_compiling_terms(arguments, parts),
        *_model_terms(arguments, parts),
    ]
    margin = constants.MARGINS.measured + added(gib for gib, _ in terms)
    return round(margin * GIB), tuple(reason for _, reason in terms)


def _device_terms(arguments: EngineArguments) -> Iterator[tuple[float, str]]:
    gpu, margins = arguments.gpu, constants.MARGINS
    if gpu.family != constants.MEASURED_FAMILY:
        yield margins.other_gpu, f"{gpu.name}: the constants were measured on H100"
    if gpu.consumer:
        yield (
            margins.consumer_gpu,
            f"{gpu.name}: a consumer GPU, held against four logs",
        )
    if is_amd(gpu):
        yield margins.amd, f"{gpu.name}: what ROCm's allocator keeps of loading counts"
        if arguments.model.num_moe_layers and not arguments.quantization:
            yield (
                constants.AMD_EXPERTS_SHARE * _held_experts(arguments, None) / GIB,
                f"{gpu.name}: experts are padded and laid out anew while loading",
            )
    tp, era = arguments.tensor_parallel_size, arguments.era
    # An era without logs has a reason of its own for the sizes that it carries over.
    if tp not in (era.measured_sizes or era.non_torch_gib):
        yield (
            margins.other_tensor_parallel_size,
            f"tensor_parallel_size {tp}: not measured in this release",
        )
    if arguments.pipeline_parallel_size > 1:
        yield (
            margins.other_tensor_parallel_size,
            f"pipeline_parallel_size {arguments.pipeline_parallel_size}: no pipeline"
            " was measured",
        )
    if arguments.experts != WITHIN_TENSOR_RANKS and arguments.model.num_moe_layers:
        yield (
            margins.other_tensor_parallel_size,
            "experts over ranks: buffers of the exchange are not measured",
        )


def _version_terms(
    arguments: EngineArguments, parts: MemoryParts
) -> Iterator[tuple[float, str]]:
    minor, margins = arguments.engine_minor, constants.MARGINS
    first, last = constants.FIRST_MEASURED_MINOR, constants.LAST_MEASURED_MINOR
    if not arguments.is_v1:
        yield margins.v0, f"0.{minor} is a V0 engine, held against four logs only"
    elif minor < constants.FIRST_HELD_V1_MINOR:
        yield margins.old_v1, f"0.{minor} is older than 0.{first}, the first measured"
    elif minor < first:
        yield margins.other_version, f"0.{minor}: held against seven logs, none of H100"
    elif minor > last:
        yield (
            margins.other_version,
            f"0.{minor} is newer than 0.{last}, the last that constants were measured"
            f" on; starts of 0.{constants.LAST_HELD_MINOR} and before were compared",
        )
    if arguments.may_sample_by_flashinfer and arguments.use_flashinfer_sampler is None:
        more = sorting_bytes(arguments) / GIB
        yield (
            more,
            "the release samples by FlashInfer where that is installed, as in vLLM's"
            " images; without it (use_flashinfer_sampler: false) sorting takes up to"
            f" {more:.2f} GiB more",
        )
    if parts.cuda_graph_bytes:
        yield (
            parts.cuda_graph_bytes / GIB,
            "CUDA graphs: the release subtracts its own estimate of them",
        )
    if arguments.enforce_eager and arguments.is_v1:
        yield margins.enforce_eager, "enforce_eager: measured with compiled graphs"


def _compiling_terms(
    arguments: EngineArguments, parts: MemoryParts
) -> Iterator[tuple[float, str]]:
    copy = benchmarked_bytes(arguments) / GIB
    if not copy:
        return
    cached = replace(arguments, warm_compile_cache=True)
    least, _ = activation_peak_bytes(cached, quantization_scheme_of(arguments))
    more = (parts.activation_peak_bytes - least) / GIB
    if more:
        yield (
            more,
            "the first start of this model, which compiles it; with compiled code"
            f" cached (warm_compile_cache: true) it has {more:.2f} GiB more",
        )
    if arguments.engine_minor in constants.KEPT_COPIES_MINORS:
        yield (
            0.0,
            f"of 0.{arguments.engine_minor} the allocator keeps {copy:.2f} GiB from"
            " compiling, as is counted, or nothing: about as many starts do either",
        )
    if arguments.engine_minor == constants.MAY_KEEP_COPIES_MINOR:
        yield (
            copy,
            f"0.{arguments.engine_minor} may count {copy:.2f} GiB that the allocator"
            " keeps from compiling",
        )


def _model_terms(
    arguments: EngineArguments, parts: MemoryParts
) -> Iterator[tuple[float, str]]:
    if arguments.model.has_encoder:
        reason = "multimodal: the encoder's own peak is not modelled"
        if encoding_bytes(arguments):
            reason = "multimodal: with limit_mm_per_prompt an engine encodes less"
        yield constants.MARGINS.multimodal, reason
        if not arguments.model.num_multimodal_parameters:
            yield (
                constants.MARGINS.uncounted_encoder,
                "multimodal: config.json does not tell the encoder's weights;"
                " give weights_gib",
            )
    shape = arguments.model.state_shape
    if isinstance(shape, GatedDeltaNetShape) and (
        arguments.engine_minor in constants.DELTA_NET_MINORS
    ):
        yield (
            _delta_net_outputs_gib(arguments, shape),
            f"0.{arguments.engine_minor}: delta nets held more in three starts with"
            " small batches, and why is not known",
        )
    weights_gib = 0.0
    if arguments.weights_gib is None:
        weights_gib = parts.weights_bytes / GIB
    for doubt in arguments.model.doubts:
        gib = constants.UNKNOWN_WEIGHTS_SHARE * weights_gib
        yield constants.MARGINS.other_architecture + gib, doubt
    yield from _quantization_terms(arguments, weights_gib)
    yield from _batch_terms(arguments, parts)


def _delta_net_outputs_gib(
    arguments: EngineArguments, shape: GatedDeltaNetShape
) -> float:
    layers = arguments.model.num_state_layers
    width = shape.num_value_heads * shape.value_head_dim * arguments.itemsize_bytes
    tokens = arguments.max_num_batched_tokens
    return tokens * layers * width / arguments.tensor_parallel_size / GIB


def _quantization_terms(
    arguments: EngineArguments, weights_gib: float
) -> Iterator[tuple[float, str]]:
    name = arguments.quantization or ""
    gib = constants.UNCERTAIN_WEIGHTS_SHARE * weights_gib
    packed = ("w4a16", "gptq", "awq", "mxfp4", "nvfp4")
    if name.startswith(packed) and arguments.weights_gib is None:
        yield gib, f"{name}: packed layouts differ by kernel"
    if name.startswith("fp8") and arguments.model.num_state_layers:
        yield (
            constants.PARTLY_QUANTISED_SHARE * weights_gib,
            f"{name}: checkpoints differ in the layers that keep their precision",
        )
    if name.startswith("fp8") and arguments.gpu.fp8_flops_per_s is None:
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
