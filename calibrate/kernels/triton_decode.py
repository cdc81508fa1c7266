"""Paged decode attention in Triton: keys are split over programs, then reduced.

One query token a sequence. Each program takes one sequence, one KV head and one *split*
of the context, and computes all query heads that share the KV head, so that under
grouped-query attention keys and values are read once::

    sequence s, KV head h      |---- split 0 ----|---- split 1 ----|-- split 2 --|
                               0            split_len      2 * split_len   context_len
    program (s, h, i) writes   partial[s, head, i, :]  and  lse[s, head, i]
    reduction (s, head)        out[s, head, :] = sum of partial_i * 2**(lse_i - lse)

With a single split the first kernel writes the output itself. Splits have a length and
not a number: a batch with one long sequence costs what the sum of its contexts costs.

Source: FlashDecoding (split of the keys with log-sum-exp reduction); the paged layout
of vLLM, see `calibrate.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from calibrate.kernels.triton_pages import softmax_step, token_offsets
from calibrate.kernels.triton_support import (
    FP_FUSION,
    LOG2_E,
    cdiv,
    interpreted,
    next_power_of_2,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from calibrate.kernels.paged import PagedBatch


@triton.jit
def decode_split_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    context_lens_ptr,
    scale_log2,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    num_splits,
    split_len,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SINGLE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend to one split of one sequence's keys, for one KV head; strides in elements.

    Grid: (num_sequences, NUM_KV_HEADS, num_splits).
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + seq)
    start = split * split_len
    end = tl.minimum(start + split_len, context_len)

    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    heads = kv_head * GROUP + group
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    rows = seq.to(tl.int64) * num_heads + heads
    tile_mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query_offsets = rows[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(query_ptr + query_offsets, mask=tile_mask, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)

    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    head_offset = kv_head * head_stride
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        seen = token < end
        where = token_offsets(
            token, seen, table_ptr, head_offset, block_stride, token_stride, BLOCK_SIZE
        )
        kv_mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
        kv_offsets = where[:, None] + dim[None, :]
        # a cache of 8 bits is widened to the precision of the queries
        key = tl.load(key_ptr + kv_offsets, kv_mask, other=0.0).to(query.dtype)
        value = tl.load(value_ptr + kv_offsets, kv_mask, other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        score = tl.where(seen[None, :], score, float("-inf"))
        acc, highest, total = softmax_step(score, value, acc, highest, total)

    # an empty split has no weight, and an empty sequence gives zeros
    safe = tl.where(total > 0.0, total, 1.0)
    acc = acc / safe[:, None]
    if SINGLE:
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + query_offsets, out, mask=tile_mask)
    else:
        split_rows = rows * num_splits + split
        lse = tl.where(total > 0.0, highest + tl.log2(safe), float("-inf"))
        tl.store(lse_ptr + split_rows, lse, mask=group < GROUP)
        partial_offsets = split_rows[:, None] * HEAD_DIM + dim[None, :]
        tl.store(partial_ptr + partial_offsets, acc, mask=tile_mask)


@triton.jit
def decode_reduce_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    num_splits,
    split_len,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Combine the splits of one sequence's query head; only those that hold keys.

    Grid: (num_sequences, NUM_HEADS).
    """
    seq = tl.program_id(0)
    row = seq.to(tl.int64) * NUM_HEADS + tl.program_id(1)
    dim = tl.arange(0, HEAD_PAD)
    mask = dim < HEAD_DIM
    used = tl.cdiv(tl.load(context_lens_ptr + seq), split_len)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((HEAD_PAD,), tl.float32)
    for split in range(0, used):
        at = row * num_splits + split
        lse = tl.load(lse_ptr + at)
        part = tl.load(partial_ptr + at * HEAD_DIM + dim, mask=mask, other=0.0)
        higher = tl.maximum(highest, lse)
        shrink = tl.exp2(highest - higher)
        weight = tl.exp2(lse - higher)
        acc = acc * shrink + part * weight
        total = total * shrink + weight
        highest = higher
    out = acc / tl.where(total > 0.0, total, 1.0)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + dim, out, mask=mask)


MIN_SPLIT_LEN = 256
"""Keys below which a split costs more to reduce than it saves."""
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a decode is cut: made on the host, outside of what is timed."""

    num_splits: int
    split_len: int
    """Tokens of a split, a multiple of `tile`."""
    tile: int
    """Tokens that a program loads at once."""
    num_warps: int = 4
    num_stages: int = 2


def plan_decode(
    context_lens: Sequence[int], num_kv_heads: int, num_programs: int, tile: int = 64
) -> DecodePlan:
    """Cut the contexts so that about `num_programs` programs have work.

    Parameters
    ----------
    context_lens
        Tokens of each sequence.
    num_kv_heads
        KV heads on this rank.
    num_programs
        Programs that fill the device: a few for each of its multiprocessors.
    tile
        Tokens that a program loads at once.
    """
    longest = max(context_lens, default=0)
    share = cdiv(sum(context_lens) * num_kv_heads, max(1, num_programs))
    least = max(MIN_SPLIT_LEN, share, cdiv(longest, MAX_SPLITS))
    split_len = cdiv(least, tile) * tile
    return DecodePlan(max(1, cdiv(longest, split_len)), split_len, tile)


class DecodeWorkspace:
    """Buffers between the two kernels, allocated before a graph is captured.

    Attributes
    ----------
    partial
        (num_sequences, num_heads, num_splits, head_dim), fp32.
    lse
        (num_sequences, num_heads, num_splits), fp32, base 2.
    """

    def __init__(self, query: Tensor, plan: DecodePlan) -> None:
        num_seqs, num_heads, head_dim = query.shape
        # never read where one split is all
        splits = plan.num_splits if plan.num_splits > 1 else 0
        size = (num_seqs, num_heads, splits, head_dim)
        self.partial = torch.empty(size, dtype=torch.float32, device=query.device)
        self.lse = torch.empty(size[:3], dtype=torch.float32, device=query.device)


def paged_decode(
    out: Tensor, batch: PagedBatch, plan: DecodePlan, workspace: DecodeWorkspace
) -> None:
    """Attend with one query token a sequence; launches one or two kernels, no more.

    Parameters
    ----------
    out
        (num_sequences, num_heads, head_dim), contiguous, the query's dtype.
    batch
        One query token a sequence.
    plan
        From `plan_decode` over the same lengths.
    workspace
        Buffers for this query and plan.
    """
    if batch.num_seqs == 0:
        return
    head_pad = next_power_of_2(batch.head_dim)
    decode_split_kernel[(batch.num_seqs, batch.num_kv_heads, plan.num_splits)](
        out,
        workspace.partial,
        workspace.lse,
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.contexts,
        batch.head_dim**-0.5 * LOG2_E,
        batch.block_tables.stride(0),
        batch.key_cache.stride(0),
        batch.key_cache.stride(1),
        batch.key_cache.stride(2),
        plan.num_splits,
        plan.split_len,
        NUM_KV_HEADS=batch.num_kv_heads,
        GROUP=batch.group,
        GROUP_PAD=max(16, next_power_of_2(batch.group)),
        HEAD_DIM=batch.head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=batch.block_size,
        TILE=plan.tile,
        SINGLE=plan.num_splits == 1,
        WIDEN=interpreted(),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    if plan.num_splits > 1:
        decode_reduce_kernel[(batch.num_seqs, batch.num_heads)](
            out,
            workspace.partial,
            workspace.lse,
            batch.contexts,
            plan.num_splits,
            plan.split_len,
            NUM_HEADS=batch.num_heads,
            HEAD_DIM=batch.head_dim,
            HEAD_PAD=head_pad,
            num_warps=2,
            enable_fp_fusion=FP_FUSION,
        )
