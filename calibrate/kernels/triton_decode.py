"""Paged decode attention in Triton: keys are split over programs, then reduced.

One query token a sequence. Each program takes one *split* of one sequence's context and
one KV head, and computes all query heads that share the KV head, so that under
grouped-query attention keys and values are read once::

    sequence s                 |---- item i -----|--- item i + 1 --|- item i + 2 -|
                               0            split_len      2 * split_len   context_len
    program (i, KV head h)     writes  partial[i, head, :]  and  lse[i, head]
    reduction (s, head)        out[s, head, :] = sum of partial_i * 2**(lse_i - lse)

The splits of all sequences are one list of *items*, laid out on the host: a batch with
one long sequence costs what the sum of its contexts costs, in programs and in partial
results, too. Programs of an item's KV heads are neighbours: so are the heads in memory.
With one split a sequence the first kernel writes the output itself.

Source: FlashDecoding (split of the keys with log-sum-exp reduction); the paged layout
of vLLM, see `calibrate.kernels`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from calibrate.kernels.triton_support import (
    FP_FUSION,
    LOG2_E,
    cdiv,
    interpreted,
    next_power_of_2,
    softmax_step,
    token_offsets,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from calibrate.kernels.paged import PagedBatch


# the width of a table takes every value: a kernel compiled for each would gain nothing
@triton.jit(do_not_specialize=["table_stride"])
def decode_split_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    context_lens_ptr,
    item_seqs_ptr,
    item_starts_ptr,
    scale_log2,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
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

    Grid: (number of items * NUM_KV_HEADS,).
    """
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    seq = tl.load(item_seqs_ptr + item)
    start = tl.load(item_starts_ptr + item)
    end = tl.minimum(start + split_len, tl.load(context_lens_ptr + seq))

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
        split_rows = item.to(tl.int64) * num_heads + heads
        lse = tl.where(total > 0.0, highest + tl.log2(safe), float("-inf"))
        tl.store(lse_ptr + split_rows, lse, mask=group < GROUP)
        partial_offsets = split_rows[:, None] * HEAD_DIM + dim[None, :]
        tl.store(partial_ptr + partial_offsets, acc, mask=tile_mask)


@triton.jit
def decode_reduce_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    first_items_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Combine the splits of one sequence's query head.

    Grid: (num_sequences, NUM_HEADS).
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, HEAD_PAD)
    mask = dim < HEAD_DIM
    first = tl.load(first_items_ptr + seq)
    num_splits = tl.load(first_items_ptr + seq + 1) - first
    first_row = first.to(tl.int64) * NUM_HEADS + head
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((HEAD_PAD,), tl.float32)
    for split in range(0, num_splits):
        at = first_row + split * NUM_HEADS
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
    row = seq.to(tl.int64) * NUM_HEADS + head
    tl.store(out_ptr + row * HEAD_DIM + dim, out, mask=mask)


MIN_SPLIT_LEN = 256
"""Keys below which a split costs more to reduce than it saves."""
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How a program works, as far as that may be chosen."""

    tile: int = 64
    """Tokens that a program loads at once."""
    num_warps: int = 4
    num_stages: int = 3
    """Tiles under way: the next one's block numbers are read while it loads."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a decode is cut: made on the host, outside of what is timed."""

    item_seqs: Tensor
    """(num_items,), int32: the sequence of each split."""
    item_starts: Tensor
    """(num_items,), int32: its first token."""
    first_items: Tensor
    """(num_sequences + 1,), int32: where each sequence's splits begin."""
    split_len: int
    """Tokens of a split, a multiple of the tile."""
    single: bool
    """Whether no sequence has more than one split; then each has exactly one."""
    shape: DecodeShape

    @property
    def num_items(self) -> int:
        """Splits of all sequences."""
        return self.item_seqs.shape[0]


def split_length(
    context_lens: Sequence[int],
    num_kv_heads: int,
    num_programs: int,
    shape: DecodeShape,
) -> int:
    """Return the tokens of a split with which about `num_programs` have work."""
    longest = max(context_lens, default=0)
    share = cdiv(sum(context_lens) * num_kv_heads, max(1, num_programs))
    least = max(MIN_SPLIT_LEN, share, cdiv(longest, MAX_SPLITS))
    return cdiv(least, shape.tile) * shape.tile


def plan_decode(
    context_lens: Sequence[int],
    num_kv_heads: int,
    num_programs: int,
    device: torch.device,
    shape: DecodeShape | None = None,
) -> DecodePlan:
    """Cut the contexts so that about `num_programs` programs have work."""
    shape = shape or DecodeShape()
    split_len = split_length(context_lens, num_kv_heads, num_programs, shape)
    single = max(context_lens, default=0) <= split_len
    counts = [1 if single else cdiv(length, split_len) for length in context_lens]
    items = [
        (seq, split * split_len)
        for seq, count in enumerate(counts)
        for split in range(count)
    ]
    table = torch.tensor(items, dtype=torch.int32).reshape(-1, 2).T.contiguous()
    seqs, starts = table.to(device)
    firsts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return DecodePlan(seqs, starts, firsts.to(device), split_len, single, shape)


class DecodeWorkspace:
    """Buffers between the two kernels, allocated before a graph is captured.

    Attributes
    ----------
    partial
        (num_items, num_heads, head_dim), fp32.
    lse
        (num_items, num_heads), fp32, base 2.
    """

    def __init__(self, query: Tensor, plan: DecodePlan) -> None:
        _, num_heads, head_dim = query.shape
        # never read where one split is all
        size = (0 if plan.single else plan.num_items, num_heads, head_dim)
        self.partial = torch.empty(size, dtype=torch.float32, device=query.device)
        self.lse = torch.empty(size[:2], dtype=torch.float32, device=query.device)


def paged_decode(
    out: Tensor, batch: PagedBatch, plan: DecodePlan, workspace: DecodeWorkspace
) -> None:
    """Attend with one query token a sequence; launches one or two kernels, no more.

    `out` is (num_sequences, num_heads, head_dim), contiguous, the query's dtype; `plan`
    is of the same lengths.
    """
    if batch.num_seqs == 0:
        return
    head_pad = next_power_of_2(batch.head_dim)
    decode_split_kernel[(plan.num_items * batch.num_kv_heads,)](
        out,
        workspace.partial,
        workspace.lse,
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.contexts,
        plan.item_seqs,
        plan.item_starts,
        batch.head_dim**-0.5 * LOG2_E,
        batch.block_tables.stride(0),
        batch.key_cache.stride(0),
        batch.key_cache.stride(1),
        batch.key_cache.stride(2),
        plan.split_len,
        NUM_KV_HEADS=batch.num_kv_heads,
        GROUP=batch.group,
        GROUP_PAD=max(16, next_power_of_2(batch.group)),
        HEAD_DIM=batch.head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=batch.block_size,
        TILE=plan.shape.tile,
        SINGLE=plan.single,
        WIDEN=interpreted(),
        num_warps=plan.shape.num_warps,
        num_stages=plan.shape.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    if not plan.single:
        decode_reduce_kernel[(batch.num_seqs, batch.num_heads)](
            out,
            workspace.partial,
            workspace.lse,
            plan.first_items,
            NUM_HEADS=batch.num_heads,
            HEAD_DIM=batch.head_dim,
            HEAD_PAD=head_pad,
            num_warps=2,
            enable_fp_fusion=FP_FUSION,
        )
