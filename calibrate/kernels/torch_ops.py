"""The operations in plain torch: the fallback, and the path that runs on a CPU.

Attention gathers a sequence's keys and values through its block table and calls
``scaled_dot_product_attention``; blocks are moved by one ``Tensor.copy_`` a page or
block. Everything enqueues on the current stream and, with the lengths on the host,
can be captured in a CUDA graph.

The operations of a layer around attention are here, too, in the way an engine without
kernels of its own would spell them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from calibrate.kernels.reference import gathered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from calibrate.kernels.paged import PagedBatch


def attention(out: Tensor, batch: PagedBatch) -> None:
    """Attend causally into (num_query_tokens, num_heads, head_dim).

    Zeros without keys.
    """
    first = 0
    for seq, (query_len, context_len) in enumerate(
        zip(batch.query_lens, batch.context_lens, strict=True)
    ):
        rows = slice(first, first + query_len)
        first += query_len
        if query_len == 0:
            continue
        if context_len == 0:
            out[rows].zero_()
            continue
        query = batch.query[rows]
        table = batch.block_tables[seq]
        keys = gathered(batch.key_cache, table, context_len).to(query.dtype)
        values = gathered(batch.value_cache, table, context_len).to(query.dtype)
        out[rows] = _attend(query, keys, values)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return (query_len, num_heads, head_dim); the last query token sees all keys."""
    query_len, context_len = query.shape[0], keys.shape[0]
    mask = None
    if 1 < query_len < context_len:
        full = torch.ones(query_len, context_len, dtype=torch.bool, device=query.device)
        mask = full.tril(context_len - query_len)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=query_len == context_len and query_len > 1,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def swap_blocks(
    source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy pairs of blocks between two pools, one asynchronous copy a page."""
    for layer in range(source.shape[0]):
        for half in range(2):
            source_plane, target_plane = source[layer, half], target[layer, half]
            for first, second in pairs:
                target_plane[second].copy_(source_plane[first], non_blocking=True)


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks onto others of the same pool, in every layer; one copy a pair."""
    for first, second in pairs:
        pool[:, :, second].copy_(pool[:, :, first], non_blocking=True)


def write_cache(
    keys: Tensor, values: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    """Write keys and values (num_tokens, num_kv_heads, head_dim) into their slots.

    Slots are int64 (num_tokens,): ``block * block_size + offset`` of each token.
    """
    for new, cache in zip((keys, values), caches, strict=True):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)


def rms_norm_add(hidden: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Add the residual in place and return the normalised sum, (tokens, width)."""
    residual.add_(hidden)
    return functional.rms_norm(residual, weight.shape, weight, 1e-6)


def rotary(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> None:
    """Rotate queries and keys in place, halves apart (the convention of Llama).

    `table` is (positions, head_dim), the cosines before the sines, each of half a head.
    """
    cosine, sine = table[positions][:, None].chunk(2, dim=-1)
    for heads in (query, key):
        low, high = heads.chunk(2, dim=-1)
        rotated = torch.cat(
            (low * cosine - high * sine, high * cosine + low * sine), -1
        )
        heads.copy_(rotated)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of (num_tokens, 2 * width)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def route(hidden: Tensor, gate: Tensor, experts_per_token: int) -> Tensor:
    """Return the weights of the best experts (tokens, k), the largest first."""
    logits = functional.linear(hidden, gate)
    best = torch.topk(logits, experts_per_token, dim=-1).values
    return best.softmax(-1)


def sample(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw a token for each row of logits by fp32 noise, which is overwritten."""
    noise.exponential_()
    return torch.softmax(logits.float(), dim=-1).div_(noise).argmax(dim=-1)
