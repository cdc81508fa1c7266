"""How many prompt tokens a prefix cache finds, against its size: all sizes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from workloads._checks import between, whole
from workloads.analysis.belady import (
    NextReads,
    belady_blocks_for,
    belady_hits,
    next_reads,
)
from workloads.analysis.hit_curve import HitCurve
from workloads.analysis.kept_ends import KeptEnds, kept_ends
from workloads.analysis.lru import lru_curve
from workloads.analysis.paths import BlockPaths, block_paths
from workloads.analysis.shards import (
    LEAST_SAMPLED_BLOCKS,
    NUM_PARTS,
    STUDENT_95,
    SampledCurve,
    sampled_lru_curve,
    stretched,
)
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from workloads.spec import RequestSpec

DEFAULT_BLOCK_SIZE = 16
DEFAULT_NUM_BOUNDS = 16
_MOST_BOUNDS = 1000
_RANGE = 1e4
"""Largest over smallest size of the bound."""


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """The smallest LRU cache that finds a share of an infinite one's hits."""

    share: float
    num_blocks: int
    margin_blocks: int
    """Half the width of the 95 % interval of `num_blocks`; 0 where it is exact."""
    clairvoyant_blocks: int
    """The smallest cache that could find as much by any policy."""
    hit_rate: float
    """Prompt tokens found, of all prompt tokens."""


@dataclass(frozen=True, slots=True)
class PrefixCurve:
    """Hits of a prefix cache in the order of arrivals, by its size.

    Parameters
    ----------
    paths
        Blocks of the requests, all or a sample.
    lru
        Blocks found by LRU; exact at every size, or estimated.
    sampled
        The estimate with its parts, or None where the curve is exact.
    reads
        For the clairvoyant bound.
    ends
        Hits of an infinite cache where a hit needs more than its blocks, or None; `lru`
        is then a bound of the hits at each size.
    """

    paths: BlockPaths
    lru: HitCurve
    sampled: SampledCurve | None
    reads: NextReads
    ends: KeptEnds | None = None

    @property
    def possible_hits(self) -> float:
        return self.lru.most_hits if self.ends is None else self.ends.num_hits

    @property
    def num_distinct_blocks(self) -> float:
        return self.paths.num_distinct_blocks / self.paths.sample_rate

    def token_hit_rate(self, num_hits: float) -> float:
        paths = self.paths
        return num_hits * paths.block_size / max(paths.num_prompt_tokens, 1)

    def hit_rate_at(self, num_blocks: float) -> float:
        """Return the share of prompt tokens that LRU finds with so many blocks."""
        return self.token_hit_rate(float(self.lru.hits_at(num_blocks)))

    def margin_at(self, num_blocks: float) -> float:
        """Return half the 95 % interval of `hit_rate_at`; 0 where it is exact."""
        if self.sampled is None:
            return 0.0
        return self.token_hit_rate(float(self.sampled.margin_at(num_blocks)))

    def bounds(self, num_sizes: int = DEFAULT_NUM_BOUNDS) -> HitCurve:
        """Return the clairvoyant bound at sizes that rise by a constant factor.

        They are 0, and from a ten-thousandth of the size at which LRU finds all up to
        that. The bound is known at these sizes only: between them it is no line.
        """
        remedy = "give a number of sizes, such as 16"
        whole("bounds", num_sizes, 2, _MOST_BOUNDS, remedy)
        rate = self.paths.sample_rate
        if not self.lru.most_hits:
            return self.lru
        high = max(round(self.lru.enough_blocks * rate), 1)
        low = max(high / _RANGE, 1)
        sizes = sorted({round(size) for size in np.geomspace(low, high, num_sizes)})
        found = [0, *(belady_hits(self.reads, size) for size in sizes)]
        curve = HitCurve(np.array([0.0, *sizes]), np.array(found, dtype=np.float64))
        return curve if self.sampled is None else stretched(curve, self.paths)

    def need(self, share: float) -> CacheNeed:
        """Return the smallest cache that finds a share, above 0, of the possible hits.

        The share is taken as the decimal number that it prints as.
        """
        between("share", share, 1e-6, 1, "give a share of the possible hits, 0.8 say")
        wanted = self._wanted(share)
        num_blocks = self.lru.blocks_for(wanted)
        return CacheNeed(
            share=share,
            num_blocks=num_blocks,
            margin_blocks=self._margin_blocks(share),
            clairvoyant_blocks=self._clairvoyant(wanted, num_blocks),
            hit_rate=self.hit_rate_at(num_blocks),
        )

    def _wanted(self, share: float) -> float:
        """Return the hits to find: whole blocks, unless they are estimated."""
        if self.sampled is not None:
            return share * self.possible_hits
        return math.ceil(Fraction(repr(float(share))) * round(self.possible_hits))

    def _margin_blocks(self, share: float) -> int:
        if self.sampled is None:
            return 0
        sizes = [part.blocks_for(share * part.most_hits) for part in self.sampled.parts]
        return round(STUDENT_95 * float(np.std(sizes, ddof=1)) / math.sqrt(NUM_PARTS))

    def _clairvoyant(self, num_hits: float, most_blocks: int) -> int:
        paths, rate = self.paths, self.paths.sample_rate
        missing = 0.0
        if self.sampled is not None:
            missing = paths.num_readable * rate - float(paths.readable.sum())
        wanted = math.ceil(num_hits * rate - missing - 1e-6)
        most = math.ceil(most_blocks * rate)
        least = belady_blocks_for(self.reads, wanted, most)
        if self.sampled is not None and num_hits:
            least = max(least, 1)  # a sample knows nothing of smaller caches
        return min(round(least / rate), most_blocks)


def prefix_curve(
    requests: Iterable[RequestSpec],
    block_size: int = DEFAULT_BLOCK_SIZE,
    *,
    prompts_only: bool = False,
    sample_rate: float = 1.0,
    sample_seed: int = 0,
    tail_tokens: Sequence[int] = (),
    retention_interval: int = 0,
) -> PrefixCurve:
    """Return the hits of a prefix cache of every size.

    Requests are served one after the other in the order of their arrivals, each in no
    time: nothing is held by requests that still run. `workloads.analysis.lru` has the
    rules of the cache, and `workloads.analysis.paths.block_paths` the parameters;
    `tail_tokens` and `retention_interval` are those of `kept_ends`, of layers beside
    some that read all tokens.
    """
    paths = block_paths(
        requests,
        block_size,
        prompts_only=prompts_only,
        sample_rate=sample_rate,
        sample_seed=sample_seed,
    )
    reads = next_reads(paths)
    if sample_rate == 1:
        ends = (
            kept_ends(paths, tail_tokens, retention_interval) if tail_tokens else None
        )
        return PrefixCurve(paths, lru_curve(paths), None, reads, ends)
    if tail_tokens:
        raise WorkloadError(
            f"a sample of blocks must not be taken where hits end at few places only;"
            f" got sample rate {sample_rate:g}; leave it out"
        )
    if (num_kept := paths.num_distinct_blocks) < LEAST_SAMPLED_BLOCKS:
        raise WorkloadError(
            f"a sample must have at least {LEAST_SAMPLED_BLOCKS} blocks; got {num_kept}"
            f" by sample rate {sample_rate:g}; raise the sample rate, 1 takes all"
        )
    sampled = sampled_lru_curve(paths)
    return PrefixCurve(paths, sampled.curve, sampled, reads)
