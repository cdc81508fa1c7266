"""Routed experts by vLLM's kernels: sorting, two products, activation and sum.

Each function takes the weights of a layer into a kernel's own layout, and returns what
computes them for tokens and their choice. An engine takes, on Hopper and without
flashinfer and DeepGEMM:

fused_moe
    Triton's, for weights of 16 bits and of FP8; with the tiles that vLLM ships for a
    GPU, a width and a precision, else its default ones.
matmul_ogs
    Triton's `triton_kernels` that vLLM brings, for MXFP4. It chooses the experts from
    the logits by itself, which is part of its time.
marlin
    For MXFP4, where `triton_kernels` cannot be used.

Source: ``vllm/model_executor/layers/fused_moe`` of 0.26: ``fused_moe.py``,
``experts/gpt_oss_triton_kernels_moe.py``, ``experts/marlin_moe.py``; paddings
``oracle/mxfp4.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    fp8_w8a8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

from calibrate.kernels.experts import BLOCK, Experts, Routing, given, padded

if TYPE_CHECKING:
    from collections.abc import Mapping

Layer = Callable[[Tensor, Routing], Tensor]
_OGS_WIDTH = 64
_MARLIN_WIDTH = 128
_MARLIN_HIDDEN = 256
"""Multiples that widths and hidden sizes are padded to."""


def fused_moe(experts: Experts) -> Layer:
    config = None
    if experts.gate_up_scale is not None:
        is_blocked = experts.dtype == "fp8_block"
        config = fp8_w8a8_moe_quant_config(
            w1_scale=experts.gate_up_scale,
            w2_scale=experts.down_scale,
            block_shape=[BLOCK, BLOCK] if is_blocked else None,
        )

    def layer(hidden: Tensor, routing: Routing) -> Tensor:
        out: Tensor = fused_experts(
            hidden,
            experts.gate_up,
            experts.down,
            routing.weights,
            routing.ids,
            quant_config=config,
        )
        return out

    return layer


def matmul_ogs(experts: Experts) -> Layer:
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.experts import (  # noqa: PLC0415
        gpt_oss_triton_kernels_moe as moe,
    )
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import (  # noqa: PLC0415
        _swizzle_mxfp4,
    )

    at = padded(experts, 1, _OGS_WIDTH)
    weights, precisions = [], []
    for stored, scale in ((at.gate_up, at.gate_up_scale), (at.down, at.down_scale)):
        weight, flex, swizzled = _swizzle_mxfp4(stored, scale)
        weights.append(weight)
        precisions.append(
            PrecisionConfig(weight_scale=swizzled, flex_ctx=FlexCtx(rhs_data=flex))
        )
    biases = [given(bias).float() for bias in (at.gate_up_bias, at.down_bias)]
    config = mxfp4_w4a16_moe_quant_config(*precisions, *biases)

    def layer(hidden: Tensor, routing: Routing) -> Tensor:
        out: Tensor = moe.triton_kernel_moe_forward(
            hidden,
            *weights,
            routing.logits,
            topk=routing.ids.shape[1],
            renormalize=True,
            quant_config=config,
        )
        return out

    return layer


def marlin(experts: Experts) -> Layer:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import (  # noqa: PLC0415
        fused_marlin_moe,
    )
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (  # noqa: PLC0415
        prepare_moe_mxfp4_layer_for_marlin,
    )
    from vllm.scalar_type import scalar_types  # noqa: PLC0415

    hidden_size = experts.down.shape[1]
    at = padded(experts, _MARLIN_HIDDEN, _MARLIN_WIDTH)
    up, down, up_scale, down_scale, up_bias, down_bias = (
        prepare_moe_mxfp4_layer_for_marlin(
            SimpleNamespace(params_dtype=given(at.down_bias).dtype),
            at.gate_up,
            at.down,
            at.gate_up_scale,
            at.down_scale,
            at.gate_up_bias,
            at.down_bias,
        )
    )
    wider = at.down.shape[1] - hidden_size

    def layer(hidden: Tensor, routing: Routing) -> Tensor:
        padded = functional.pad(hidden, (0, wider)) if wider else hidden
        out = torch.empty_like(padded)
        fused_marlin_moe(
            padded,
            up,
            down,
            up_bias,
            down_bias,
            up_scale,
            down_scale,
            routing.weights,
            routing.ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            activation=MoEActivation.SWIGLUOAI,
            moe_sum=lambda parts, into, *_: ops.moe_sum(parts, into),
            output=out,
        )
        return out[:, :hidden_size]

    return layer


KERNELS: Mapping[str, Callable[[Experts], Layer]] = {
    "fused_moe": fused_moe,
    "matmul_ogs": matmul_ogs,
    "marlin": marlin,
}
"""By variant."""
