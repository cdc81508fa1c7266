"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.costs.base import Bound


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    now_s: float
    num_requests: int
    num_arrived: int
    num_done: int
    bound: Bound | None = None
    """At which every step is, in the runs of `with_intervals`."""
