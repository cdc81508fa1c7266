"""Estimators: exact where they can be, bounded everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.estimators import (
    ESTIMATORS,
    AllReduce,
    DecodeAttention,
    Gemm,
    MixedAttention,
    PrefillAttention,
    Swap,
)
from calibrate.estimators.costs import CostSum
from calibrate.estimators.points import aggregated, longest_share
from calibrate.estimators.residual import KernelResidual, TreeResidual
from calibrate.estimators.roofline import SoftRoofline, Work
from sim.errors import UserError
from tests.calibrate.synthetic import (
    DEVICE,
    columns,
    decode_columns,
    decode_seconds,
    grid,
)

ANYWHERE = decode_columns(
    *grid([1, 2, 3, 7, 64, 500, 4096], [1, 2, 15, 1000, 2**17, 10**6])
)


def mape(predicted, measured):
    return float(np.mean(np.abs(predicted / measured - 1.0)))


def bounded(estimator, table):
    seconds = estimator.predict(table)
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    assert (seconds >= estimator.floor(table)).all()
    return seconds


def test_bytes_of_decode_are_those_of_keys_and_values():
    work = DecodeAttention(DEVICE).work(decode_columns([2], [1000]))
    assert work.bytes.tolist() == [2 * 1000 * 2 * 8 * 128 * 2]
    assert work.units.tolist() == [16.0]
    flops = work.flops_s * DEVICE.flops_per_s
    assert flops == pytest.approx([4 * 2 * 1000 * 32 * 128])
    table = decode_columns([2], [1000]) | {"window": np.array([128])}
    assert DecodeAttention(DEVICE).work(table).bytes.tolist() == [2 * 128 * 4096]


def test_more_kv_heads_than_were_measured_are_more_sequences_of_fewer():
    measured = decode_columns(*grid([1, 4, 16, 64], [64, 512, 4096]))
    estimator = DecodeAttention(DEVICE).fit(measured, decode_seconds(measured))
    many = decode_columns([4, 16], 512, num_heads=32, num_kv_heads=32)
    divided = estimator.divided(many)
    assert divided["batch"].tolist() == [16, 64]
    assert set(divided["num_kv_heads"]) == set(divided["num_heads"]) == {8}
    assert estimator.work(many).bytes == pytest.approx(estimator.work(divided).bytes)
    assert estimator.predict(many) == pytest.approx(estimator.predict(divided))
    odd = decode_columns([1], [512], num_heads=36, num_kv_heads=12)
    assert estimator.divided(odd)["num_kv_heads"].tolist() == [6]
    assert (estimator.divided(measured)["batch"] == measured["batch"]).all()


@pytest.mark.parametrize(
    ("query", "past", "window", "pairs"),
    [
        (4, 0, 0, 10),
        (4, 3, 0, 22),  # 4 + 5 + 6 + 7
        (4, 0, 2, 7),  # 1 + 2 + 2 + 2
        (4, 3, 5, 19),  # 4 + 5 + 5 + 5
        (4, 9, 5, 20),
        (1, 0, 0, 1),
    ],
)
def test_pairs_of_a_chunk_are_counted_under_past_and_window(query, past, window, pairs):
    table = columns(query=[query], past=past, window=window)
    counted = sum(min(past + row, window or past + row) for row in range(1, query + 1))
    assert counted == pairs
    assert PrefillAttention(DEVICE).growth(table).tolist() == [pairs]


def test_a_roofline_finds_its_own_parameters_within_bounds():
    bytes_moved = np.geomspace(1e5, 1e10, 40)
    work = Work(bytes_moved, np.zeros(40), np.ones(40))
    seconds = 1e-5 + bytes_moved / (0.8 * DEVICE.bandwidth_bytes_per_s)
    fitted = SoftRoofline(DEVICE).fit(work, seconds)
    assert mape(fitted.predict(work), seconds) < 0.01
    assert fitted.parameters_[2] == pytest.approx(0.8, rel=0.02)
    # faster than the device: efficiencies stay shares of the datasheet
    fitted = SoftRoofline(DEVICE).fit(work, seconds / 10)
    assert fitted.parameters_[2] <= 1.0
    assert 1.0 <= fitted.parameters_[4] <= 8.0


def test_few_points_are_interpolated():
    table = decode_columns(*grid([1, 4, 16, 64, 256], [512, 2048, 8192, 32768]))
    fitted = DecodeAttention(DEVICE).fit(table, decode_seconds(table))
    between = decode_columns(*grid([2, 8, 32, 128], [1024, 4096, 16384]))
    assert mape(fitted.predict(between), decode_seconds(between)) < 0.05
    assert not fitted.extrapolated(between).any()
    beyond = decode_columns([512, 64], [512, 131072])
    assert fitted.extrapolated(beyond).all()
    assert mape(bounded(fitted, beyond), decode_seconds(beyond)) < 0.15


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_thirty_points_of_anything_never_leave_the_bounds(data):
    seed = data.draw(st.integers(0, 10**6))
    spread = data.draw(st.sampled_from([0.0, 0.3, 3.0]))
    random = np.random.default_rng(seed)
    table = decode_columns(
        2 ** random.integers(0, 10, 30), 2 ** random.integers(4, 17, 30)
    )
    seconds = decode_seconds(table) * np.exp(random.normal(0.0, spread, 30))
    seconds = np.clip(seconds, 1e-7, 10.0)
    fitted = DecodeAttention(DEVICE).fit(table, seconds)
    bounded(fitted, ANYWHERE)


def test_every_estimator_stays_in_bounds_on_thirty_points():
    random = np.random.default_rng(1)
    for kind in ESTIMATORS.values():
        table = {key: 2 ** random.integers(0, 9, 30) for key in kind.columns}
        for key in ("kv_itemsize", "variant", "layer", "dtype", "num_gpus"):
            if key in table:
                table[key] = np.ones(30, dtype=np.int64)
        if "weight_bits" in table:
            table["weight_bits"] = np.full(30, 16)
        fitted = kind(DEVICE)
        seconds = fitted.floor(table) + random.uniform(1e-6, 1e-3, 30)
        fitted.fit(table, seconds)
        bounded(fitted, table)
        bounded(fitted, {key: values * 1000 for key, values in table.items()})


def test_trees_learn_what_the_roofline_misses_and_follow_straight_lines_beyond():
    pytest.importorskip("sklearn")
    batches, contexts = 2 ** np.arange(8), 2 ** np.arange(4, 17)
    tables, times = [], []
    for heads, kv_heads in ((32, 8), (8, 8), (32, 4), (16, 2), (64, 8), (8, 1)):
        table = decode_columns(*grid(batches, contexts), heads, kv_heads)
        seconds = decode_seconds(table)
        if heads == kv_heads:  # keys one after the other
            seconds = seconds + 2e-8 * table["context"]
        tables.append(table)
        times.append(seconds)
    table = {key: np.concatenate([t[key] for t in tables]) for key in tables[0]}
    seconds = np.concatenate(times)
    longest = longest_share(table["context"])
    assert set(table["context"][longest]) == {2**15, 2**16}
    kept = {key: values[~longest] for key, values in table.items()}
    held = {key: values[longest] for key, values in table.items()}
    fitted = DecodeAttention(DEVICE, num_iterations=100)
    fitted.fit(kept, seconds[~longest])
    assert mape(fitted.predict(kept), seconds[~longest]) < 0.01
    assert fitted.extrapolated(held).all()
    assert mape(bounded(fitted, held), seconds[longest]) < 0.06
    bounded(fitted, ANYWHERE)


def test_few_sequences_of_a_kernel_that_walks_take_as_long_as_many():
    batches, contexts = 2 ** np.arange(10), 2 ** np.arange(4, 18)
    tables = [
        decode_columns(*grid(batches, contexts), heads, kv_heads)
        for heads, kv_heads in ((8, 8), (4, 4), (2, 2), (32, 8), (16, 4), (8, 2))
    ]
    table = {key: np.concatenate([t[key] for t in tables]) for key in tables[0]}
    walks = table["num_heads"] == table["num_kv_heads"]
    seconds = decode_seconds(table)
    seconds = np.where(walks, np.maximum(seconds, 2e-8 * table["context"]), seconds)
    # as in published tables: what fits the cache is left out
    num_keys = table["batch"] * table["context"] * table["num_kv_heads"]
    is_cold = num_keys > 1 << 17
    longest = table["context"] >= 1 << 16
    kept = is_cold & ~longest
    fitted = DecodeAttention(DEVICE, num_iterations=100)
    fitted.fit({key: values[kept] for key, values in table.items()}, seconds[kept])
    for heads, batch, num_measured, most in (
        (8, 2, 2, 0.05),
        (8, 1, 1, 0.12),
        (4, 2, 1, 0.10),
        (4, 1, 0, 0.20),
        (2, 2, 0, 0.25),
    ):
        own = walks & (table["num_heads"] == heads) & (table["batch"] == batch)
        assert (own & kept).sum() == num_measured
        asked = {key: values[own & longest] for key, values in table.items()}
        assert mape(fitted.predict(asked), seconds[own & longest]) < most


def test_a_fit_beside_a_lean_one_is_both_of_them():
    contexts = 2 ** np.arange(4, 17)
    table = decode_columns(*grid(np.arange(1, 21), contexts))
    seconds = decode_seconds(table) + 2e-8 * table["context"]
    table, seconds = aggregated(table, seconds)
    longest = longest_share(table["context"])
    every_third = np.arange(len(seconds)) % 3 == 0
    for held in (longest, every_third):
        apart = DecodeAttention(DEVICE).fit(table, seconds)
        kept = {key: values[~held] for key, values in table.items()}
        lean_apart = DecodeAttention(DEVICE).lean().fit(kept, seconds[~held])
        both = DecodeAttention(DEVICE)
        lean = both.fit_beside(table, seconds, held)
        assert apart.trend_.shares_.max() > 0.5
        assert both.predict(ANYWHERE) == pytest.approx(apart.predict(ANYWHERE))
        assert lean.predict(ANYWHERE) == pytest.approx(lean_apart.predict(ANYWHERE))


def test_several_times_of_a_shape_count_as_their_median():
    table = columns(m=[1, 2, 1, 1], n=5)
    shapes, seconds = aggregated(table, np.array([3e-6, 9e-6, 1e-6, 2e-6]))
    assert shapes["m"].tolist() == [1, 2]
    assert seconds.tolist() == [2e-6, 9e-6]
    _, even = aggregated(columns(m=[1, 1], n=5), np.array([1e-6, 4e-6]))
    assert even == pytest.approx([2.5e-6])


@pytest.mark.parametrize("bad", [0.0, -1e-6, np.nan, np.inf, 1e6])
def test_times_that_cannot_be_are_refused(bad):
    table = decode_columns([1, 2, 4, 8, 16], 1024)
    with pytest.raises(UserError, match="check the unit"):
        DecodeAttention(DEVICE).fit(table, np.array([1e-5, 1e-5, bad, 1e-5, 1e-5]))


def test_too_little_is_refused_with_what_is_missing():
    with pytest.raises(UserError, match="at least 5 different shapes; got 1"):
        Gemm(DEVICE).fit(
            columns(m=[8] * 9, n=64, k=64, weight_bits=16, dtype=0), np.full(9, 1e-5)
        )
    with pytest.raises(UserError, match="column 'past' is missing"):
        MixedAttention(DEVICE).fit(
            {k: np.ones(5) for k in MixedAttention.columns if k != "past"}, np.ones(5)
        )


def test_curves_pass_through_their_points_and_go_on_straight():
    table = columns(variant=0, num_gpus=[2] * 4, bytes=[1024, 4096, 16384, 65536])
    seconds = np.array([5e-6, 5e-6, 6e-6, 10e-6])
    fitted = AllReduce(DEVICE).fit(table, seconds)
    assert fitted.predict(table) == pytest.approx(seconds)
    there = columns(variant=0, num_gpus=2, bytes=[128, 114688])
    assert bounded(fitted, there) == pytest.approx([5e-6, 14e-6])
    assert fitted.extrapolated(there).all()


def test_swaps_cost_by_call_or_by_byte():
    blocks, size = grid([1, 8, 64, 512], [32768, 262144, 2**21])
    table = columns(num_blocks=blocks, block_bytes=size, num_descriptors=64 * blocks)
    seconds = 1e-5 + np.maximum(2e-6 * 64 * blocks, blocks * size / 5e10)
    fitted = Swap(DEVICE).fit(table, seconds)
    assert mape(fitted.predict(table), seconds) < 0.1
    bounded(fitted, {key: values * 10_000 for key, values in table.items()})


def test_a_residual_fades_to_its_mean_far_away():
    points = np.arange(10.0)[:, None]
    learned = KernelResidual().fit(points, np.sin(points[:, 0]))
    assert learned.predict(points) == pytest.approx(np.sin(points[:, 0]), abs=0.1)
    far = learned.predict(np.array([[1e4]]))
    assert far == pytest.approx([np.sin(points).mean()])


def test_weights_in_the_cache_may_be_faster_than_the_bus():
    small = columns(m=[1], n=1024, k=1024, weight_bits=16, dtype=0)
    large = columns(m=[1], n=65536, k=16384, weight_bits=16, dtype=0)
    gemm = Gemm(DEVICE)
    assert gemm.floor(small)[0] < 2 * 1024 * 1024 / 4.8e12 / 1.1
    assert gemm.floor(large)[0] > 2 * 65536 * 16384 / 4.8e12 / 1.11


@pytest.mark.slow
def test_each_cost_of_a_longer_product_grows_by_its_own_amount():
    """Scales of tokens cost what weights never say; long products slow the clock."""
    powers = 2 ** np.arange(14)
    sizes = np.meshgrid(powers[2:10], powers[5:], powers[5:], indexing="ij")
    m, n, k = (size.ravel() for size in sizes)
    table = columns(m=m, n=n, k=k, weight_bits=16, dtype=0)

    def seconds(table):
        work = Gemm(DEVICE).work(table)
        rate = np.where(work.flops_s > 2e-6, 0.5, 0.8)
        return 5e-6 + 6e-9 * table["m"] + work.flops_s / rate

    fitted = Gemm(DEVICE, num_iterations=60).fit(table, seconds(table))
    for weights in (32, 1024, 2048):
        beyond = columns(
            m=[1024, 2048, 4096], n=weights, k=weights, weight_bits=16, dtype=0
        )
        assert mape(fitted.predict(beyond), seconds(beyond)) < 0.04, weights


@pytest.mark.parametrize("long_kind", [2, 0])  # above and below the other, 1
def test_a_precision_without_prices_goes_on_by_the_forests(long_kind):
    sizes = 256 * 2 ** np.arange(7)
    parts = [
        np.meshgrid(ms, sizes, sizes, [kind])
        for ms, kind in ((2 ** np.arange(12), 1), ([4096, 8192], long_kind))
    ]
    m, n, k, kind = np.hstack([[x.ravel() for x in part] for part in parts])
    bits = np.where(kind == 1, 16, 8)
    table = columns(m=m, n=n, k=k, weight_bits=bits, dtype=kind)

    def seconds(table):
        work = Gemm(DEVICE).work(table)
        return 5e-6 + work.flops_s / 0.7 + work.bytes / 3e12

    # the longest are held out to judge by: all of one precision
    fitted = Gemm(DEVICE, num_iterations=40).fit(table, seconds(table))
    assert mape(fitted.predict(table), seconds(table)) < 0.05
    # a precision that was not measured at all, of more tokens than were
    for kind in {0, 2, 3} - {long_kind}:
        unknown = columns(m=[16384], n=4096, k=4096, weight_bits=16, dtype=kind)
        assert mape(fitted.predict(unknown), seconds(unknown)) < 0.1, kind


def test_a_sum_of_costs_has_no_price_below_zero():
    random = np.random.default_rng(0)
    amounts = random.uniform(1.0, 100.0, (500, 3))
    kinds = np.arange(500) % 2 * 3
    prices = np.array([[2e-6, 0.0, 1e-7], [0.0, 5e-7, 1e-6]])
    time_s = (amounts * prices[kinds // 3]).sum(axis=1)
    time_s[::50] *= 4.0  # a call that was held up tells nothing of its cost
    costs = CostSum().fit(kinds, amounts, time_s)
    assert (costs.prices_ >= 0.0).all()
    assert costs.prices_ == pytest.approx(prices, rel=0.02, abs=1e-8)
    assert costs.shares(kinds, amounts).sum(axis=1) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_plain_judge_of_products_learns_no_neighbours():
    powers = 2 ** np.arange(13)
    sizes = np.meshgrid(powers[:10], powers[6:], 3 * powers[6:12], indexing="ij")
    m, n, k = (size.ravel() for size in sizes)
    table = columns(m=m, n=n, k=k, weight_bits=16, dtype=0)
    work = Gemm(DEVICE).work(table)
    seconds = 5e-6 + work.flops_s / 0.7 + work.bytes / 3e12
    beyond = columns(m=[600, 1024], n=256, k=192, weight_bits=16, dtype=0)
    between = columns(m=[5, 100], n=256, k=192, weight_bits=16, dtype=0)
    early, late = (
        Gemm(DEVICE, num_iterations=8).lean(plain_slopes=True).fit(table, seconds)
        for _ in range(2)
    )
    early.complete()
    assert (late.predict(beyond) == early.predict(beyond)).all()
    assert not hasattr(late.beside_, "forests_")
    assert (late.predict(between) == early.predict(between)).all()
    assert hasattr(late.beside_, "forests_")


def test_a_large_table_is_learned_by_fewer_and_larger_trees():
    places = np.arange(40_000.0)[:, None]
    for count, trees, leaves in ((29_999, 8, 63), (40_000, 2, 255)):
        learned = TreeResidual(num_iterations=8)
        learned.fit(places[:count], np.sin(places[:count, 0] / 300.0))
        (forest,) = learned.forests_
        assert (forest.n_iter_, forest.max_leaf_nodes) == (trees, leaves)
