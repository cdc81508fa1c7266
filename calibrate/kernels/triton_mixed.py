"""Paged attention of prefill chunks and decodes together, in Triton.

Query tokens of all sequences lie behind each other; a sequence has `past_len` keys
before its chunk, and token i of the chunk sees keys 0 to past_len + i::

                 keys 0 ......... past_len ......... past_len + query_len - 1
    query 0      x x x x x x x x x x
    query 1      x x x x x x x x x x x
    query 2      x x x x x x x x x x x x          x: seen

A program takes one *tile* of query tokens of one sequence with all query heads of one
KV head: row r of its tile is query token ``r // GROUP`` and head ``r % GROUP``, so a
decode (one query token) fills GROUP rows. Which tile belongs to which sequence is laid
out on the host (`plan_mixed`), as an engine prepares its metadata before a step.

Keys that all rows see are taken without a mask, the diagonal with one.

Source: FlashAttention-2 (online softmax); vLLM 0.11's scheduling of prefill chunks and
decodes in one batch, each a (query length, context length) pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from calibrate.kernels.triton_support import (
    FP_FUSION,
    LOG2_E,
    interpreted,
    next_power_of_2,
    softmax_step,
    token_offsets,
)

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.kernels.paged import PagedBatch


@triton.jit
def _take_keys(
    acc,
    highest,
    total,
    query,
    position,
    start,
    end,
    key_ptr,
    value_ptr,
    table_ptr,
    head_offset,
    scale_log2,
    block_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Bring keys `start` to `end` into the running softmax of a tile of queries."""
    dim = tl.arange(0, HEAD_PAD)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        seen = token < end
        where = token_offsets(
            token, seen, table_ptr, head_offset, block_stride, token_stride, BLOCK_SIZE
        )
        kv_mask = (dim < HEAD_DIM)[None, :]
        if MASKED:  # the others are whole
            kv_mask = kv_mask & seen[:, None]
        kv_offsets = where[:, None] + dim[None, :]
        key = tl.load(key_ptr + kv_offsets, kv_mask, other=0.0).to(query.dtype)
        value = tl.load(value_ptr + kv_offsets, kv_mask, other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        if MASKED:
            causal = token[None, :] <= position[:, None]
            score = tl.where(causal & seen[None, :], score, float("-inf"))
        acc, highest, total = softmax_step(score, value, acc, highest, total)
    return acc, highest, total


@triton.jit(do_not_specialize=["table_stride"])
def mixed_attention_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tile_seqs_ptr,
    tile_firsts_ptr,
    scale_log2,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend with one tile of query tokens, for one KV head; strides in elements.

    Grid: (number of query tiles, NUM_KV_HEADS).
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(tile_seqs_ptr + tile)
    first_query = tl.load(tile_firsts_ptr + tile)
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start
    context_len = tl.load(context_lens_ptr + seq)
    past_len = context_len - query_len

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_PAD)
    tile_queries: tl.constexpr = ROWS // GROUP
    in_chunk = first_query + row // GROUP
    valid = (row < tile_queries * GROUP) & (in_chunk < query_len)
    head = kv_head * GROUP + row % GROUP
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    out_rows = (query_start + in_chunk).to(tl.int64) * num_heads + head
    offsets = out_rows[:, None] * HEAD_DIM + dim[None, :]
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + offsets, mask=mask, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)

    position = past_len + in_chunk
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    head_offset = kv_head * head_stride
    # every row sees the keys before the tile's first query, and that one
    whole = ((past_len + first_query + 1) // TILE) * TILE
    end = tl.minimum(context_len, past_len + first_query + tile_queries)
    for masked in tl.static_range(2):
        acc, highest, total = _take_keys(
            acc,
            highest,
            total,
            query,
            position,
            whole if masked else 0,
            end if masked else whole,
            key_ptr,
            value_ptr,
            table_ptr,
            head_offset,
            scale_log2,
            block_stride,
            token_stride,
            HEAD_DIM,
            HEAD_PAD,
            BLOCK_SIZE,
            TILE,
            masked == 1,
        )
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, mask=mask)


@dataclass(frozen=True, slots=True)
class MixedShape:
    """How a program works, as far as that may be chosen."""

    rows: int = 128
    """Query tokens times heads of a tile, at most."""
    tile: int = 64
    """Keys that a program loads at once; half of it for heads above 128."""
    num_warps: int = 8
    """Warps of a whole tile of rows; small tiles have four at most."""
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """Tiles of query tokens: made on the host, outside of what is timed."""

    tile_seqs: Tensor
    """(num_tiles,) int32: the sequence of each tile."""
    tile_firsts: Tensor
    """(num_tiles,) int32: the first query token of each, counted from its chunk."""
    shape: MixedShape


def plan_mixed(batch: PagedBatch, shape: MixedShape | None = None) -> MixedPlan:
    """Cut the chunks into tiles; those with the most keys begin first."""
    shape, group = shape or MixedShape(), batch.group
    longest = max(batch.query_lens, default=0)
    rows = min(shape.rows, max(16, next_power_of_2(longest * group)))
    rows = max(rows, next_power_of_2(group))
    warps = shape.num_warps if rows >= 128 else min(4, shape.num_warps)
    tile = shape.tile if batch.head_dim <= 128 else max(16, shape.tile // 2)
    lens = zip(batch.query_lens, batch.context_lens, strict=True)
    pairs = [
        (context_len - query_len + first, seq, first)
        for seq, (query_len, context_len) in enumerate(lens)
        for first in range(0, query_len, rows // group)
    ]
    # a tile that begins last decides when the kernel ends
    pairs.sort(key=lambda pair: -pair[0])
    table = torch.tensor([pair[1:] for pair in pairs], dtype=torch.int32)
    seqs, firsts = table.reshape(-1, 2).T.contiguous().to(batch.query.device)
    used = replace(shape, rows=rows, tile=tile, num_warps=warps)
    return MixedPlan(seqs, firsts, used)


def paged_mixed(out: Tensor, batch: PagedBatch, plan: MixedPlan) -> None:
    """Attend with prefill chunks and decodes of one batch, causally; one launch.

    `out` is (num_query_tokens, num_heads, head_dim), contiguous, the query's dtype. A
    sequence with query tokens has at least as many keys.
    """
    num_tiles = plan.tile_seqs.shape[0]
    if num_tiles == 0:
        return
    mixed_attention_kernel[(num_tiles, batch.num_kv_heads)](
        out,
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.query_starts,
        batch.contexts,
        plan.tile_seqs,
        plan.tile_firsts,
        batch.head_dim**-0.5 * LOG2_E,
        batch.block_tables.stride(0),
        batch.key_cache.stride(0),
        batch.key_cache.stride(1),
        batch.key_cache.stride(2),
        NUM_KV_HEADS=batch.num_kv_heads,
        GROUP=batch.group,
        ROWS=plan.shape.rows,
        HEAD_DIM=batch.head_dim,
        HEAD_PAD=next_power_of_2(batch.head_dim),
        BLOCK_SIZE=batch.block_size,
        TILE=plan.shape.tile,
        WIDEN=interpreted(),
        num_warps=plan.shape.num_warps,
        num_stages=plan.shape.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
