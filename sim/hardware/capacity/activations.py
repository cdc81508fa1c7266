"""Activations that a profiled step holds at its peak: its forward pass's or sampler's.

Counted from the releases' and PyTorch's sources, and held against engine logs: where
the sampler is the peak, of 36 logs none differs by more than 0.01 GiB (text models).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.hardware.capacity import constants
from sim.hardware.capacity.kernels import is_hopper_or_later
from sim.hardware.gpus import GIB

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments
    from sim.hardware.models.quantization import QuantizationScheme


def activation_peak_bytes(
    arguments: EngineArguments, scheme: QuantizationScheme | None
) -> tuple[int, str]:
    """Return the peak of the profiled step, and the argument that it scales with.

    The sampler works on the logits of ``max_num_seqs`` sequences over the whole
    vocabulary, on every rank; the forward pass holds an MLP's outputs of
    ``max_num_batched_tokens`` tokens.
    """
    model, itemsize = arguments.model, arguments.itemsize_bytes
    hidden = arguments.max_num_batched_tokens * model.hidden_size * itemsize
    workspaces = moe_workspace_bytes(arguments)
    throughout = hidden if model.has_encoder else 0  # embeddings of its dummy input
    sampled = arguments.max_num_seqs * model.hidden_size * itemsize
    of_sequences = (
        arguments.max_num_seqs * model.vocab_size * itemsize
        + _float32_rows(arguments) * model.vocab_size * 4
    )
    of_tokens = constants.SAMPLER_HIDDEN_COPIES * hidden
    if arguments.era.keeps_moe_workspaces:
        of_tokens += workspaces
    if _is_counted(arguments):
        throughout += _gemm_workspace_bytes(arguments)
        throughout += round(constants.SMALL_BUFFERS_GIB * GIB)
        of_sequences += constants.SAMPLED_HIDDEN_COPIES * sampled
        sampler = of_sequences + of_tokens
    else:
        sampler = of_sequences + of_tokens + constants.FITTED_BASE_GIB * GIB
    inputs = _forward_hidden_copies(arguments) * hidden
    forward = workspaces + _mlp_outputs(arguments, scheme) + inputs
    if not arguments.is_last_stage:  # it samples nothing
        return round(forward + throughout), "max_num_batched_tokens"
    by_tokens = forward > sampler or of_tokens > of_sequences
    argument = "max_num_batched_tokens" if by_tokens else "max_num_seqs"
    return round(max(sampler, forward) + throughout), argument


def _is_counted(arguments: EngineArguments) -> bool:
    """Whether what a profiled step holds is counted, rather than fitted to 0.19."""
    return arguments.engine_minor <= constants.LAST_COUNTED_MINOR or _has_bare_sampler(
        arguments
    )


def _has_bare_sampler(arguments: EngineArguments) -> bool:
    """Whether the profiled sampler neither sorts nor masks."""
    is_profiled_bare = arguments.engine_minor < constants.FIRST_WARM_SAMPLER_MINOR
    return arguments.has_second_model_runner and is_profiled_bare


def _float32_rows(arguments: EngineArguments) -> float:
    """Return the rows of logits in float32 that the sampler holds at its peak."""
    minor, rows = arguments.engine_minor, arguments.max_num_seqs
    if _has_bare_sampler(arguments):
        return 0 if minor >= constants.FIRST_BARE_SAMPLER_MINOR else rows
    if not _is_counted(arguments):
        return constants.FITTED_COPIES * rows
    samples_by_flashinfer = arguments.use_flashinfer_sampler
    if samples_by_flashinfer is None:
        samples_by_flashinfer = arguments.may_sample_by_flashinfer
    if samples_by_flashinfer:
        return constants.UNSORTED_COPIES * rows
    has_triton = minor >= constants.FIRST_TRITON_SAMPLER_MINOR
    if has_triton and rows >= constants.LEAST_TRITON_ROWS:
        buffer_rows = min(rows, constants.TRITON_BUFFER_ROWS)
        return constants.UNSORTED_COPIES * rows + buffer_rows
    return _sorted_rows(rows)


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


def moe_workspace_bytes(arguments: EngineArguments) -> int:
    """Return the two workspaces of fused experts on one rank, in bytes.

    Every token is copied once an expert that it is routed to: the first workspace
    holds gate and up (or the output), the second the activated product. Source: vLLM
    ``fused_moe`` modular kernels, ``workspace_shapes``.
    """
    model = arguments.model
    if not model.num_moe_layers:
        return 0
    _, inner = arguments.experts.of(model, arguments.tensor_parallel_size)
    rows = arguments.max_num_batched_tokens * model.num_experts_per_tok
    widths = max(2 * inner, model.hidden_size) + max(inner, model.hidden_size)
    return rows * widths * arguments.itemsize_bytes
