"""Steps priced from tables: what is looked up, what is flagged, what is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.plug import build
from sim.costs import COST_MODELS, MeasuredCost, RooflineCost
from sim.costs.base import StepCost, pricer_of
from sim.costs.measured.geometry import geometry_of, linear_elements
from sim.costs.measured.profile import canonical_json, profile_id
from sim.costs.measured.reading import decode_surface
from sim.costs.measured.tables import Curve, Surface
from sim.costs.pricing import decode_ends_of
from sim.costs.rates.widths import ESTIMATE, by_factor, read_widths
from sim.errors import ConfigError
from sim.hardware.models.layers import LayerKind, Mamba2Shape
from sim.scheduler.batch import BatchShape
from tests.sim.costs.test_costs import H200, LLAMA_8B, MOE, TINY, chunk, decodes, shapes
from tests.sim.costs.test_pricer import (
    GRID,
    as_rows,
    assert_columns_are_steps,
    assert_decodes_are_steps,
    awkward_shapes,
    bits,
)

SLIDING = replace(
    TINY,
    name="sliding",
    sliding_window=128,
    mixed_layer_kinds=(LayerKind.SLIDING_ATTENTION, LayerKind.FULL_ATTENTION),
)
BATCHES = [1, 4, 64, 1024]
CONTEXTS = [16, 1024, 8192, 131072]
QUERIES = [1, 128, 2048, 16384]
TOKENS = [1, 64, 1024, 16384]
INTERVALS = {"gemm": [8.0, 20.0], "decode_attention": [4.0, 10.0]}


def table(counts, amounts, seconds, last_beyond=True):
    grid = [[seconds(count, amount) for amount in amounts] for count in counts]
    beyond = [[int(last_beyond and a == amounts[-1]) for a in amounts] for _ in counts]
    return {"counts": counts, "amounts": amounts, "time_s": grid, "beyond": beyond}


def decode_s(batch, context):
    return 1e-5 + 2e-8 * batch + 1e-9 * batch * context


def prefill_s(batch, query):
    return 1e-5 + 2e-11 * batch * query * (query + 1) / 2


def entry(model, tp=1, kv_itemsize=2, **changes):
    windows = ["0"] + ([str(model.sliding_window)] if model.sliding_window else [])
    found = {
        "model": model.name,
        "geometry": geometry_of(model, tp, kv_itemsize),
        "decode": {w: table(BATCHES, CONTEXTS, decode_s) for w in windows},
        "prefill": {w: table([1, 8], QUERIES, prefill_s) for w in windows},
        "tokens": {
            "tokens": TOKENS,
            "gemm_s": [4e-3, 4.1e-3, 2e-2, 0.3],
            "beyond": [0, 0, 0, 1],
        },
    }
    if tp > 1:
        found["tokens"]["allreduce_s"] = [1e-4, 1e-4, 1e-3, 1e-2]
    return found | changes


def write(path, *entries, device="h200_sxm", **fit):
    body = {
        "format": "kvprofile/1",
        "kind": "imported",
        "units": {"size": "byte", "time": "s"},
        "provenance": {"device": {"name": device}, "source": {"name": "a table"}},
        "ops": [],
        "fit": {"models": list(entries), "intervals": INTERVALS} | fit,
    }
    path.write_text(canonical_json(body | {"id": profile_id(body)}))
    return str(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    entries = [
        entry(model, tp, kv)
        for model in (LLAMA_8B, TINY, SLIDING, MOE)
        for tp in (1, 2)
        for kv in (1, 2)
    ]
    return write(tmp_path_factory.mktemp("profiles") / "p.json", *entries)


MODELS = {
    "8b": {"model": LLAMA_8B},
    "two ranks": {"model": LLAMA_8B, "tensor_parallel_size": 2},
    "fp8 cache": {"model": LLAMA_8B, "kv_cache_dtype": "fp8"},
    "sliding": {"model": SLIDING},
    "experts": {"model": MOE},
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def cost(path):
    return MeasuredCost(path, model=LLAMA_8B, gpu=H200)


def test_nodes_are_found_again(cost):
    step = cost.step(decodes(64, 8192))
    assert step.decode_attention_s == pytest.approx(32 * decode_s(64, 8192))
    assert step.gemm_s == 4.1e-3
    assert step.prefill_attention_s == step.allreduce_s == 0.0
    step = cost.step(chunk(2048))
    assert step.prefill_attention_s == pytest.approx(32 * prefill_s(1, 2048))
    assert not cost.step(chunk(500)).extrapolated


def test_between_nodes_lie_straight_lines(cost):
    for batch, context in ((2, 5000), (64, 100), (700, 1024), (3, 17)):
        step = cost.step(decodes(batch, context))
        # the table is linear in batch and in batch x context
        assert step.decode_attention_s == pytest.approx(32 * decode_s(batch, context))
    assert cost.step(decodes(32, 1024)).gemm_s == pytest.approx(4e-3 + 1e-4 * 31 / 63)


def test_what_decodes_cost_is_the_sum_of_contexts(cost):
    even, skewed = decodes(8, 1000), BatchShape(8, 7 * 16 + 7888, 0, 0, 0, 0)
    assert cost.step(even) == cost.step(skewed)


def test_the_rest_is_the_datasheets(cost):
    rest = RooflineCost(model=LLAMA_8B, gpu=H200, layer_latency_s=12e-6)
    shape = decodes(64, 1024)._replace(num_swapped_in_blocks=3, num_copied_blocks=2)
    step, other = cost.step(shape), rest.step(shape)
    for part in ("head_s", "swap_s", "copy_s", "host_s"):
        assert getattr(step, part) == getattr(other, part) > 0.0


def test_shapes_outside_the_tables_say_so(cost):
    inside = decodes(64, 4096)
    assert cost.step(inside).extrapolated is False
    for outside in (
        decodes(64, 9000),  # the node at its right was extrapolated
        decodes(64, 10**6),
        decodes(2000, 1024),
        chunk(5000),
        chunk(512, past=512),  # no chunk with a past was measured
        inside._replace(num_swapped_out_blocks=1),
        inside._replace(num_copied_blocks=1),
    ):
        assert cost.step(outside).extrapolated is True, outside


def halves(cost, shape, *, prefill=0.0, decode=0.1, gemm=0.08, moved=0.0):
    """Half-widths down and up by hand, from factors 1 + p of each operation."""
    step = cost.step(shape)
    kernels_s = (
        step.host_s
        - RooflineCost(model=LLAMA_8B, gpu=H200, layer_latency_s=12e-6).row_parts(
            shape.num_decodes + shape.num_prefills
        )[1]
    )
    up = [
        (step.gemm_s, gemm),
        (step.decode_attention_s, decode),
        (step.prefill_attention_s, prefill),
        (step.head_s, 0.3),
        (step.swap_s, moved),
        (step.copy_s, moved),
    ]
    down_s = [seconds * (1 - 1 / (1 + p)) for seconds, p in up]
    return (
        math.hypot(*down_s, kernels_s * (1 - 1 / 3.5)),
        math.hypot(*(seconds * p for seconds, p in up), kernels_s * 0.5),
    )


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        (decodes(64, 4096), {"decode": 0.04}),
        (decodes(64, 10**6), {"decode": 0.1}),  # the products are inside still
        (decodes(2000, 1024), {"decode": 0.1, "gemm": 0.2}),
        (chunk(500), {"prefill": 0.65}),  # of what no interval is known
        (chunk(512, past=512), {"prefill": 0.65}),
        (
            decodes(64, 4096)._replace(num_swapped_out_blocks=9, num_copied_blocks=70),
            {"decode": 0.04, "moved": 0.65},
        ),
    ],
)
def test_each_operation_widens_by_its_own_region(cost, shape, widths):
    step = cost.step(shape)
    down_s, up_s = halves(cost, shape, **widths)
    assert step.total_s - step.lo_s == pytest.approx(down_s)
    assert step.hi_s - step.total_s == pytest.approx(up_s)


def test_a_chunk_with_a_past_is_less_certain_than_a_fresh_one(tmp_path):
    file = write(
        tmp_path / "p.json",
        entry(LLAMA_8B),
        intervals=INTERVALS | {"prefill_attention": [5.0, 6.0]},
    )
    cost = MeasuredCost(file, model=LLAMA_8B, gpu=H200)
    for shape, share in ((chunk(500), 0.05), (chunk(512, past=512), 0.65)):
        step = cost.step(shape)
        assert step.hi_s - step.total_s == pytest.approx(
            halves(cost, shape, prefill=share)[1]
        )


def test_without_intervals_everything_is_an_estimate(tmp_path):
    file = write(tmp_path / "p.json", entry(LLAMA_8B), intervals={})
    cost = MeasuredCost(file, model=LLAMA_8B, gpu=H200)
    shape = decodes(64, 4096)
    half_s = halves(cost, shape, decode=0.65, gemm=0.65)[1]
    assert cost.step(shape).hi_s - cost.step(shape).total_s == pytest.approx(half_s)


@pytest.mark.parametrize("bad", [[1.0], [1.0, -2.0], [1.0, "x"], 7, {"a": 1}])
def test_intervals_that_are_none_are_refused(tmp_path, bad):
    file = write(tmp_path / "p.json", entry(LLAMA_8B), intervals={"gemm": bad})
    with pytest.raises(ConfigError, match="intervals of gemm must be two finite perc"):
        MeasuredCost(file, model=LLAMA_8B, gpu=H200)


def test_beyond_is_never_narrower_than_inside():
    widths = read_widths({"intervals": {"allreduce": [16.0, 6.0]}}, "allreduce")
    assert widths.inside == widths.beyond == by_factor(1.16, 1.16)
    # 0 says that it was not judged
    widths = read_widths({"intervals": {"gemm": [7.0, 0.0]}}, "gemm")
    assert widths.beyond == ESTIMATE


def test_times_below_the_floor_are_raised_to_it(tmp_path):
    fast = entry(
        LLAMA_8B,
        decode={"0": table(BATCHES, CONTEXTS, lambda b, c: 1e-7)},
        prefill={"0": table([1, 8], QUERIES, lambda b, q: 1e-7)},
        tokens={"tokens": TOKENS, "gemm_s": [1e-6] * 4, "beyond": [0] * 4},
    )
    cost = MeasuredCost(write(tmp_path / "p.json", fast), model=LLAMA_8B, gpu=H200)
    kv_bytes = 64 * 8192 * 32 * 4096
    step = cost.step(decodes(64, 8192))
    assert step.decode_attention_s == pytest.approx(kv_bytes / 4.8e12 / 1.1)
    weights = 2 * linear_elements(LLAMA_8B, 1)
    assert step.gemm_s == pytest.approx(weights / 4.8e12 / 1.1)
    flops = 4 * 4096 * 32 * (2048 * 2049 / 2)
    step = cost.step(chunk(2048))
    assert step.prefill_attention_s == pytest.approx(flops / 989e12 / 1.1)
    assert step.gemm_s == pytest.approx(weights * 2048 / 989e12 / 1.1, rel=1e-3)


@every_model
@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(shapes() | awkward_shapes(), max_size=8),
    num_decodes=st.integers(0, 2048),
    contexts=st.lists(st.integers(0, 10**8), max_size=4),
)
def test_many_steps_have_the_same_bits(path, name, batch, num_decodes, contexts):
    cost = MeasuredCost(path, gpu=H200, **MODELS[name])
    assert pricer_of(cost) is cost
    assert_columns_are_steps(cost, batch)
    assert_decodes_are_steps(cost, num_decodes, contexts)


@every_model
def test_parts_add_up_and_all_three_ways_agree_on_the_grid(path, name):
    cost = MeasuredCost(path, gpu=H200, **MODELS[name])
    assert_columns_are_steps(cost, GRID)
    assert_decodes_are_steps(cost, 77, range(77 * 16 - 3, 77 * 16 + 3))
    assert cost.columns(as_rows([])).shape == (0, len(StepCost._fields))
    # over all lines of the table, and not beyond a time
    ends, expected = decode_ends_of(cost)(77), [0.5]
    for context in range(77, 77 * 500, 77):
        shape = BatchShape(77, context, 0, 0, 0, 0)
        expected.append(expected[-1] + cost.step(shape).total_s)
    assert bits(ends(77, 499, 0.5, math.inf)) == bits(expected[1:])
    assert bits(ends(77, 499, 0.5, expected[300])) == bits(expected[1:301])
    for shape in GRID:
        step = cost.step(shape)
        assert step.total_s == sum(step.parts) > 0.0
        assert all(math.isfinite(part) and part >= 0.0 for part in step)
        assert 0.0 < step.lo_s <= step.total_s <= step.hi_s


@every_model
@given(shape=shapes() | awkward_shapes())
def test_bounds_hold_what_is_between_them(path, name, shape):
    cost = MeasuredCost(path, gpu=H200, **MODELS[name])
    step = cost.step(shape)
    assert 0.0 < step.lo_s <= step.total_s <= step.hi_s < math.inf
    kernels_s = step.total_s - 1.5e-3 + 1e-15 + 1e-9 * step.total_s
    # no half-width is wider than that of all kernels in the widest of intervals
    assert step.total_s - step.lo_s <= kernels_s * (1 - 1 / 3.5) * (1 + 1e-9)
    assert step.hi_s - step.total_s <= kernels_s * 0.65 * (1 + 1e-9)
    if shape.num_decodes + shape.num_prefill_tokens:
        assert step.lo_s < step.total_s < step.hi_s


@every_model
@given(shape=shapes(), more=st.integers(1, 10_000))
def test_longer_contexts_never_cost_less(path, name, shape, more):
    cost = MeasuredCost(path, gpu=H200, **MODELS[name])
    for field in ("num_decode_context_tokens", "num_prefill_attention_pairs"):
        longer = shape._replace(**{field: getattr(shape, field) + more})
        assert cost.step(longer).total_s >= cost.step(shape).total_s


def test_experts_are_the_datasheets_and_say_so(path):
    cost = MeasuredCost(path, model=MOE, gpu=H200)
    step = cost.step(decodes(4, 100))
    assert step.extrapolated
    assert step.gemm_s == RooflineCost(model=MOE, gpu=H200).step(decodes(4, 100)).gemm_s


def test_collectives_are_looked_up(path):
    cost = MeasuredCost(path, model=LLAMA_8B, gpu=H200, tensor_parallel_size=2)
    assert cost.step(decodes(64, 1024)).allreduce_s == 1e-4


def test_an_empty_step_costs_host_time(cost):
    empty = cost.step(BatchShape(0, 0, 0, 0, 0, 0))
    assert empty.total_s == empty.host_s == 1.5e-3
    assert not empty.extrapolated
    assert empty.lo_s == empty.hi_s == empty.total_s  # host time has no bounds


def test_host_time_is_the_users_or_the_profiles(tmp_path, path):
    host = {"step_overhead_s": 2e-3, "request_overhead_s": 0.0}
    file = write(tmp_path / "p.json", entry(LLAMA_8B), host=host)
    empty = BatchShape(0, 0, 0, 0, 0, 0)
    fitted = MeasuredCost(file, model=LLAMA_8B, gpu=H200)
    assert fitted.step(empty).host_s == 2e-3
    given_s = MeasuredCost(file, model=LLAMA_8B, gpu=H200, step_overhead_s=1e-3)
    assert given_s.step(empty).host_s == 1e-3


def test_it_is_built_from_a_configuration_table(path):
    context = {"model": LLAMA_8B, "gpu": H200, "block_size": 16}
    cost = build(COST_MODELS, {"kind": "measured", "profile": path}, "cost", context)
    described = json.loads(json.dumps(cost.describe(), allow_nan=False))
    assert described["kind"] == "measured"
    assert described["profile"].startswith("sha256:")
    assert described["intervals_percent"] == INTERVALS
    with pytest.raises(ConfigError, match=r"cost\.profile: 'measured' needs this key"):
        build(COST_MODELS, {"kind": "measured"}, "cost", context)


def bad_table(**changes):
    good = table(BATCHES, CONTEXTS, decode_s)
    return entry(LLAMA_8B, decode={"0": good | changes})


@pytest.mark.parametrize(
    ("entries", "gpu", "message"),
    [
        ([], H200, "it has none: import it with --model Llama-3.1-8B"),
        ([entry(TINY)], H200, "it has tiny on 1"),
        ([entry(LLAMA_8B)], replace(H200, name="h100_sxm"), "profile is of h200_sxm"),
        ([bad_table(counts=[1, 4, 3, 8])], H200, "nodes must be above zero and ascend"),
        ([bad_table(counts=[1, 4, 5])], H200, "must be at least 2 x 2"),
        ([bad_table(time_s=[[0.0] * 4] * 4)], H200, "finite seconds > 0"),
        ([bad_table(time_s="x")], H200, "is no table"),
        (
            [entry(LLAMA_8B, decode={"7": {"amounts": [1]}})],
            H200,
            "window 0 is missing",
        ),
    ],
)
def test_profiles_that_do_not_fit_are_refused(tmp_path, entries, gpu, message):
    file = write(tmp_path / "p.json", *entries)
    with pytest.raises(ConfigError, match=message):
        MeasuredCost(file, model=LLAMA_8B, gpu=gpu)


def test_a_profile_of_other_ranks_says_what_to_set(tmp_path):
    file = write(tmp_path / "p.json", entry(LLAMA_8B))
    message = "it has Llama-3.1-8B on 1: set engine.tensor_parallel_size, quantization"
    with pytest.raises(ConfigError, match=message):
        MeasuredCost(file, model=LLAMA_8B, gpu=H200, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {}},
        {"decode": {"0": {"counts": [1], "time_s": [[0.1]], "beyond": [[False]]}}},
        {"decode": {"0": {"amounts": "x"}}},
        {"prefill": {"0": [1]}},
        {"tokens": "x"},
    ],
)
def test_tables_of_another_shape_are_refused_in_one_line(tmp_path, change):
    damaged = entry(LLAMA_8B) | change
    file = write(tmp_path / "p.json", damaged, step_correction={"factor": 1.5})
    with pytest.raises(ConfigError, match="fit the profile again"):
        MeasuredCost(file, model=LLAMA_8B, gpu=H200)


def test_more_of_an_amount_never_costs_less_whatever_the_table_says():
    noisy = np.array([[3.0, 2.0, 4.0], [3.0, 5.0, 1.0]])
    surface = Surface([1, 3], [1, 2, 4], noisy, np.zeros((2, 3), dtype=bool))
    assert [surface.at(1, total)[0] for total in (1, 2, 3, 4)] == [3.0, 3.0, 3.5, 4.0]
    assert [surface.at(3, total)[0] for total in (3, 6, 12, 30)] == [3.0, 5.0, 5.0, 5.0]
    assert surface.at(2, 4) == (4.0, False)
    assert surface.at(2, 8) == (4.5, True)  # beyond the last node
    assert surface.at(5, 0) == (3.0, True)


def test_a_curve_is_level_below_and_straight_above():
    curve = Curve([2, 4, 8], [1.0, 2.0, 1.5], [0, 0, 1])
    assert [curve.at(amount)[0] for amount in (1, 2, 3, 4, 8)] == [1, 1, 1.5, 2, 2]
    assert [curve.at(amount)[1] for amount in (2, 3, 6, 9)] == [
        False,
        False,
        True,
        True,
    ]
    assert Curve([1, 2], [1.0, 3.0], [0, 0]).at(5) == (9.0, True)


def test_fewer_sequences_than_measured_are_level_and_say_so():
    rising = np.array([[1.0, 2.0], [3.0, 6.0]])
    surface = Surface([64, 128], [1, 4], rising, np.zeros((2, 2), dtype=bool))
    # the line of the first two rows would go below zero here
    assert surface.at(1, 1) == (1.0, True)
    assert surface.at(64, 64) == (1.0, False)
    assert surface.at(64, 63) == (1.0, True)  # below the first amount


def test_a_curve_is_extrapolated_beside_either_node():
    curve = Curve([2, 4, 8], [1.0, 2.0, 3.0], [1, 0, 0])
    assert [curve.at(amount)[1] for amount in (1, 2, 3, 4, 6)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_layers_with_a_window_do_not_read_all_keys(tmp_path):
    # of two layers, one sees 128 tokens: no more than one reads the whole past
    full, half = TINY, SLIDING
    file = write(tmp_path / "p.json", entry(full), entry(half))
    shape = BatchShape(0, 0, 1, 2, 10**9, 3)
    one, two = (
        MeasuredCost(file, model=model, gpu=H200).step(shape).prefill_attention_s
        for model in (half, full)
    )
    assert two == pytest.approx(2 * one)


def test_chunks_of_layers_with_a_window_cost_what_they_see(tmp_path):
    # a layer's time is a line in the pairs that it sees
    def sliding_s(batch, query):
        ramp = min(query, 128)
        return 1e-4 * batch * (ramp * (ramp + 1) / 2 + (query - ramp) * 128)

    tables = {
        "0": table([1, 8], QUERIES, prefill_s),
        "128": table([1, 8], QUERIES, sliding_s),
    }
    file = write(tmp_path / "p.json", entry(SLIDING, prefill=tables))
    cost = MeasuredCost(file, model=SLIDING, gpu=H200)
    for past in (0, 100, 50_000):
        pairs = sum(min(past + i + 1, 128) for i in range(512))
        step = cost.step(chunk(512, past=past))
        assert step.prefill_attention_s == pytest.approx(1e-4 * pairs, rel=0.01)


def test_measured_states_add_to_what_decodes_read():
    class States:
        def at(self, count):
            return 1e-3 * count, False

    rest = RooflineCost(model=TINY, gpu=H200)
    table = entry(TINY)["decode"]
    without, with_states = (
        decode_surface(table, rest),
        decode_surface(table, rest, States()),
    )
    for count in (1, 4, 8):
        (plain, beyond), (more, further) = (
            surface.at(count, 1024 * count) for surface in (without, with_states)
        )
        assert more == pytest.approx(plain + 1e-3 * count)
        assert further == beyond


def test_states_are_the_datasheets_and_say_so(tmp_path):
    model = replace(
        TINY,
        num_hidden_layers=3,
        state_shape=Mamba2Shape(8, 16, 32, 2, 4),
        mixed_layer_kinds=(
            *(LayerKind.MAMBA2, LayerKind.MAMBA2, LayerKind.FULL_ATTENTION),
        ),
    )
    file = write(tmp_path / "p.json", entry(model))
    cost = MeasuredCost(file, model=model, gpu=H200)
    states = RooflineCost(model=model, gpu=H200).mixture.states
    step = cost.step(decodes(4, 1024))
    expected = decode_s(4, 1024) + 4 * states.sequence_s
    assert step.decode_attention_s == pytest.approx(expected)
    prompt = cost.step(chunk(2048))
    expected = prefill_s(1, 2048) + states.prefill_s(1, 2048)
    assert prompt.prefill_attention_s == pytest.approx(expected)
    assert step.extrapolated
    assert prompt.extrapolated


def test_an_8_bit_cache_may_be_faster_than_16_bit_products(tmp_path):
    fast = {"0": table([1, 8], QUERIES, lambda *_: 1e-9)}
    file = write(tmp_path / "p.json", entry(LLAMA_8B, 1, 1, prefill=fast))
    cost = MeasuredCost(file, model=LLAMA_8B, gpu=H200, kv_cache_dtype="fp8")
    flops = 4 * 4096 * 32 * 2048 * 2049 // 2
    step = cost.step(chunk(2048))
    peak = H200.fp8_flops_per_s
    assert step.prefill_attention_s == pytest.approx(flops / peak / 1.1)
