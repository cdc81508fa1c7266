"""Cost models, and the table of their kinds."""

from __future__ import annotations

from sim.costs.base import CostModel, StepCost
from sim.costs.constant import ConstantCost
from sim.costs.linear import LinearCost
from sim.costs.measured import MeasuredCost
from sim.costs.roofline import RooflineCost
from sim.scheduler.batch import BatchShape

COST_MODELS: dict[str, type] = {
    "constant": ConstantCost,
    "linear": LinearCost,
    "measured": MeasuredCost,
    "roofline": RooflineCost,
}
"""`kind` of the configuration's ``cost`` table to the class it names."""

__all__ = [
    "COST_MODELS",
    "BatchShape",
    "ConstantCost",
    "CostModel",
    "LinearCost",
    "MeasuredCost",
    "RooflineCost",
    "StepCost",
]
