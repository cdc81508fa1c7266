"""Every step at a bound: the bound of `step`, whichever way it is asked."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.costs import LinearCost, MeasuredCost, RooflineCost
from sim.costs.base import BOUNDS, StepCost, pricer_of
from sim.costs.parts import step_cost
from sim.costs.steps.at_bound import AtBound
from sim.scheduler.batch import BatchShape
from tests.sim.costs.test_costs import H200, LLAMA_8B
from tests.sim.costs.test_measured import MODELS, entry, every_model, path, write
from tests.sim.costs.test_pricer import (
    GRID,
    any_shapes,
    assert_columns_are_steps,
    assert_decodes_are_steps,
    bits,
)

__all__ = ["path"]

SHAPE = BatchShape(3, 400, 1, 50, 50, 1275)
both = pytest.mark.parametrize("bound", BOUNDS)


class Bounded:
    """A user's model that knows bounds, and prices one step at a time."""

    def step(self, shape):
        total_s = 1.0 + 0.5 * shape.num_decodes
        return StepCost(
            total_s,
            gemm_s=0.5 * shape.num_decodes,
            host_s=1.0,
            lo_s=0.5 * total_s,
            hi_s=4.0 * total_s,
        )

    def describe(self):
        return {"kind": "own"}


class Unbounded(Bounded):
    def step(self, shape):
        return super().step(shape)._replace(lo_s=math.nan, hi_s=math.nan)


@both
@every_model
@settings(max_examples=40, deadline=None)
@given(
    batch=any_shapes,
    decodes=st.tuples(
        st.integers(0, 2048), st.lists(st.integers(0, 10**8), max_size=4)
    ),
)
def test_measured_steps_at_a_bound_have_the_same_bits_all_ways(
    path, name, bound, batch, decodes
):
    model = MeasuredCost(path, gpu=H200, **MODELS[name])
    cost = AtBound(model, bound)
    assert pricer_of(cost) is cost
    assert_columns_are_steps(cost, batch)
    assert_decodes_are_steps(cost, *decodes)
    for shape in batch:
        step, free = cost.step(shape), model.step(shape)
        assert step.total_s == step.lo_s == step.hi_s == getattr(free, f"{bound}_s")
        assert step.extrapolated == free.extrapolated
        assert math.isclose(sum(step.parts), step.total_s)


@both
@pytest.mark.parametrize(
    "model",
    [
        RooflineCost(model=LLAMA_8B, gpu=H200),
        LinearCost(0.1, decode_s=0.01),
        Unbounded(),
    ],
    ids=["roofline", "linear", "own"],
)
def test_without_bounds_a_step_is_what_it_was(model, bound):
    cost = AtBound(model, bound)
    if pricer_of(model) is None:  # what it makes of a shape is not in the shape's row
        assert pricer_of(cost) is None
    else:
        assert_columns_are_steps(cost, GRID)
    assert_decodes_are_steps(cost, 7, [7, 900])
    for shape in GRID:
        assert bits(cost.step(shape)[:10]) == bits(model.step(shape)[:10])


@pytest.mark.parametrize(("bound", "factor"), [("lo", 0.5), ("hi", 4.0)])
def test_a_users_bounds_are_taken_and_parts_scaled(bound, factor):
    cost = AtBound(Bounded(), bound)
    step = cost.step(SHAPE)
    assert step.total_s == 2.5 * factor
    assert (step.gemm_s, step.host_s) == (1.5 * factor, 1.0 * factor)
    assert cost.batch_total(*SHAPE[:6]) == 2.5 * factor
    assert cost.decode_total(4)(100) == 3.0 * factor
    assert pricer_of(cost) is None


def test_a_step_without_length_stays_one():
    class Free(Bounded):
        def step(self, shape):
            return StepCost(0.0, lo_s=0.0, hi_s=1.0)

    assert AtBound(Free(), "hi").step(SHAPE).total_s == 1.0
    assert AtBound(Free(), "lo").step(SHAPE).total_s == 0.0


def test_a_step_redefined_is_asked_for_its_own_bounds(tmp_path):
    class Slower(MeasuredCost):
        def step(self, shape):
            return step_cost(host_s=2.0, squares=(1.0, 9.0))

    file = write(tmp_path / "p.json", entry(LLAMA_8B))
    cost = AtBound(Slower(file, model=LLAMA_8B, gpu=H200), "hi")
    assert cost.decode_total(3)(100) == cost.batch_total(*SHAPE[:6]) == 5.0
    assert pricer_of(cost) is None


def test_it_says_what_it_is():
    said = json.loads(json.dumps(AtBound(Bounded(), "lo").describe()))
    assert said == {"kind": "own", "bounds": False, "bound": "lo"}
