"""How an engine takes steps: formed, priced, written down, their tokens given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.engine.steps.groups import GroupSteps
from sim.engine.steps.in_flight import AheadSteps, FlightSteps
from sim.engine.steps.single import ClockedSteps, WholeSteps

if TYPE_CHECKING:
    from sim.engine.steps.base import Owner, Steps


def way_of(owner: Owner, *, is_clocked: bool, stepwise: bool) -> Steps:
    """Return how an engine takes its steps; `stepwise` rules out stretches."""
    if is_clocked:
        return (ClockedSteps if owner.batches is None else AheadSteps)(owner)
    if owner.batches is not None:
        return FlightSteps(owner)
    keep = getattr(owner.scheduler, "keep_decodes", None)
    if (
        keep is not None
        and hasattr(owner.sample, "due_steps")
        and not (stepwise or owner.listeners or owner.pace is not None)
    ):
        decodes = keep()
        if decodes is not None:
            return GroupSteps(owner, decodes)
    return WholeSteps(owner)
