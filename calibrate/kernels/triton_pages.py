"""Where tokens lie in a paged cache: what both attention kernels in Triton share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_offsets(
    token,
    seen,
    table_ptr,
    head_offset,
    block_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the offset of each token's head, in elements from the cache's begin.

    A block's number is read once a token: the reads of one block hit the same line.
    """
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=seen, other=0)
    slot = (token % BLOCK_SIZE) * token_stride + head_offset
    return block.to(tl.int64) * block_stride + slot


@triton.jit
def softmax_step(score, value, acc, highest, total):
    """Take a tile of scores (base 2) and values into a running softmax.

    `acc` is weighted with respect to `highest`; both and `total` are returned.
    """
    higher = tl.maximum(highest, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(highest - higher)
    total = total * shrink + tl.sum(weight, 1)
    part = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return acc * shrink[:, None] + part, higher, total
