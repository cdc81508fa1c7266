"""Cost models of users: tried before anything runs, and held to it in every step."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from sim.config.contracts import watch
from sim.costs.base import StepCost, own_method, pricer_of
from sim.errors import ConfigError
from sim.scheduler.batch import EMPTY_SHAPE, Batch, BatchShape

if TYPE_CHECKING:
    from sim.costs.base import CostModel

_QUICK = ("columns", "parts", "batch_total", "decode_total")
"""Methods that price steps in place of ``step``."""


def hold_to_contract(cost_model: CostModel, kind: str) -> None:
    """Refuse a model that breaks a rule, and from now on a price that does.

    Raises
    ------
    ConfigError
        Now, or from the call of ``step``.
    """
    where = f"cost: '{kind}'"
    try:
        described = cost_model.describe()
        json.dumps(described, allow_nan=False)
        problem = (
            _first_problem(cost_model)
            if isinstance(described, dict)
            else f"describe() must return a table, got {str(described)[:80]}"
        )
    except Exception as error:
        problem = (
            f"it needs step(shape) -> StepCost and a JSON-ready describe(): "
            f"{type(error).__name__}: {error}"
        )
    if problem:
        raise ConfigError(f"{where}: {problem}; mend your class")
    if not any(own_method(cost_model, name) for name in _QUICK):
        _watch(cost_model, where)


def _first_problem(cost_model: CostModel) -> str | None:
    """Return the rule that an empty step breaks, or the price of a prompt, or None."""
    cost = cost_model.step(EMPTY_SHAPE)
    if problem := _problem(cost, "an empty step"):
        return problem
    if not 0 < cost.total_s < math.inf:
        return f"an empty step must take more than 0 s, got {cost.total_s}"
    pricer = pricer_of(cost_model)
    if pricer is None:
        return None
    shapes = _shapes()
    columns = pricer.columns(np.array(shapes, np.int64))
    expected = [tuple(cost_model.step(shape)) for shape in shapes]
    if np.shape(columns) != np.shape(expected):
        return (
            f"columns of {len(shapes)} steps must be {np.shape(expected)}, got "
            f"{np.shape(columns)}"
        )
    if not np.array_equal(columns, np.array(expected, np.float64), equal_nan=True):
        return "columns must say of each row what step says of it"
    return None


def _shapes() -> list[BatchShape]:
    """Return an empty step, a prompt, decodes, and both."""
    batches = [Batch(0) for _ in range(4)]
    for batch in batches[1::2]:
        batch.add(100, 300)
    for batch in batches[2:]:
        batch.add(1, 50)
        batch.add(1, 1000)
    return [batch.shape() for batch in batches]


def _watch(cost_model: CostModel, where: str) -> None:
    """Look at every price from now on, and make its numbers Python's own."""
    price = cost_model.step

    def step(shape: BatchShape) -> StepCost:
        cost = price(shape)
        if problem := _problem(cost, "a step"):
            raise ConfigError(f"{where}: {problem}; mend your class")
        *seconds, is_extrapolated, lo_s, hi_s = cost
        numbers = *map(float, seconds), bool(is_extrapolated), float(lo_s), float(hi_s)
        return StepCost._make(numbers)

    watch(cost_model, where, "a cost model", step=step)


def _problem(cost: StepCost, step: str) -> str | None:
    """Return the rule that a price breaks, or None; its length is the engine's."""
    if not isinstance(cost, StepCost):
        return f"{step} must be priced as a StepCost, got {str(cost)[:80]}"
    try:
        total_s, *parts = map(float, cost[:9])
        lo_s, hi_s = map(float, cost[10:])
    except (TypeError, ValueError):
        return f"{step} must be priced in seconds, got {str(tuple(cost))[:160]}"
    if not 0 < total_s < math.inf:
        return None
    if any(parts) and not (min(parts) >= 0 and math.isclose(sum(parts), total_s)):
        return (
            f"the parts of {step} must be 0 or more and add up to {total_s}, got "
            f"{sum(parts)} of {', '.join(map(str, parts))}"
        )
    known = not (math.isnan(lo_s) and math.isnan(hi_s))
    if known and not 0 < lo_s <= total_s <= hi_s < math.inf:
        return (
            f"lo_s and hi_s must lie around {total_s} and above 0, got {lo_s} and "
            f"{hi_s}; leave both out if they are unknown"
        )
    return None
