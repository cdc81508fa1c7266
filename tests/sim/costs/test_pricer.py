"""Many steps priced at once: the same bits as `step`, whichever method is asked."""

import copy
import pickle
from dataclasses import replace
from math import inf
from typing import get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs import ConstantCost, LinearCost, RooflineCost, pricing
from sim.costs import parts as cost_parts
from sim.costs.base import CostModel, StepCost, StepPricer, pricer_of
from sim.costs.parts import Memo, cost_columns, step_cost
from sim.costs.pricing import batch_total_of, decode_ends_of
from sim.costs.steps.ahead import HostAhead
from sim.costs.transfers import LAYOUTS, VARIANTS
from sim.hardware.models.layers import GatedDeltaNetShape, LayerKind
from sim.scheduler.batch import BatchShape
from tests.sim.costs.test_costs import (
    BARE,
    COEFFICIENTS,
    EMPTY,
    H200,
    LLAMA_8B,
    MODELS,
    MOE,
    ROUND,
    TINY,
    shapes,
)

SLIDING = replace(
    TINY,
    sliding_window=128,
    mixed_layer_kinds=(LayerKind.SLIDING_ATTENTION, LayerKind.FULL_ATTENTION),
)
MLA = replace(
    MOE, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
)
MLA_OF_MANY_HEADS = replace(MLA, num_attention_heads=512)
ARCHITECTURES = {
    "dense": TINY,
    "8b": LLAMA_8B,
    "moe": MOE,
    "all experts": replace(MOE, num_experts_per_tok=8),
    "mla": MLA,
    "mla compute": MLA_OF_MANY_HEADS,
    "sliding": SLIDING,
    "chunked": replace(
        MOE,
        sliding_window=100,
        mixed_layer_kinds=(LayerKind.CHUNKED_ATTENTION, LayerKind.FULL_ATTENTION),
    ),
    "states": replace(
        TINY,
        num_hidden_layers=4,
        sliding_window=128,
        state_shape=GatedDeltaNetShape(2, 4, 64, 32, 4),
        mixed_layer_kinds=(
            *(LayerKind.GATED_DELTA_NET, LayerKind.SLIDING_ATTENTION),
            *(LayerKind.FULL_ATTENTION, LayerKind.MLP),
        ),
    ),
    "all sliding": replace(
        MOE, sliding_window=100, mixed_layer_kinds=(LayerKind.SLIDING_ATTENTION,) * 2
    ),
    "fp8": replace(LLAMA_8B, quantization="fp8"),
    "awq": replace(LLAMA_8B, quantization="awq"),
}
PRICERS = MODELS | {
    f"{name} tp {tp} {kv} {gpu.name}": RooflineCost(
        model=model, gpu=gpu, tensor_parallel_size=tp, kv_cache_dtype=kv
    )
    for name, model in ARCHITECTURES.items()
    for tp in (1, 4)
    for kv in ("auto", "fp8")
    for gpu in (H200, ROUND)
}
every_pricer = pytest.mark.parametrize("kind", PRICERS)


@st.composite
def awkward_shapes(draw):
    """Fields independent of each other: contexts without requests, empty chunks."""
    few = st.integers(0, 3) | st.integers(0, 10**6)
    fields = [draw(few) for _ in BatchShape._fields]
    return BatchShape(*fields)


@st.composite
def rooflines(draw):
    """Parameters drawn, so that each limit is sometimes the one that binds."""
    shares = st.floats(1e-3, 1.0)
    times = st.sampled_from([0.0, 1e-9, 1e-5]) | st.floats(0.0, 1e-2)
    parameters = {
        key: draw(shares if key.endswith("efficiency") else times) for key in BARE
    }
    parameters["step_overhead_s"] = draw(st.floats(1e-6, 1e-2))
    parameters["mixed_decode_tile_tokens"] = draw(st.sampled_from([None, 0, 80]))
    parameters["swap_variant"] = draw(st.sampled_from([None, *VARIANTS]))
    parameters["swap_layout"] = draw(st.sampled_from([None, *LAYOUTS]))
    parameters["swap_overlap"] = draw(st.booleans())
    for key in ("swap_step_factor", "swap_transfer_factor"):
        parameters[key] = draw(st.floats(1.0, 3.0))
    return RooflineCost(
        model=draw(st.sampled_from(list(ARCHITECTURES.values()))),
        gpu=draw(st.sampled_from([H200, ROUND])),
        tensor_parallel_size=draw(st.sampled_from([1, 2, 4])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8"])),
        **parameters,
    )


GRID = [
    BatchShape(decodes, decodes * past, prefills, 33 * prefills, seen, 33 * seen, *more)
    for decodes in (0, 1, 77)
    for past in (1, 129, 4001)
    for prefills in (0, 1, 3)
    for seen in (prefills * 33, prefills * 5000)
    for more in ((0, 0, 0), (3, 0, 5), (0, 7, 0))
] + [
    # contexts without requests, requests without tokens
    BatchShape(0, 50, 0, 0, 70, 90),
    BatchShape(0, 50, 2, 0, 70, 90, 1, 1, 1),
    BatchShape(2, 0, 0, 0, 70, 90),
]
any_shapes = st.lists(shapes() | awkward_shapes(), max_size=12)


def bits(numbers):
    return [float(number).hex() for number in numbers]


def as_rows(batch):
    return np.array(batch, dtype=np.int64).reshape(len(batch), len(BatchShape._fields))


def assert_columns_are_steps(model, batch):
    columns = model.columns(as_rows(batch))
    assert columns.shape == (len(batch), len(StepCost._fields))
    assert columns.dtype == np.float64
    for row, shape in zip(columns.tolist(), batch, strict=True):
        cost = model.step(shape)
        assert bits(row) == bits(cost), shape
        if not any(shape[6:]):
            assert bits([batch_total_of(model)(*shape[:6])]) == bits([cost.total_s])


def assert_decodes_are_steps(model, num_decodes, contexts):
    if not num_decodes:
        return
    ends = decode_ends_of(model)(num_decodes)
    for context in contexts:
        expected = model.step(BatchShape(num_decodes, context, 0, 0, 0, 0)).total_s
        assert bits(ends(context, 1, 0.0, inf)) == bits([expected]), context
        assert_ends_are_sums(model, num_decodes, context)


def assert_ends_are_sums(model, num_decodes, context):
    ends = decode_ends_of(model)(num_decodes)
    expected, now_s = [], 1.7
    for tokens in range(context, context + 4 * num_decodes, num_decodes):
        now_s += model.step(BatchShape(num_decodes, tokens, 0, 0, 0, 0)).total_s
        expected.append(now_s)
    assert bits(ends(context, 4, 1.7, inf)) == bits(expected)
    assert bits(ends(context, 1, 1.7, inf)) == bits(expected[:1])
    for until_s in (expected[2], (expected[1] + expected[2]) / 2):
        assert bits(ends(context, 4, 1.7, until_s)) == bits(expected[:3])


@every_pricer
def test_many_steps_end_where_they_end_one_by_one(kind, monkeypatch):
    model = copy.copy(PRICERS[kind])
    for ends in (decode_ends_of(model)(3), HostAhead(model).decode_ends(3)):
        monkeypatch.undo()
        monkeypatch.setattr(pricing, "_MANY_STEPS", 10**9)
        some = ends(900, 300, 1.7, inf)
        between_s = (some[0] + some[-1]) / 2
        horizons = (inf, -inf, 1.7, some[0], between_s, *some[-2:])
        expected = [bits(ends(900, 300, 1.7, until_s)) for until_s in horizons]
        for least in (1, 4, 128):
            monkeypatch.setattr(pricing, "_MANY_STEPS", least)
            assert expected == [bits(ends(900, 300, 1.7, each)) for each in horizons]


# -- the same bits as `step` --------------------------------------------------------


@every_pricer
def test_every_model_prices_many_as_one(kind):
    model = PRICERS[kind]
    assert_columns_are_steps(model, GRID)
    for num_decodes in (0, 1, 2, 100, 1024):
        contexts = [0, 1, num_decodes, 128 * num_decodes, 10**6 + 1]
        assert_decodes_are_steps(model, num_decodes, contexts)


@given(
    model=rooflines(),
    batch=any_shapes,
    num_decodes=st.integers(0, 1024),
    contexts=st.lists(st.integers(0, 10**8), max_size=4),
)
def test_any_roofline_prices_many_as_one(model, batch, num_decodes, contexts):
    assert_decodes_are_steps(model, num_decodes, contexts)
    assert_columns_are_steps(model, batch)


@given(
    coefficients=st.lists(st.floats(0.0, 1e-2), min_size=8, max_size=8),
    base_s=st.floats(1e-6, 1.0),
    batch=any_shapes,
    num_decodes=st.integers(0, 1024),
)
def test_any_linear_prices_many_as_one(coefficients, base_s, batch, num_decodes):
    keywords = dict(zip(COEFFICIENTS, coefficients, strict=True))
    model = LinearCost(base_s, **keywords)
    assert_columns_are_steps(model, batch)
    assert_decodes_are_steps(model, num_decodes, [0, num_decodes, 123_457])


@pytest.mark.parametrize("name", ["sliding", "all sliding"])
@pytest.mark.parametrize("num_decodes", [1, 7, 256])
def test_decodes_around_the_window(name, num_decodes):
    model = RooflineCost(model=ARCHITECTURES[name], gpu=ROUND)
    edge = num_decodes * ARCHITECTURES[name].sliding_window
    contexts = range(edge - 3, edge + 4)
    assert_decodes_are_steps(model, num_decodes, contexts)
    batch = [BatchShape(num_decodes, context, 0, 0, 0, 0) for context in contexts]
    assert_columns_are_steps(model, batch)
    ends = decode_ends_of(model)(num_decodes)
    inside_s, outside_s = (ends(seen, 1, 0.0, inf)[0] for seen in (edge, 2 * edge))
    assert (outside_s > inside_s) is (name == "sliding")


@every_pricer
def test_no_steps_have_no_cost(kind):
    assert PRICERS[kind].columns(as_rows([])).shape == (0, len(StepCost._fields))


@every_pricer
def test_an_empty_step_is_priced_all_ways(kind):
    model = PRICERS[kind]
    expected = model.step(EMPTY)
    assert batch_total_of(model)(*EMPTY[:6]) == expected.total_s
    assert model.columns(as_rows([EMPTY])).tolist() == [[float(x) for x in expected]]


def test_a_key_that_is_slow_to_compute_binds_decodes():
    # a line of reading alone would be wrong here: 512 heads share one latent
    model = RooflineCost(model=MLA_OF_MANY_HEADS, gpu=ROUND)
    slow = replace(model, prefill_attention_efficiency=1e-3)
    fast = replace(model, prefill_attention_efficiency=1.0)
    shape = BatchShape(8, 80_000, 0, 0, 0, 0)
    assert slow.step(shape).total_s > fast.step(shape).total_s
    assert slow.steady_decodes(8) is None
    assert_decodes_are_steps(slow, 8, [8, 80_000])


def test_mixed_batches_are_priced_apart_from_decodes():
    fa2 = RooflineCost(model=LLAMA_8B, gpu=ROUND)
    alone = BatchShape(32, 64_000, 0, 0, 0, 0)
    mixed = BatchShape(32, 64_000, 1, 512, 512, 131_328)
    decode_s = fa2.columns(as_rows([alone, mixed]))[:, 3]
    assert decode_s[1] > decode_s[0]
    assert_columns_are_steps(fa2, [alone, mixed, alone])


# -- kept prices --------------------------------------------------------------------


def test_the_order_of_questions_changes_no_price():
    batch = [
        BatchShape(n, 100 * n, n % 3, 7 * (n % 3), 9 * n, 50 * n) for n in range(40)
    ]
    fresh = RooflineCost(model=MOE, gpu=ROUND)
    used = RooflineCost(model=MOE, gpu=ROUND)
    expected = [fresh.step(shape) for shape in batch]
    used.columns(as_rows(batch))
    assert [used.step(shape) for shape in reversed(batch)] == expected[::-1]
    assert_columns_are_steps(fresh, batch)


def test_what_makes_ends_is_made_once():
    ends = decode_ends_of(RooflineCost(model=TINY, gpu=ROUND))
    assert ends(8) is ends(8)
    assert ends(8) is not ends(9)


def test_a_full_memo_still_prices(monkeypatch):
    monkeypatch.setattr(cost_parts, "_MAX_KEPT", 2)
    model = RooflineCost(model=MOE, gpu=ROUND)
    batch = [BatchShape(n, 10 * n, 0, 0, 0, 0) for n in range(1, 9)]
    assert_columns_are_steps(model, batch)
    for shape in batch:
        assert_decodes_are_steps(model, shape.num_decodes, [1000])
    assert len(model._token_parts) == len(model._row_parts) == 2


def test_copies_price_alike_and_start_empty():
    model = RooflineCost(model=MOE, gpu=ROUND)
    shape = BatchShape(8, 800, 1, 64, 64, 2080)
    cost = model.step(shape)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert not other._token_parts
        assert other.step(shape) == cost
    cheaper = replace(model, step_overhead_s=1e-6)
    assert cheaper.step(shape).total_s < cost.total_s


def test_a_memo_keeps_what_there_is_room_for(monkeypatch):
    monkeypatch.setattr(cost_parts, "_MAX_KEPT", 1)
    memo = Memo()
    assert memo.keep(1, 0.5) == 0.5
    assert memo.keep(2, 0.25) == 0.25
    assert memo == {1: 0.5}


def test_columns_are_added_in_the_order_of_the_fields():
    parts = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    columns = cost_columns(2, *parts[:-1], np.array([0.8, 8e8]))
    assert bits(columns[0]) == bits(step_cost(*parts))
    assert bits(columns[1]) == bits(step_cost(*parts[:-1], 8e8))


def test_the_annotations_of_a_roofline_resolve():
    # `sim.config.plug` checks types of the configuration by them
    assert get_type_hints(RooflineCost)["swap_efficiency"] is float


# -- classes that are pricers -------------------------------------------------------


class StepOnly:
    def step(self, shape):
        del shape
        return step_cost(host_s=1.0)

    def describe(self):
        return {"kind": "own"}


class OnlyStepOfOurs(ConstantCost):
    """A user's model that adds a second: the methods inherited disagree with it."""

    def step(self, shape):
        return step_cost(host_s=super().step(shape).total_s + 1.0)


class Both(OnlyStepOfOurs):
    def columns(self, shapes):
        return cost_columns(len(shapes), *self.step(EMPTY).parts)


class Told(Both):
    """Has a price of decodes of its own, too."""

    def decode_total(self, num_decodes):
        del num_decodes
        return lambda _: self.step_s + 1.0


class DecodesOnly(OnlyStepOfOurs):
    decode_total = Told.decode_total


class Described(Both):
    def describe(self):
        return {"kind": "own"}


class OwnFormula(ConstantCost):
    """Redefines the parts of a step; columns would be of the parts before."""

    def parts(self, *shape):
        return *super().parts(*shape)[:5], 2.0 * self.step_s, None


class OwnTerm(LinearCost):
    """Redefines a term; its line would be that of the term before."""

    def decode_attention_s(self, num_decodes, num_context_tokens, num_prefills):
        return 2.0 * self.decode_context_token_s * num_context_tokens


class SteppedAgain(Both):
    def step(self, shape):
        return step_cost(host_s=super().step(shape).total_s + 1.0)


class Plain(ConstantCost):
    """Redefines nothing, but its instances take attributes."""


class OptedOut(ConstantCost):
    columns = None


class Promised(StepOnly, CostModel, StepPricer):
    """Names the protocols and writes no method."""


class Delegating:
    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def step(self, shape):
        return step_cost(host_s=2.0 * self.model.step(shape).total_s)


@every_pricer
def test_our_models_are_pricers(kind):
    assert pricer_of(PRICERS[kind]) is PRICERS[kind]


@pytest.mark.parametrize("cls", [Both, Told, Described, Plain, OwnTerm])
def test_a_class_that_keeps_both_together_is_a_pricer(cls):
    model = cls(0.5)
    assert pricer_of(model) is model
    assert_decodes_are_steps(model, 3, [100])
    assert_columns_are_steps(model, [EMPTY, BatchShape(3, 9, 0, 0, 0, 0)])


@pytest.mark.parametrize(
    "cls", [OnlyStepOfOurs, DecodesOnly, SteppedAgain, OptedOut, OwnFormula]
)
def test_a_step_of_its_own_needs_methods_of_its_own(cls):
    model = cls(0.5)
    assert pricer_of(model) is None
    if cls is not DecodesOnly:
        assert_decodes_are_steps(model, 3, [100])


def test_other_models_are_asked_step_by_step():
    assert pricer_of(StepOnly()) is None
    assert pricer_of(Promised()) is None
    assert pricer_of(Delegating(ConstantCost(0.5))) is None
    patched = Plain(0.5)
    patched.step = StepOnly().step
    assert pricer_of(patched) is None


# -- redefined steps ----------------------------------------------------------------


class Doubled(LinearCost):
    """Redefines `step` alone: inherited methods price another step."""

    def step(self, shape):
        return step_cost(*(2.0 * part for part in super().step(shape).parts))


class Instant(ConstantCost):
    """A step that takes no time any more."""

    def step(self, shape):
        return StepCost(0.0)


def test_prices_of_a_redefined_step_are_asked_of_it():
    batch = (3, 400, 1, 50, 50, 1275)
    model = Doubled(1e-3, decode_s=1e-4, prefill_token_s=1e-5)
    assert batch_total_of(model)(*batch) == model.step(BatchShape(*batch)).total_s
    assert_ends_are_sums(model, 3, 400)
    assert batch_total_of(ConstantCost(0.5))(*batch) == 0.5


def test_steps_without_length_are_planned_no_further():
    assert decode_ends_of(Instant(1.0))(2)(10, 5, 3.0, inf) == [3.0]
    model = RooflineCost(model=TINY, gpu=ROUND)
    assert decode_ends_of(model)(2)(10, 5, 1e300, inf) == [1e300]
