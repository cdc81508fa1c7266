"""Memory in which the kernels of routed experts work, and how much of it they keep.

A release picks a kernel by the precision of the experts and the GPU. Kernels that it
calls directly allocate their memory at every call; *modular* ones keep it, so that it
is there while the sampler works, too.

Source: vLLM 0.9.2 to 0.33, ``model_executor/layers/fused_moe`` (`modular_kernel.py`,
``oracle``, `workspace_shapes` of each kernel) and ``layers/quantization``. Where to
look was told by some 150 start-up logs of 0.11 to 0.20 on H200 and B200, which earlier
rules had missed; no number here was fitted to one
(tests/sim/hardware/capacity/test_starts.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from sim.hardware.capacity.kernels import (
    is_amd,
    is_blackwell,
    is_data_centre_blackwell,
    is_hopper,
)
from sim.hardware.models.weights import allocated_bytes

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments

FIRST_KEPT: Final = (11, 0)
"""From here modular kernels share buffers that stay (`SharedResizableBuffer`)."""
FIRST_MODULAR_MINOR: Final = 14
"""From here the kernels of unquantised and FP8 experts are modular on one engine."""
FIRST_FUSED_FP8_MINOR: Final = 16
"""From here FlashInfer's kernels come first where they run (``oracle/fp8.py``)."""
FIRST_TRITON_ON_HOPPER_MINOR: Final = 17
"""From here Hopper takes Triton for blocks of FP8 but with experts over ranks."""
FUSED_UNQUANTISED_MINORS: Final = (20, 22)
"""Between these Hopper takes FlashInfer for unquantised experts, and Blackwell from the
first on."""
FIRST_MODULAR_PACKED_MINOR: Final = {"gptq": 20, "awq": 22, "w4a16": 23}
FIRST_MODULAR_MXFP4_MINOR: Final = 17
"""From here Marlin's kernel of MXFP4, of GPUs without one of Triton's, is modular."""
FIRST_MODULAR_INT8_MINOR: Final = 20
FIRST_SCALED_DEEP_GEMM: Final = (11, 1)
"""From here Hopper's scales are powers of two, and DeepGEMM takes any width."""
FIRST_NARROW_RANKS_MINOR: Final = 13
MOST_DEEP_GEMM_RANKS: Final = 7
"""From `FIRST_NARROW_RANKS_MINOR` on DeepGEMM is left out from eight ranks on."""
LEAST_DEEP_GEMM_WIDTH: Final = 513
DEEP_GEMM_ROWS: Final = 128
FIRST_PADDED_FP8_MINOR: Final = 17
PADDED_WIDTH: Final = 128
"""FlashInfer's experts without a gate are padded to this width from then on. Source:
``layers/quantization/utils/flashinfer_utils.py`` of 0.16 and 0.17."""
MXFP4_BLOCK: Final = 32
"""Elements of four bits that share a byte of scale."""
MXFP4_WIDTHS: Final = {"trtllm": (256, 256), "rocm": (256, 256), "marlin": (256, 128)}
"""Multiples to which kernels pad the hidden state and an expert's width. Source: vLLM
0.12 to 0.26, ``layers/quantization/mxfp4.py`` and ``oracle/mxfp4.py``."""
HOPPER_MXFP4_PADS: Final = ((0, 256, 128), (12, 16, 64), (17, 64, 128), (22, 16, 64))
"""From each minor release on: rows and input elements of a packed expert on Hopper are
multiples of these. Source: ``triton_kernels`` as the wheels of 0.12 to 0.33 have it
(``layout_details/hopper_value.py``); before, as of August 2025, of which one log says
0.5 % more. 0.26 was seen to load 61.43 GiB of gpt-oss-120b, of which this has 61.06."""
HOPPER_MXFP4_SCALES: Final = (256, 2)
"""Rows and blocks of scales there: ``hopper_scale.py``, for eight warps."""
FIRST_ALIGNED_SCALES_MINOR: Final = 25
"""From here vLLM pads blocks of scales to four itself (``_swizzle_mxfp4``)."""
_CHUNKS: Final = (((0, 0), 32_768), ((12, 0), 16_384), ((18, 0), None))
"""Tokens that a kernel takes at once, by release: ``VLLM_FUSED_MOE_CHUNK_SIZE``."""


class _Memory(Enum):
    """How a kernel holds the memory that it works in."""

    EACH_CALL = "each call"
    """Allocated at each call: the wider of the two products, and the activation."""
    TWO_BUFFERS = "two buffers"
    """Kept; the second is as wide as the hidden state at least, as it may be used for
    the output. Triton's, CUTLASS's and Marlin's."""
    ALIGNED_BUFFERS = "aligned buffers"
    """Kept, of rows padded an expert: DeepGEMM's."""
    OUTPUT = "output"
    """Kept is an output of the batch; the rest is FlashInfer's own, at each call."""


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Bytes on one rank that experts hold in the forward pass, and what stays."""

    working_bytes: int = 0
    kept_bytes: int = 0


def expert_workspaces(arguments: EngineArguments) -> Workspaces:
    """Return what the experts of a profiled step work in.

    Every token is copied once an expert that it is routed to.
    """
    model = arguments.model
    if not model.num_moe_layers:
        return Workspaces()
    experts, inner = arguments.experts.of(model, arguments.tensor_parallel_size)
    hidden = model.moe_latent_size or model.hidden_size
    up = inner * (1 + model.mlp_has_gate)
    tokens, itemsize = _tokens_at_once(arguments), arguments.itemsize_bytes
    rows = tokens * model.num_experts_per_tok
    output = arguments.max_num_batched_tokens * hidden * itemsize
    each_call = rows * (max(up, hidden) + inner) * itemsize
    memory = _memory_of(arguments, inner)
    if memory is _Memory.EACH_CALL:
        return Workspaces(each_call)
    if memory is _Memory.OUTPUT:
        return Workspaces(each_call + output, output)
    if memory is _Memory.TWO_BUFFERS:
        kept = rows * (max(up, hidden) + max(inner, hidden)) * itemsize
    else:
        padded = _padded(rows + experts * (DEEP_GEMM_ROWS - 1), DEEP_GEMM_ROWS)
        kept = padded * (up + max(inner, hidden)) * itemsize
        if padded * up * itemsize < output:  # it does not fit the first buffer
            kept += output
    is_kept = _release(arguments) >= FIRST_KEPT
    return Workspaces(kept, kept if is_kept else 0)


def padding_bytes(arguments: EngineArguments) -> int:
    """Return the bytes by which a kernel's layout makes the experts' weights grow."""
    model, minor = arguments.model, arguments.engine_minor
    if (arguments.quantization or "").startswith("mxfp4"):
        return _mxfp4_padding_bytes(arguments)
    if not model.num_moe_layers or model.mlp_has_gate or minor < FIRST_PADDED_FP8_MINOR:
        return 0
    experts, inner = arguments.experts.of(model, arguments.tensor_parallel_size)
    is_fp8 = (arguments.quantization or "").startswith("fp8-tensor")
    if not is_fp8 or _memory_of(arguments, inner) is not _Memory.OUTPUT:
        return 0
    padded = _padded(inner, PADDED_WIDTH)
    row = experts * (model.moe_latent_size or model.hidden_size)
    grown = allocated_bytes(row * padded) - allocated_bytes(row * inner)
    return 2 * model.num_moe_layers * grown


def _mxfp4_padding_bytes(arguments: EngineArguments) -> int:
    model, gpu = arguments.model, arguments.gpu
    if not model.num_moe_layers:
        return 0
    experts, inner = arguments.experts.of(model, arguments.tensor_parallel_size)
    hidden = model.moe_latent_size or model.hidden_size
    gates = 1 + model.mlp_has_gate
    shapes = ((gates * inner, hidden), (hidden, inner))
    plain = [_mxfp4_bytes(experts, *shape) for shape in shapes]
    if is_hopper(gpu):
        laid_out = [_on_hopper(arguments, experts, *shape) for shape in shapes]
    else:
        kernel = "trtllm" if is_data_centre_blackwell(gpu) else "marlin"
        wide, narrow = MXFP4_WIDTHS["rocm" if is_amd(gpu) else kernel]
        hidden, inner = _padded(hidden, wide), _padded(inner, narrow)
        shapes = ((gates * inner, hidden), (hidden, inner))
        laid_out = [_mxfp4_bytes(experts, *shape) for shape in shapes]
    more = sum(laid_out) - sum(plain)
    if is_hopper(gpu) and model.expert_bias:  # in 32 bits there
        more += experts * (gates * inner + hidden) * (4 - arguments.itemsize_bytes)
    return model.num_moe_layers * more


def _mxfp4_bytes(experts: int, rows: int, columns: int) -> int:
    """Return the bytes of packed experts and their scales, as `weight_bytes` does."""
    num_bytes = rows * columns // 2 + rows * columns / MXFP4_BLOCK
    return allocated_bytes(int(experts * num_bytes))


def _on_hopper(
    arguments: EngineArguments, experts: int, rows: int, columns: int
) -> int:
    """Return the bytes of packed experts, and of scales in a tensor of their own."""
    minor = arguments.engine_minor
    pads = reversed(HOPPER_MXFP4_PADS)
    tall, wide = next(each[1:] for each in pads if minor >= each[0])
    packed = _padded(rows, tall) * _padded(columns, wide) // 2
    tall, wide = HOPPER_MXFP4_SCALES
    if minor >= FIRST_ALIGNED_SCALES_MINOR:
        wide = 4
    blocks = _padded(-(-columns // MXFP4_BLOCK), wide)
    scales = _padded(rows, tall) * blocks
    return allocated_bytes(experts * packed) + allocated_bytes(experts * scales)


def _padded(amount: int, multiple: int) -> int:
    return -(-amount // multiple) * multiple


def _release(arguments: EngineArguments) -> tuple[int, int]:
    return arguments.engine_minor, arguments.engine_patch


def _tokens_at_once(arguments: EngineArguments) -> int:
    release = _release(arguments)
    most = next(most for first, most in reversed(_CHUNKS) if release >= first)
    tokens = arguments.max_num_batched_tokens
    return tokens if most is None else min(tokens, most)


def _memory_of(arguments: EngineArguments, inner: int) -> _Memory:
    name = arguments.quantization or ""
    if not name:
        return _of_unquantised(arguments)
    if name.startswith("fp8-block"):
        return _of_fp8_blocks(arguments, inner)
    if name.startswith("fp8"):
        return _of_fp8(arguments, name)
    return _of_the_rest(arguments, name)


def _of_fp8(arguments: EngineArguments, name: str) -> _Memory:
    minor, gpu = arguments.engine_minor, arguments.gpu
    if name.startswith("fp8-tensor"):
        fused = minor >= FIRST_FUSED_FP8_MINOR and (is_hopper(gpu) or is_blackwell(gpu))
        return _Memory.OUTPUT if fused else _modular_from(FIRST_MODULAR_MINOR, minor)
    # A scale a row: CUTLASS's, from Hopper on.
    runs_cutlass = is_hopper(gpu) or is_data_centre_blackwell(gpu)
    first = FIRST_KEPT[0] if runs_cutlass else FIRST_MODULAR_MINOR
    return _modular_from(first, minor)


def _of_the_rest(arguments: EngineArguments, name: str) -> _Memory:
    """Return it for packed and mixed formats, and for those of eight bits."""
    minor, gpu = arguments.engine_minor, arguments.gpu
    if name.startswith("mxfp4"):
        runs_triton = is_hopper(gpu) or is_data_centre_blackwell(gpu)
        marlin = _modular_from(FIRST_MODULAR_MXFP4_MINOR, minor)
        return _Memory.EACH_CALL if runs_triton else marlin
    if name.startswith("nvfp4"):
        if is_data_centre_blackwell(gpu) or minor < FIRST_MODULAR_MINOR:
            return _Memory.EACH_CALL
        return _Memory.OUTPUT if is_blackwell(gpu) else _Memory.TWO_BUFFERS
    firsts = FIRST_MODULAR_PACKED_MINOR.items()
    packed = (first for method, first in firsts if name.startswith(method))
    return _modular_from(next(packed, FIRST_MODULAR_INT8_MINOR), minor)


def _modular_from(first: int, minor: int) -> _Memory:
    return _Memory.TWO_BUFFERS if minor >= first else _Memory.EACH_CALL


def _of_unquantised(arguments: EngineArguments) -> _Memory:
    minor, gpu = arguments.engine_minor, arguments.gpu
    first, last = FUSED_UNQUANTISED_MINORS
    is_fused = minor >= first and arguments.experts.data_parallel_size == 1
    if is_fused and (is_blackwell(gpu) or (is_hopper(gpu) and minor <= last)):
        return _Memory.OUTPUT
    return _modular_from(FIRST_MODULAR_MINOR, minor)


def _of_fp8_blocks(arguments: EngineArguments, inner: int) -> _Memory:
    minor, gpu = arguments.engine_minor, arguments.gpu
    ranks = arguments.tensor_parallel_size * arguments.experts.data_parallel_size
    if minor >= FIRST_FUSED_FP8_MINOR:
        if is_data_centre_blackwell(gpu):
            return _Memory.EACH_CALL  # TensorRT-LLM's, in one kernel
        over_ranks = arguments.experts.enable_expert_parallel and ranks > 1
        if is_hopper(gpu) and (over_ranks or minor < FIRST_TRITON_ON_HOPPER_MINOR):
            return _Memory.OUTPUT
        return _Memory.TWO_BUFFERS
    release, tp = _release(arguments), arguments.tensor_parallel_size
    has_deep_gemm = is_hopper(gpu) or is_data_centre_blackwell(gpu)
    takes_width = inner >= LEAST_DEEP_GEMM_WIDTH or is_data_centre_blackwell(gpu)
    takes_ranks = minor < FIRST_NARROW_RANKS_MINOR or tp <= MOST_DEEP_GEMM_RANKS
    by_deep_gemm = (
        release >= FIRST_KEPT
        and has_deep_gemm
        and takes_ranks
        and (takes_width or release >= FIRST_SCALED_DEEP_GEMM)
    )
    if by_deep_gemm:
        return _Memory.ALIGNED_BUFFERS
    return _modular_from(FIRST_MODULAR_MINOR, minor)
