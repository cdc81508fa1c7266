"""The kernels' reference: plain arithmetic in high precision, block by block.

Slow on purpose: each sequence's keys and values are gathered through its block table
and attended to in one piece. Held against every kernel before it is timed, and in the
tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.kernels.paged import PagedBatch


def gathered(cache: Tensor, table: Tensor, num_tokens: int) -> Tensor:
    """Return (num_tokens, num_kv_heads, head_dim) of one sequence, in logical order."""
    num_blocks = -(-num_tokens // cache.shape[1])
    blocks = cache[table[:num_blocks].long()]
    return blocks.flatten(0, 1)[:num_tokens]


def paged_attention(batch: PagedBatch, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return causal attention over block tables, computed in `dtype`.

    A sequence's last query token sees all of its keys; without keys it gives zeros. The
    result is (num_query_tokens, num_heads, head_dim).
    """
    out = torch.zeros(batch.query.shape, dtype=dtype, device=batch.query.device)
    first = 0
    for seq, (query_len, context_len) in enumerate(
        zip(batch.query_lens, batch.context_lens, strict=True)
    ):
        rows = slice(first, first + query_len)
        first += query_len
        if query_len and context_len:
            table = batch.block_tables[seq]
            keys = gathered(batch.key_cache, table, context_len).to(dtype)
            values = gathered(batch.value_cache, table, context_len).to(dtype)
            out[rows] = _attention(batch.query[rows].to(dtype), keys, values)
    return out


def _attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    query_len, num_heads, head_dim = query.shape
    context_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * head_dim**-0.5
    position = torch.arange(query_len, device=query.device) + context_len - query_len
    hidden = torch.arange(context_len, device=query.device) > position[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def worst_row_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest `relative_error` of the rows along the last axis.

    Outputs of long contexts are averages of many values, so small that an error of
    theirs vanishes in the norm of the whole.
    """
    difference = (got.to(expected.dtype) - expected).reshape(-1, expected.shape[-1])
    if difference.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    errors = difference.norm(dim=-1)
    norms = expected.reshape(-1, expected.shape[-1]).norm(dim=-1)
    return float(torch.where(norms > 0, errors / norms.clamp_min(1e-300), errors).max())


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return ``|got - expected| / |expected|``, infinite where a value is not finite.

    Two empty or all-zero tensors have no error.
    """
    difference = got.to(expected.dtype) - expected
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    norm = float(expected.norm())
    error = float(difference.norm())
    return error if norm == 0.0 else error / norm
