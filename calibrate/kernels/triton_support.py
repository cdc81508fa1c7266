"""What the Triton kernels share: launch arithmetic and the choice of tiles."""

from __future__ import annotations

import os

import triton

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
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(value: int) -> int:
    """Return the least power of two that is not below `value` (at least 1)."""
    return 1 << max(0, value - 1).bit_length()


def version() -> str:
    """Return Triton's version, for provenance."""
    return str(triton.__version__)
