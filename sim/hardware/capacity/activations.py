"""Activations that a profiled step holds at its peak: its forward pass's or sampler's.

Counted from the releases' and PyTorch's sources, and held against engine logs: where
the sampler is the peak, of 36 logs none differs by more than 0.01 GiB (text models).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.hardware.capacity import constants
from sim.hardware.capacity.encoders import dummy_image_bytes, encoding_bytes
from sim.hardware.capacity.experts import expert_workspaces
from sim.hardware.capacity.kernels import is_hopper_or_later
from sim.hardware.gpus import GIB
from sim.hardware.models.weights import tensor_bytes, weight_tensors

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments
    from sim.hardware.models.quantization import QuantizationScheme


def activation_peak_bytes(
    arguments: EngineArguments, scheme: QuantizationScheme | None
) -> tuple[int, str]:
    """Return the peak of the profiled step, and the argument that it goes by.

    The sampler works on the logits of ``max_num_seqs`` sequences over the whole
    vocabulary, on every rank; the forward pass holds an MLP's outputs of
    ``max_num_batched_tokens`` tokens.
    """
    model, itemsize = arguments.model, arguments.itemsize_bytes
    hidden = arguments.max_num_batched_tokens * model.hidden_size * itemsize
    experts = expert_workspaces(arguments)
    throughout = _gemm_workspace_bytes(arguments) + _sampler_state_bytes(arguments)
    throughout += round(constants.SMALL_BUFFERS_GIB * GIB)
    sampled = arguments.max_num_seqs * model.hidden_size * itemsize
    of_sequences = (
        arguments.max_num_seqs * model.vocab_size * itemsize
        + _float32_rows(arguments) * model.vocab_size * 4
        + _sampled_hidden_copies(arguments) * sampled
    )
    of_tokens = constants.SAMPLER_HIDDEN_COPIES * hidden + experts.kept_bytes
    sampler = of_sequences + of_tokens
    inputs = _forward_hidden_copies(arguments) * hidden
    forward = experts.working_bytes + _mlp_outputs(arguments, scheme) + inputs
    compiled = benchmarked_bytes(arguments)
    compiling = compiled + hidden if compiled else 0
    throughout += kept_copy_bytes(arguments)
    stepping = max(sampler, forward) if arguments.is_last_stage else forward
    images, encoding = dummy_image_bytes(arguments), encoding_bytes(arguments)
    if encoding > max(stepping, compiling) + images:
        return round(encoding + throughout), "max_model_len"
    throughout += images
    if compiling > stepping:
        return round(compiling + throughout), "warm_compile_cache"
    by_tokens = forward > sampler or of_tokens > of_sequences
    by_tokens = by_tokens or not arguments.is_last_stage  # it samples nothing
    argument = "max_num_batched_tokens" if by_tokens else "max_num_seqs"
    return round(stepping + throughout), argument


def _float32_rows(arguments: EngineArguments) -> int:
    """Return the rows of logits in float32 that the sampler holds at its peak."""
    rows = arguments.max_num_seqs
    samples_by_flashinfer = arguments.use_flashinfer_sampler
    if arguments.has_second_model_runner:
        return _second_runner_rows(arguments)
    if samples_by_flashinfer is None:
        samples_by_flashinfer = arguments.may_sample_by_flashinfer
    if arguments.engine_minor >= constants.FIRST_NATIVE_WARM_UP_MINOR:
        samples_by_flashinfer = False
    if samples_by_flashinfer:
        return constants.UNSORTED_COPIES * rows
    if _has_triton(arguments):
        return constants.UNSORTED_COPIES * rows + _triton_buffer_rows(rows)
    return _sorted_rows(rows)


def _second_runner_rows(arguments: EngineArguments) -> int:
    """Return the rows of `_float32_rows` of the second model runner."""
    minor, rows = arguments.engine_minor, arguments.max_num_seqs
    if minor < constants.FIRST_BARE_SAMPLER_MINOR:
        return rows
    if minor < constants.FIRST_WARM_SAMPLER_MINOR:
        return 0
    if arguments.use_flashinfer_sampler is False:  # masked where they are
        return rows + _triton_buffer_rows(rows)
    return constants.UNSORTED_COPIES * rows


def _has_triton(arguments: EngineArguments) -> bool:
    minor = arguments.engine_minor
    if arguments.max_num_seqs >= constants.LEAST_TRITON_ROWS:
        return minor >= constants.FIRST_TRITON_SAMPLER_MINOR
    return minor >= constants.FIRST_TRITON_OF_FEW_ROWS_MINOR


def _triton_buffer_rows(rows: int) -> int:
    return min(rows, constants.TRITON_BUFFER_ROWS)


def _sampled_hidden_copies(arguments: EngineArguments) -> int:
    if arguments.has_second_model_runner:
        return constants.SECOND_RUNNER_SAMPLED_HIDDEN_COPIES
    return constants.SAMPLED_HIDDEN_COPIES


def _sampler_state_bytes(arguments: EngineArguments) -> int:
    """Return the bytes of sampler state in the second model runner."""
    is_counted = arguments.engine_minor >= constants.FIRST_COUNTED_STATE_MINOR
    if not (arguments.has_second_model_runner and is_counted):
        return 0
    if not arguments.is_last_stage:
        return 0
    vocabulary = arguments.model.vocab_size
    words = vocabulary + 2 * -(-vocabulary // 32) + constants.SAMPLER_STATE_IDS
    return arguments.max_num_seqs * words * 4


def benchmarked_bytes(arguments: EngineArguments) -> int:
    """Return the copy of the embedding on which a compiler times its kernels.

    A start whose compiled code is cached makes none, and beside an encoder the
    embedding is no part of what is compiled.
    """
    model, first = arguments.model, constants.FIRST_BENCHMARKED_KERNELS_MINOR
    compiles = not (arguments.enforce_eager or arguments.warm_compile_cache)
    if arguments.engine_minor < first or not compiles:
        return 0
    if arguments.stage or model.has_encoder or _has_own_embedding(arguments):
        return 0
    embedding = next(weight_tensors(model, arguments.tensor_parallel_size))
    return tensor_bytes(embedding, arguments.itemsize_bytes, None)


def _has_own_embedding(arguments: EngineArguments) -> bool:
    """Whether ranks look a token up by a kernel that no compiler makes."""
    has_kernel = arguments.engine_minor >= constants.FIRST_FUSED_EMBEDDING_MINOR
    return has_kernel and arguments.tensor_parallel_size > 1


def kept_copy_bytes(arguments: EngineArguments) -> int:
    """Return what the allocator keeps of `benchmarked_bytes`, by the release."""
    is_kept = arguments.engine_minor in constants.KEPT_COPIES_MINORS
    return benchmarked_bytes(arguments) if is_kept else 0


def _sorted_rows(rows: int) -> int:
    if rows >= constants.LEAST_SEGMENTED_ROWS:
        return constants.SORTED_COPIES * rows
    return constants.FULL_SORT_COPIES * rows


def sorting_bytes(arguments: EngineArguments) -> int:
    """Return the bytes that sorting the logits takes beyond sampling without it."""
    rows = arguments.max_num_seqs
    more = _sorted_rows(rows) - constants.UNSORTED_COPIES * rows
    return more * arguments.model.vocab_size * 4


def _gemm_workspace_bytes(arguments: EngineArguments) -> int:
    if is_hopper_or_later(arguments.gpu):
        return constants.GEMM_WORKSPACE_BYTES
    return constants.EARLY_GEMM_WORKSPACE_BYTES


def _forward_hidden_copies(arguments: EngineArguments) -> int:
    if arguments.has_second_model_runner:
        return constants.SECOND_RUNNER_FORWARD_HIDDEN_COPIES
    release = arguments.engine_minor, arguments.engine_patch
    is_eager = release >= constants.FIRST_REUSED_MLP_NAME and not arguments.is_v1
    if is_eager and arguments.model.model_type in constants.REUSES_MLP_NAME:
        return constants.EAGER_FORWARD_HIDDEN_COPIES
    return constants.FORWARD_HIDDEN_COPIES


def _mlp_outputs(
    arguments: EngineArguments, scheme: QuantizationScheme | None
) -> float:
    """Return bytes of a dense MLP's gate, up and activated outputs on one rank."""
    model = arguments.model
    inner = model.num_shared_experts * model.expert_size
    if model.num_moe_layers < model.num_hidden_layers:
        inner = max(inner, model.intermediate_size)
    per_token = 3.0 * arguments.itemsize_bytes
    has_fp8_units = arguments.gpu.fp8_flops_per_s is not None
    if scheme is not None and scheme.quantizes_activation(has_fp8_units):
        per_token += 1
    ranks = arguments.tensor_parallel_size
    return arguments.max_num_batched_tokens * inner / ranks * per_token
