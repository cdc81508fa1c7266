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
from workloads.requests.columns import RequestColumns
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


def test_a_steep_curve_is_read_to_the_block() -> None:
    curve = HitCurve(np.array([0.0, 2.0]), np.array([0.0, 6e6]))
    assert [curve.blocks_for(hits) for hits in (3e6, 3e6 + 1)] == [1, 2]


def test_a_share_is_the_decimal_that_was_written() -> None:
    # 55 blocks are found again at once, 45 behind a thousand others; as a binary
    # number 0.55 times 100 is a little more than 55.
    prompts = [(0, 56), (0, 56), (2, 46), (4, 1000), (2, 46)]
    curve = prefix_curve([request([prompt]) for prompt in prompts], 1)
    assert curve.possible_hits == 100
    assert curve.need(0.55).num_blocks == 55
    assert curve.need(0.5501).num_blocks > 1000


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


@pytest.mark.slow
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


def again(num_prompts: int, seed: int) -> list[RequestSpec]:
    """Requests that repeat one of a few hundred prompts, whole or in part."""
    rng = np.random.default_rng(seed)
    picked = rng.zipf(1.3, num_prompts) % 300
    lengths = rng.integers(1, 200, num_prompts)
    pairs = zip(picked.tolist(), lengths.tolist(), strict=True)
    return [request([(2 * k, n)]) for k, n in pairs]


@pytest.mark.parametrize("seed", range(12))
def test_a_sample_never_asks_more_of_the_clairvoyant(seed: int) -> None:
    curve = prefix_curve(again(600, seed), 4, sample_rate=0.1, sample_seed=seed)
    for share in (0.001, 0.05, 0.3, 0.8, 1.0):
        need = curve.need(share)
        assert 0 < need.clairvoyant_blocks <= need.num_blocks


@pytest.mark.parametrize("seed", range(6))
def test_a_sample_finds_nothing_where_nothing_is_shared(seed: int) -> None:
    num = 2000
    rng = np.random.default_rng(seed)
    columns = RequestColumns(
        np.arange(num, dtype=np.float64),
        rng.integers(1, 999, num),
        np.full(num, 10, dtype=np.int64),
    )
    curve = prefix_curve(columns, sample_rate=0.05, sample_seed=seed)
    assert curve.possible_hits == curve.bounds().most_hits == 0
    assert curve.need(0.8).num_blocks == 0


def test_a_sample_that_is_too_small_is_refused() -> None:
    requests = again(600, 0)
    with pytest.raises(WorkloadError, match=r"at least 64 .* raise the sample rate"):
        prefix_curve(requests, 4, sample_rate=1e-4)


@pytest.mark.parametrize("share", [0.0, 1.01, float("nan")])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(WorkloadError, match="share must be"):
        prefix_curve([request([(0, 9)])]).need(share)
