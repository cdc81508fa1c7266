"""The curve from a sample of the blocks, and how far off that may be.

A block is kept or not by its identity, in every request alike (spatial sampling;
Waldspurger et al., Efficient MRC construction with SHARDS, FAST 2015). Among the blocks
kept, reuse distances shrink by the sampling rate on average, so the sample's curve,
stretched by 1 / rate both ways, estimates the whole one's.

Blocks are drawn and not whole prefixes: in the LRU stack no block is evicted before
those behind it, so whether a block is found depends on its own depth alone, and the
blocks found are a sum over blocks, which drawing each with one probability estimates
without bias. To draw whole prefixes would keep or lose a conversation, or a system
prompt that all requests share, as one, and the scatter would be that of a few draws.

Most of the scatter is of the few blocks that nearly every request reads: kept or lost,
they count too much or not at all. They are found at the smallest sizes, and how many
blocks requests look for in all is known, so the difference is put right there
(SHARDS-adj of the same paper).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from workloads.analysis.hit_curve import HitCurve
from workloads.analysis.lru import lru_curve

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from workloads.analysis.paths import BlockPaths

NUM_PARTS = 8
LEAST_SAMPLED_BLOCKS = 8 * NUM_PARTS
"""Fewer different blocks say nothing: neither of the curve nor of the margin."""
STUDENT_95 = 2.365
"""Two-sided 95 % point of Student's t for `NUM_PARTS` - 1 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class SampledCurve:
    """An estimate of a curve.

    Parameters
    ----------
    curve
        From the whole sample.
    parts
        From each of `NUM_PARTS` disjoint parts of it, as estimates of their own.
    least_blocks
        Blocks for which one of a part stands.
    """

    curve: HitCurve
    parts: tuple[HitCurve, ...]
    least_blocks: float

    def margin_at(self, num_blocks: ArrayLike) -> NDArray[np.float64]:
        """Return half the width of the 95 % interval, in blocks found.

        The parts' scatter over the root of their number, times Student's t. A part
        knows nothing of caches smaller than one of its own blocks stands for; those get
        the margin of that size.
        """
        known = np.maximum(num_blocks, self.least_blocks)
        found = np.array([part.hits_at(known) for part in self.parts])
        scatter = found.std(axis=0, ddof=1) / np.sqrt(len(self.parts))
        margin: NDArray[np.float64] = STUDENT_95 * scatter
        return margin


def sampled_lru_curve(paths: BlockPaths) -> SampledCurve:
    """Return the LRU curve that a sample of the blocks promises."""
    parts = (part_of(paths, number) for number in range(NUM_PARTS))
    return SampledCurve(
        stretched(lru_curve(paths), paths),
        tuple(stretched(lru_curve(part), part) for part in parts),
        NUM_PARTS / paths.sample_rate,
    )


def stretched(curve: HitCurve, paths: BlockPaths) -> HitCurve:
    """Return the curve of all blocks that a sample's tells, put right by SHARDS-adj.

    A curve without a hit stays so: the blocks that the sample looks for too rarely are
    then new to every request.
    """
    rate = paths.sample_rate
    if not curve.most_hits:
        return curve
    missing = paths.num_readable * rate - float(paths.readable.sum())
    num_blocks = np.union1d(curve.num_blocks, [1.0])
    # Added at the least reuse distance, that of a cache of one block of the sample.
    num_hits = curve.hits_at(num_blocks) + missing * np.minimum(num_blocks, 1.0)
    rising = np.maximum.accumulate(np.maximum(num_hits, 0.0))
    return HitCurve(num_blocks / rate, rising / rate)


def part_of(paths: BlockPaths, number: int) -> BlockPaths:
    """Return part `number`: every `NUM_PARTS`-th block of a run, by its hash."""
    first = (paths.phase % np.uint64(NUM_PARTS)).astype(np.int64)
    first = (first[paths.run] + number) % NUM_PARTS
    used = (paths.used + first) // NUM_PARTS
    readable = (paths.readable + first) // NUM_PARTS
    kept = used > 0
    num_kept = np.concatenate(([0], np.cumsum(kept)))
    return replace(
        paths,
        sample_rate=paths.sample_rate / NUM_PARTS,
        run=paths.run[kept],
        used=used[kept],
        readable=readable[kept],
        ends=num_kept[paths.ends],
    )
