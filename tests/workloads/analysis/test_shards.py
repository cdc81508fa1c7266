"""Curves from samples: how far off, and whether they know."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.workloads.analysis.plain_caches import request
from tests.workloads.shared_traces import MOONCAKE, shared_trace
from workloads.analysis.lru import lru_curve
from workloads.analysis.paths import block_paths
from workloads.analysis.shards import NUM_PARTS, part_of, sampled_lru_curve
from workloads.errors import WorkloadError
from workloads.traces import MooncakeTraceReader

if TYPE_CHECKING:
    from workloads.spec import RequestSpec

SIZES = np.geomspace(10_000, 5_000_000, 12)


@cache
def mooncake() -> list[RequestSpec]:
    return list(MooncakeTraceReader(shared_trace(MOONCAKE)).read())


@cache
def exact() -> np.ndarray:
    paths = block_paths(mooncake(), 16)
    return lru_curve(paths).hits_at(SIZES) / paths.num_readable


@pytest.mark.slow
def test_one_block_in_a_hundred_tells_the_curve_within_its_margin() -> None:
    paths = block_paths(mooncake(), 16, sample_rate=0.01)
    assert len(paths.run) < 0.3 * 310_000
    sampled = sampled_lru_curve(paths)
    off = np.abs(sampled.curve.hits_at(SIZES) / paths.num_readable - exact())
    margin = sampled.margin_at(SIZES) / paths.num_readable
    assert (off <= margin).all()
    assert off.max() < 0.012
    assert (margin > 0.001).all()
    assert (margin < 0.03).all()


@pytest.mark.slow
def test_a_tenth_of_the_blocks_tells_it_better() -> None:
    paths = block_paths(mooncake(), 16, sample_rate=0.1)
    sampled = sampled_lru_curve(paths)
    off = np.abs(sampled.curve.hits_at(SIZES) / paths.num_readable - exact())
    assert off.max() < 0.002
    assert sampled.curve.most_hits == pytest.approx(3_381_090, rel=0.003)


@pytest.mark.slow
def test_samples_are_right_on_average_and_margins_hold_mostly() -> None:
    off, held = [], []
    for seed in range(10):
        paths = block_paths(mooncake(), 16, sample_rate=0.01, sample_seed=seed)
        sampled = sampled_lru_curve(paths)
        off.append(sampled.curve.hits_at(SIZES) / paths.num_readable - exact())
        margin = sampled.margin_at(SIZES) / paths.num_readable
        held.append(np.abs(off[-1]) <= margin)
    scatter = np.std(off, axis=0)
    assert (np.abs(np.mean(off, axis=0)) < 3 * scatter / np.sqrt(10)).all()
    assert np.mean(held) > 0.9
    assert scatter.max() < 0.01


def test_parts_are_disjoint_and_make_up_the_whole() -> None:
    requests = [request([(0, 90), (2 * i, 7 + i)], 5, 2 * i + 1) for i in range(40)]
    paths = block_paths(requests, 4, sample_rate=0.6)
    parts = [part_of(paths, number) for number in range(NUM_PARTS)]
    assert sum(part.num_distinct_blocks for part in parts) == paths.num_distinct_blocks
    for name in ("used", "readable"):
        whole = getattr(paths, name).sum()
        assert sum(getattr(part, name).sum() for part in parts) == whole
    assert {part.num_requests for part in parts} == {40}
    assert parts[0].sample_rate == pytest.approx(0.075)


def test_blocks_are_kept_at_the_rate_and_always_the_same() -> None:
    requests = [request([(2 * i, 64)]) for i in range(2_000)]
    kept = block_paths(requests, 16, sample_rate=0.05)
    assert kept.num_distinct_blocks == pytest.approx(0.05 * 8_000, rel=0.15)
    twice = block_paths(requests * 2, 16, sample_rate=0.05)
    assert twice.num_distinct_blocks == kept.num_distinct_blocks
    other = block_paths(requests, 16, sample_rate=0.05, sample_seed=1)
    assert other.phase.tolist() != kept.phase.tolist()


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, float("nan")])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(WorkloadError, match="sample rate"):
        block_paths([request([(0, 9)])], 4, sample_rate=rate)
