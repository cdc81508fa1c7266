"""Random paged batches: shuffled blocks, ragged lengths, and poison everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calibrate.kernels.paged import PagedBatch, paged_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and blocks of one case."""

    group: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


def poisoned_out(batch: PagedBatch) -> Tensor:
    return torch.full_like(batch.query, float("nan"))


def random_batch(
    shape: Shape, query_lens: Sequence[int], context_lens: Sequence[int], seed: int = 0
) -> PagedBatch:
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // shape.block_size) for length in context_lens]
    num_blocks = sum(counts) + 3  # and some that nobody holds, block 0 perhaps
    order = torch.randperm(num_blocks, generator=rng)
    width = max([*counts, 1]) + 1
    tables = order[-1].repeat(len(counts), width).to(torch.int32)
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    caches = [torch.full(size, float("nan"), dtype=shape.dtype) for _ in range(2)]
    first = 0
    for seq, (count, length) in enumerate(zip(counts, context_lens, strict=True)):
        blocks = order[first : first + count]
        first += count
        tables[seq, :count] = blocks.to(torch.int32)
        for cache in caches:
            held = torch.full((count * shape.block_size, *size[2:]), float("nan"))
            held[:length] = torch.randn(length, *size[2:], generator=rng)
            cache[blocks] = held.to(shape.dtype).view(count, *size[1:])
    heads = shape.group * shape.num_kv_heads
    query = torch.randn(sum(query_lens), heads, shape.head_dim, generator=rng)
    return paged_batch(
        query.to(shape.dtype), (caches[0], caches[1]), tables, query_lens, context_lens
    )


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative error of a row that rounding explains."""
    return {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
