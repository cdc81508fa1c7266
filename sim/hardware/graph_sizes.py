"""Tokens of the CUDA graphs that a release captures: strides that lie further apart."""

from __future__ import annotations

from typing import Final

_SMALLEST: Final = (1, 2, 4)
_STRIDE: Final = 8
_WIDE_STRIDE: Final = 16
_WIDE_FROM: Final = 256
"""From here on sizes lie further apart, since 0.11.2."""
MOST_TOKENS: Final = 512
"""Of the largest graph of V1."""


def strided_sizes(most: int, *, is_narrow: bool = False) -> tuple[int, ...]:
    """Return sizes of up to `most` tokens, in ascending order.

    Parameters
    ----------
    most
        Tokens of the largest.
    is_narrow
        Whether all of them lie as close as the small ones.
    """
    last_narrow = most if is_narrow else _WIDE_FROM - 1
    sizes = [size for size in _SMALLEST if size <= most]
    sizes += range(_STRIDE, min(most, last_narrow) + 1, _STRIDE)
    if last_narrow < most:
        sizes += range(_WIDE_FROM, most + 1, _WIDE_STRIDE)
    return tuple(sizes)
