"""The hull of measured points, and values between and beside them."""

import numpy as np
import pytest

from calibrate.estimators import DecodeAttention, Gemm, Swap
from calibrate.estimators.hull import Hull
from calibrate.estimators.neighbours import Neighbours
from calibrate.estimators.points import interpolated
from tests.calibrate.synthetic import (
    DEVICE,
    columns,
    decode_columns,
    decode_seconds,
    grid,
)


def outside_by_hand(points, shape):
    below = any(all(a <= b for a, b in zip(p, shape, strict=True)) for p in points)
    above = any(all(a >= b for a, b in zip(p, shape, strict=True)) for p in points)
    return not (below and above)


def test_a_shape_is_inside_between_two_measured_ones():
    random = np.random.default_rng(0)
    for number in (2, 3, 4):
        names = tuple("abcd"[:number])
        points = random.integers(0, 9, (30, number))
        shapes = random.integers(-1, 11, (400, number))
        hull = Hull((), names).fit(dict(zip(names, points.T, strict=True)))
        found = hull.outside(dict(zip(names, shapes.T, strict=True)))
        expected = [outside_by_hand(points.tolist(), row) for row in shapes.tolist()]
        assert found.tolist() == expected
        assert 20 < sum(expected) < 380


def test_keys_are_apart_but_for_near_ones():
    points = columns(heads=[8, 8, 32, 32], n=[1, 9, 1, 20])
    asked = columns(heads=[8, 32, 12, 16, 64], n=[15, 15, 5, 15, 15])
    strict = Hull(("heads",), ("n",)).fit(points)
    assert strict.outside(asked).tolist() == [True, False, True, True, True]
    near = Hull(("heads",), ("n",), reach=1.0).fit(points)
    # 12 and 16 heads are within an octave of 8, 64 within one of 32
    assert near.outside(asked).tolist() == [True, False, False, True, False]


def test_short_contexts_of_small_batches_were_not_measured():
    batch, context = grid([1, 4, 16, 64], [64, 512, 4096, 32768])
    cold = batch * context >= 16384
    table = decode_columns(batch[cold], context[cold])
    fitted = DecodeAttention(DEVICE).fit(table, decode_seconds(table))
    asked = decode_columns([1, 1, 4, 16, 64, 64], [64, 40000, 512, 512, 512, 2000])
    expected = [True, True, True, True, False, False]
    assert fitted.extrapolated(asked).tolist() == expected


def test_the_largest_page_times_the_largest_count_was_not_measured():
    pages, counts = grid([4096, 65536, 2 << 20], [1, 64, 1024, 16384])
    timed = pages * counts <= 1 << 30
    table = columns(
        num_blocks=counts[timed],
        block_bytes=pages[timed],
        num_descriptors=counts[timed],
    )
    seconds = 1e-5 + table["num_blocks"] * table["block_bytes"] / 5e10
    fitted = Swap(DEVICE).fit(table, seconds)
    asked = columns(
        num_blocks=[50, 16384, 16384],
        block_bytes=[2 << 20, 2 << 20, 65536],
        num_descriptors=[50, 16384, 16384],
    )
    assert fitted.extrapolated(asked).tolist() == [False, True, False]


def test_products_wider_than_those_measured_are_extrapolated():
    sizes = [1024, 4096]
    m, n, k = (each.ravel() for each in np.meshgrid([1, 64, 512], sizes, sizes))
    wide = columns(m=[1, 8], n=65536, k=4096)
    narrow = columns(m=m, n=n, k=k)
    table = {key: np.append(narrow[key], wide[key]) for key in "mnk"}
    table |= {key: np.full(len(table["m"]), 16) for key in ("weight_bits", "dtype")}
    seconds = 4e-6 + table["n"] * table["k"] / 2e12 + table["m"] * 1e-8
    fitted = Gemm(DEVICE).fit(table, seconds)
    asked = columns(
        m=[300, 8, 64, 8], n=[2048, 65536, 65536, 128256], k=[2048, 4096, 4096, 4096]
    )
    asked |= columns(m=asked["m"], weight_bits=16, dtype=16) | asked
    assert fitted.extrapolated(asked).tolist() == [False, False, True, True]


def test_between_nodes_lie_straight_lines_in_octaves():
    def staircase(asked):
        return np.floor(np.log2(asked["a"])) + 10 * np.floor(np.log2(asked["b"]))

    nodes = {"a": np.array([1, 3, 15]), "b": np.array([1, 7])}
    at_nodes = columns(a=[1, 3, 15], b=[7, 1, 7])
    assert (interpolated(at_nodes, nodes, staircase) == staircase(at_nodes)).all()
    # 7 is halfway between 3 and 15 in octaves of 1 + a, as is 3 between 1 and 7
    between = columns(a=[7, 3, 7], b=[1, 3, 3])
    assert interpolated(between, nodes, staircase) == pytest.approx([2, 11, 12])
    outside = columns(a=[40], b=[7])
    assert interpolated(outside, nodes, staircase).tolist() == [25]
    assert (interpolated(between, {}, staircase) == staircase(between)).all()


def test_fitted_decodes_do_not_fall_where_contexts_grow():
    pytest.importorskip("sklearn")
    random = np.random.default_rng(3)
    tables, times = [], []
    for heads, kv_heads in ((32, 8), (8, 8), (32, 4), (16, 2), (64, 8)):
        table = decode_columns(
            *grid(2 ** np.arange(9), 2 ** np.arange(6, 17)), heads, kv_heads
        )
        tables.append(table)
        times.append(decode_seconds(table) * np.exp(random.normal(0, 0.005, 99)))
    table = {key: np.concatenate([t[key] for t in tables]) for key in tables[0]}
    fitted = DecodeAttention(DEVICE).fit(table, np.concatenate(times))
    assert not fitted.few_
    contexts = np.unique(np.geomspace(64, 65536, 400).astype(int))
    seconds = fitted.predict(decode_columns(256, contexts))
    assert (seconds[1:] / seconds[:-1]).min() > 0.99


def test_neighbours_are_the_nearest_on_both_sides_and_never_the_point_itself():
    points = columns(m=[1, 4, 16, 4, 4], n=[8, 8, 8, 32, 8], kind=[0, 0, 0, 0, 1])
    values = np.array([1.0, 2.0, 4.0, 7.0, 9.0])
    found = Neighbours(("m", "n"), ("kind",)).fit(points, values).features(points)
    # 4 x 8: 1 before and 16 after, two octaves off each; 32 after along n
    assert found[1, :5].tolist() == [1.0, 2.0, 4.0, 2.0, 2.5]
    assert np.isnan(found[1, 5:7]).all()
    assert found[1, 7:].tolist() == [7.0, 2.0, 7.0]
    assert np.isnan(found[4]).all()  # alone of its kind
    assert Neighbours.between(found).tolist() == [False, True, False, False, False]
    learned = Neighbours(("m", "n"), ("kind",)).fit(points, values)
    new = learned.features(columns(m=[8, 8, 4, 32], n=[8, 9, 16, 8], kind=[0, 0, 0, 0]))
    assert new[0, :5].tolist() == [2.0, 1.0, 4.0, 1.0, 3.0]
    assert np.isnan(new[1]).all()  # neither its n nor its m was measured
    assert new[2, 5:].tolist() == [2.0, 1.0, 7.0, 1.0, 4.5]
    assert new[3, 4] == 4.0
    assert Neighbours.between(new).tolist() == [True, False, False, False]


def test_below_all_points_is_inside_where_the_least_was_measured():
    columns = {
        "kind": np.zeros(2, dtype=np.int64),
        "batch": np.array([4, 8]),
        "context": np.array([1024, 512]),
    }
    asked = {
        "kind": np.zeros(4, dtype=np.int64),
        "batch": np.array([1, 4, 8, 16]),
        "context": np.array([16, 512, 1024, 16]),
    }
    for open_below, outside in ((False, [1, 1, 1, 1]), (True, [0, 0, 1, 1])):
        hull = Hull(("kind",), ("batch", "context"), open_below=open_below)
        assert hull.fit(columns).outside(asked).tolist() == list(map(bool, outside))
