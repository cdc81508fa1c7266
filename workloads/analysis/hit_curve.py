"""Hits against the size of the cache: piecewise linear, and exact all along."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_ROUNDING = Fraction(1, 10**9)
"""Of a block: rounding may add so much to an estimated size."""


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Blocks found in the cache, by its size in blocks.

    Parameters
    ----------
    num_blocks
        Sizes of the cache at which the slope changes; float64 of shape ``(k,)``,
        rising, the first is 0.
    num_hits
        Blocks found at these sizes, never falling, the first is 0; whole numbers unless
        they were estimated from a sample. Between two sizes the curve is a line, and
        beyond the last it is level.
    """

    num_blocks: NDArray[np.float64]
    num_hits: NDArray[np.float64]

    @classmethod
    def of_ramps(cls, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> HitCurve:
        """Return the curve of blocks found at reuse distances ``start + 1 .. stop``.

        A cache of more than ``start`` blocks finds one block of a ramp, one of ``stop``
        finds all; int64 of shape ``(m,)``.
        """
        edges = np.concatenate(([0], starts, stops))
        steps = np.repeat([0, 1, -1], [1, len(starts), len(stops)])
        num_blocks, where = np.unique(edges, return_inverse=True)
        slopes = np.zeros(len(num_blocks), dtype=np.int64)
        np.add.at(slopes, where, steps)
        gains = np.cumsum(slopes)[:-1] * np.diff(num_blocks)
        num_hits = np.concatenate(([0], np.cumsum(gains)))
        return cls(num_blocks.astype(np.float64), num_hits.astype(np.float64))

    @property
    def most_hits(self) -> float:
        return float(self.num_hits[-1])

    @property
    def enough_blocks(self) -> float:
        return float(self.num_blocks[-1])

    def hits_at(self, num_blocks: ArrayLike) -> NDArray[np.float64]:
        # Exact for whole numbers below 2**53: slopes between points are whole.
        sizes = np.asarray(num_blocks, dtype=np.float64)
        found: NDArray[np.float64] = np.interp(sizes, self.num_blocks, self.num_hits)
        return found

    def blocks_for(self, num_hits: float) -> int:
        """Return the smallest cache that finds so many blocks, at most `most_hits`."""
        index = int(np.searchsorted(self.num_hits, num_hits))
        if index == 0:
            return 0
        index = min(index, len(self.num_hits) - 1)
        # In fractions, since a step of a block may be millions of hits high.
        low, high = (Fraction(size) for size in self.num_blocks[index - 1 : index + 1])
        few, many = (Fraction(hits) for hits in self.num_hits[index - 1 : index + 1])
        share = Fraction(1)
        if many > few:
            share = min((Fraction(num_hits) - few) / (many - few), share)
        return math.ceil(low + share * (high - low) - _ROUNDING)
