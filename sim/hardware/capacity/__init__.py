"""How many KV blocks fit, and why: `estimate_capacity` and its explanation."""

from __future__ import annotations

from sim.hardware.capacity.estimate import CapacityEstimate
from sim.hardware.capacity.explanation import capacity_rows, format_capacity
from sim.hardware.capacity.keywords import estimate_capacity

__all__ = [
    "CapacityEstimate",
    "capacity_rows",
    "estimate_capacity",
    "format_capacity",
]
