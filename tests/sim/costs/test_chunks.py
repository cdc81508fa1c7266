"""Chunks with a past, and chunks beside decodes: factors."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.costs import MeasuredCost
from sim.costs.measured.reading import pairs_of
from sim.costs.measured.tables import (
    BesideFactor,
    PastFactor,
    mean_chunk,
)
from sim.costs.pricing import batch_total_of
from sim.errors import ConfigError
from sim.scheduler.batch import BatchShape
from tests.sim.costs.test_costs import H200, LLAMA_8B, chunk, decodes, shapes
from tests.sim.costs.test_measured import decode_s, entry, prefill_s, write
from tests.sim.costs.test_pricer import (
    assert_columns_are_steps,
    assert_decodes_are_steps,
    awkward_shapes,
)

QUERIES, PASTS = [16, 256, 900], [0, 1024, 16384]
COUNTS, CONTEXTS = [1, 8, 64], [256, 4096]


def past_s(query, past):
    """A chunk walks its context one key after the other."""
    return 1e-5 + 3e-11 * pairs_of(query, past) + 2e-8 * past


def mixed_s(query, past, count, context):
    return 1.5 * past_s(query, past) + 2.0 * decode_s(count, context)


def nested(function, *axes):
    grid = np.meshgrid(*axes, indexing="ij")
    return np.vectorize(function)(*grid).tolist()


def past_table(**changes):
    table = {
        "queries": QUERIES,
        "pasts": PASTS,
        "time_s": nested(past_s, QUERIES, PASTS),
        "beyond": np.zeros((3, 3), int).tolist(),
    }
    return {"0": table | changes}


def mixed_table(**changes):
    axes = (QUERIES, PASTS, COUNTS, CONTEXTS)
    table = {
        "queries": QUERIES,
        "pasts": PASTS,
        "num_decodes": COUNTS,
        "contexts": CONTEXTS,
        "time_s": nested(mixed_s, *axes),
        "beyond": np.zeros([len(axis) for axis in axes], int).tolist(),
    }
    return {"0": table | changes}


@pytest.fixture(scope="module")
def cost(tmp_path_factory):
    tables = entry(LLAMA_8B, prefill_past=past_table(), mixed=mixed_table())
    path = write(tmp_path_factory.mktemp("profiles") / "p.json", tables)
    return MeasuredCost(path, model=LLAMA_8B, gpu=H200)


def both(query, past, count, context):
    """One chunk beside decodes of the same context."""
    pairs = pairs_of(query, past)
    return BatchShape(count, count * context, 1, query, query + past, pairs)


@given(query=st.integers(2, 100_000), past=st.integers(0, 1_000_000))
def test_of_one_chunk_its_own_shape_is_found(query, past):
    found = mean_chunk(1, query + past, pairs_of(query, past), 1)
    assert found == pytest.approx((query, past), rel=1e-6, abs=0.5)


def test_several_chunks_are_taken_for_equal_ones():
    # four chunks of 512 over 4,096 each
    pairs = 4 * pairs_of(512, 4096)
    assert mean_chunk(4, 4 * 4608, pairs, 4) == pytest.approx((512, 4096))
    # a long and a short one have more pairs than two equal ones: a fresh one
    pairs = pairs_of(1000, 0) + pairs_of(10, 0)
    query, past = mean_chunk(2, 1010, pairs, 2)
    assert past == 0.0
    assert pairs_of(round(query), 0) == pytest.approx(pairs / 2, rel=0.01)


def test_a_measured_past_costs_what_was_measured(cost):
    for query, past in ((256, 1024), (900, 16384), (16, 1024)):
        step = cost.step(chunk(query, past=past))
        assert step.prefill_attention_s == pytest.approx(32 * past_s(query, past))
        assert not step.extrapolated
    assert cost.step(chunk(256, past=20_000)).extrapolated
    assert cost.step(chunk(4096, past=1024)).extrapolated
    # a fresh chunk is in a table of its own
    step = cost.step(chunk(2048))
    assert step.prefill_attention_s == pytest.approx(32 * prefill_s(1, 2048))


def test_chunks_beside_decodes_cost_what_was_measured(cost):
    for shape in ((256, 1024, 8, 256), (900, 0, 64, 4096), (16, 16384, 1, 256)):
        step = cost.step(both(*shape))
        total = step.prefill_attention_s + step.decode_attention_s
        assert total == pytest.approx(32 * mixed_s(*shape), rel=1e-6)
        assert not step.extrapolated
    assert cost.step(both(256, 0, 100, 512)).extrapolated
    assert cost.step(both(8, 0, 8, 512)).extrapolated
    alone = cost.step(decodes(8, 256))
    assert alone.decode_attention_s == pytest.approx(32 * decode_s(8, 256))


def test_between_nodes_factors_lie_between(cost):
    factor = PastFactor([1, 3], [0, 4], np.array([[1.0, 2.0], [3.0, 6.0]]), _no(2, 2))
    assert factor.at(1.0, 2.0) == (1.5, False)
    assert factor.at(2.0, 0.0) == (2.0, False)
    assert factor.at(9.0, 9.0) == (6.0, True)
    cube = np.arange(1.0, 17.0).reshape(2, 2, 2, 2)
    axes = [1, 3], [0, 4], [1, 5], [10, 20]
    beside = BesideFactor(axes, cube, _no(2, 2, 2, 2))
    assert beside.at(1.0, 0.0, 3, 30) == (2.0, False)
    assert beside.at(2.0, 2.0, 3, 45) == pytest.approx((8.5, 0.0))
    assert beside.at(1.0, 0.0, 6, 60) == (3.0, True)


def test_factors_below_the_first_nodes_are_beyond():
    table = np.array([[1.0, 2.0], [3.0, 6.0]])
    factor = PastFactor([16, 32], [1024, 2048], table, _no(2, 2))
    assert factor.at(16.0, 1024.0) == (1.0, False)
    assert factor.at(8.0, 1024.0) == (1.0, True)
    assert factor.at(16.0, 10.0) == (1.0, True)
    axes = [16, 32], [1024, 2048], [1, 5], [10, 20]
    beside = BesideFactor(axes, np.ones((2, 2, 2, 2)), _no(2, 2, 2, 2))
    assert beside.at(16.0, 1024.0, 3, 30) == (1.0, False)
    assert beside.at(16.0, 10.0, 3, 30) == (1.0, True)


@example([(15.8, 1024.0, 1, 1)])  # beside a node, and beyond another axis
@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 2000) | st.floats(15.4, 16.1) | st.floats(899.9, 900.6),
            st.floats(0, 20_000) | st.floats(16383.9, 16384.6),
            st.integers(1, 99),
            st.integers(1),
        ),
        min_size=1,
    )
)
def test_factors_stay_within_their_nodes(rows):
    rng = np.random.default_rng(0)
    beyond = rng.random((3, 3, 3, 2)) < 0.2
    values = rng.uniform(0.1, 9.0, beyond.shape)
    beside = BesideFactor((QUERIES, PASTS, COUNTS, CONTEXTS), values, beyond)
    past = PastFactor(QUERIES, PASTS, values[:, :, 0, 0], beyond[:, :, 0, 0])
    for q, p, n, k in rows:
        for factor, _ in (past.at(q, p), beside.at(q, p, n, n * (k % 9000))):
            assert 0.1 - 1e-9 <= factor <= 9.0 + 0.5


def _no(*shape):
    return np.zeros(shape, dtype=np.bool_)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(shapes() | awkward_shapes(), max_size=8),
    num_decodes=st.integers(0, 2048),
    contexts=st.lists(st.integers(0, 10**8), max_size=4),
)
def test_many_steps_have_the_same_bits(cost, batch, num_decodes, contexts):
    assert_columns_are_steps(cost, batch)
    assert_decodes_are_steps(cost, num_decodes, contexts)
    for shape in batch:
        assert 0.0 < cost.step(shape).lo_s <= cost.step(shape).total_s
        if not any(shape[6:]):
            assert batch_total_of(cost)(*shape[:6]) == cost.step(shape).total_s


def test_both_together_are_not_faster_than_the_memory(tmp_path):
    fast = mixed_table(time_s=np.full((3, 3, 3, 2), 1e-8).tolist())
    path = write(tmp_path / "p.json", entry(LLAMA_8B, mixed=fast))
    cost = MeasuredCost(path, model=LLAMA_8B, gpu=H200)
    step = cost.step(both(256, 1024, 64, 4096))
    keys = 256 + 1024 + 64 * 4096
    total = step.prefill_attention_s + step.decode_attention_s
    assert total >= keys * 32 * 4096 / 4.8e12 / 1.1 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_past": past_table(pasts=[0, 5, 2])}, "must be >= 0 and ascend"),
        ({"prefill_past": past_table(time_s=[[1.0]])}, "at least 2 along each axis"),
        ({"prefill_past": past_table(time_s="x")}, "is no table"),
        ({"mixed": mixed_table(contexts=[1])}, "at least 2 along each axis"),
        ({"mixed": {"7": {}}}, "mixed of window 0 is no table"),
        (
            {"prefill_past": past_table(time_s=[[0.0] * 3] * 3)},
            "must hold finite seconds > 0",
        ),
    ],
)
def test_tables_that_are_none_are_refused(tmp_path, changes, message):
    path = write(tmp_path / "p.json", entry(LLAMA_8B, **changes))
    with pytest.raises(ConfigError, match=message):
        MeasuredCost(path, model=LLAMA_8B, gpu=H200)


def test_whole_steps_correct_the_tables(tmp_path):
    path = write(tmp_path / "a.json", entry(LLAMA_8B))
    plain = MeasuredCost(path, model=LLAMA_8B, gpu=H200).step(decodes(64, 1024))
    path = write(tmp_path / "b.json", entry(LLAMA_8B), step_correction={"factor": 1.25})
    more = MeasuredCost(path, model=LLAMA_8B, gpu=H200).step(decodes(64, 1024))
    assert more.gemm_s == pytest.approx(1.25 * plain.gemm_s)
    assert more.decode_attention_s == pytest.approx(1.25 * plain.decode_attention_s)
    path = write(tmp_path / "c.json", entry(LLAMA_8B), step_correction={"factor": 0})
    with pytest.raises(ConfigError, match="step_correction"):
        MeasuredCost(path, model=LLAMA_8B, gpu=H200)


def test_a_gpu_goes_by_our_name_of_it(tmp_path):
    path = write(
        tmp_path / "p.json", entry(LLAMA_8B), device="NVIDIA H200", gpu="h200_sxm"
    )
    assert MeasuredCost(path, model=LLAMA_8B, gpu=H200)
