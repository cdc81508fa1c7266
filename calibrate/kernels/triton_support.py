"""Shared parts of the Triton kernels: launch arithmetic, token places, softmax."""

from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Scores are scaled to base 2, where the hardware's exponential works."""


FP_FUSION = True
"""Multiplications fused with additions, said at every launch: Triton's own default
differs between releases, and a profile must not."""


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU.

    Its dot product is wrong on bfloat16, so kernels then widen operands to fp32.
    """
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def next_power_of_2(value: int) -> int:
    """Return the least power of two that is not below `value` (at least 1)."""
    return 1 << max(0, value - 1).bit_length()


def version() -> str:
    return str(triton.__version__)


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
