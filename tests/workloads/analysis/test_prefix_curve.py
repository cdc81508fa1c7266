"""The answer: how large a cache finds a share of what can be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.analysis.plain_caches import request
from tests.workloads.analysis.test_lru import specs
from tests.workloads.shared_traces import MOONCAKE, SHAREGPT, shared_trace
from workloads.analysis import HitCurve, prefix_curve
from workloads.errors import WorkloadError
from workloads.traces import LlmServingSimTraceReader, MooncakeTraceReader

if TYPE_CHECKING:
    from workloads.spec import RequestSpec


def test_ramps_add_up_to_a_curve() -> None:
    starts, stops = np.array([0, 2, 2]), np.array([3, 4, 6])
    curve = HitCurve.of_ramps(starts, stops)
    found = [sum(min(max(c - a, 0), b - a) for a, b in zip(starts, stops, strict=True))
             for c in range(8)]  # fmt: skip
    assert found == [0, 1, 2, 5, 7, 8, 9, 9]
    assert curve.hits_at(range(8)).tolist() == found
    assert [curve.blocks_for(hits) for hits in (0, 1, 3, 5, 6, 9)] == [0, 1, 3, 3, 4, 6]
    assert (curve.most_hits, curve.enough_blocks) == (9, 6)


@given(requests=specs, share=st.floats(0.01, 1.0))
def test_the_answer_is_the_smallest_cache_that_finds_the_share(
    requests: list[RequestSpec], share: float
) -> None:
    curve = prefix_curve(requests, 3)
    need = curve.need(share)
    wanted = share * curve.possible_hits - 1e-6
    assert curve.lru.hits_at(need.num_blocks) >= wanted
    assert need.num_blocks == 0 or curve.lru.hits_at(need.num_blocks - 1) < wanted
    assert need.clairvoyant_blocks <= need.num_blocks
    assert need.margin_blocks == 0
    bounds = curve.bounds(5)
    assert (bounds.num_hits >= curve.lru.hits_at(bounds.num_blocks)).all()
    assert bounds.most_hits == curve.possible_hits


def test_mooncake_needs_so_much_for_four_fifths() -> None:
    curve = prefix_curve(MooncakeTraceReader(shared_trace(MOONCAKE)).read())
    assert curve.token_hit_rate(curve.possible_hits) == pytest.approx(0.37362, abs=1e-5)
    need = curve.need(0.8)
    assert (need.num_blocks, need.clairvoyant_blocks) == (675_685, 94_607)
    assert need.hit_rate == pytest.approx(0.8 * 0.37362, abs=1e-5)


@pytest.mark.slow
def test_a_hundredth_of_mooncake_gives_about_the_same_answer() -> None:
    requests = MooncakeTraceReader(shared_trace(MOONCAKE)).read()
    sampled = prefix_curve(requests, sample_rate=0.01)
    guess = sampled.need(0.8)
    assert abs(guess.num_blocks - 675_685) < guess.margin_blocks < 70_000
    assert guess.clairvoyant_blocks == pytest.approx(94_607, rel=0.1)
    bounds = sampled.bounds()
    assert (bounds.num_hits >= sampled.lru.hits_at(bounds.num_blocks) - 1e-6).all()


def test_sharegpt_finds_the_ideal_in_an_infinite_cache() -> None:
    requests = list(LlmServingSimTraceReader(shared_trace(SHAREGPT)).read())
    curve = prefix_curve(requests, 16, prompts_only=True)
    # 19,520 tokens by traces/README.md, which may find a prompt whole.
    assert curve.possible_hits * 16 == 19_520
    assert curve.num_distinct_blocks == 14_722


def test_a_workload_that_shares_nothing_needs_nothing() -> None:
    curve = prefix_curve([request([(2 * i, 50)]) for i in range(5)])
    assert curve.need(0.8).num_blocks == 0
    assert curve.bounds().most_hits == 0.0


@pytest.mark.parametrize("share", [0.0, 1.01, float("nan")])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(WorkloadError, match="share must be"):
        prefix_curve([request([(0, 9)])]).need(share)
