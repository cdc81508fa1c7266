"""The operations around attention as vLLM's compiled kernels, one launch each.

The functions of `calibrate.kernels.torch_ops` with the same arguments. An engine that
compiles its model (the default since 0.8) fuses norms and activation in generated
kernels instead, which move the same bytes.

Source: ``vllm/_custom_ops.py`` of 0.26, the custom operations of ``_C``, ``_moe_C`` and
``_C_cache_ops``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional
from vllm import _custom_ops as ops

EPSILON = 1e-6


def rms_norm_add(hidden: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Add the residual and norm the sum, both in place; return the normed."""
    ops.fused_add_rms_norm(hidden, residual, weight, EPSILON)
    return hidden


def rotary(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> None:
    """Rotate queries and keys in place, halves apart."""
    ops.rotary_embedding(positions, query, key, query.shape[-1], table, True)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of (num_tokens, 2 * width)."""
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


def route(hidden: Tensor, gate: Tensor, experts_per_token: int) -> Tensor:
    """Return the weights of the best experts (tokens, k), the largest first."""
    logits = functional.linear(hidden, gate)
    shape = (hidden.shape[0], experts_per_token)
    weights = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    ids, places = (
        torch.empty(shape, dtype=torch.int32, device=hidden.device) for _ in range(2)
    )
    ops.topk_softmax(weights, ids, places, logits, True)
    return weights


def write_cache(
    keys: Tensor, values: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    """Write keys and values (num_tokens, num_kv_heads, head_dim) into their slots."""
    scale = _scale(keys.device)
    ops.reshape_and_cache_flash(keys, values, *caches, slots, "auto", scale, scale)


@functools.cache
def _scale(device: torch.device) -> Tensor:
    """Return the scale of caches of 16 bits, which is not read."""
    return torch.ones((), dtype=torch.float32, device=device)
