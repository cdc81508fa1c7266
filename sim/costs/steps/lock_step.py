"""The length of a step that data-parallel ranks take together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sim.costs.base import StepCost, Together
from sim.costs.steps.slowed import slowed
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.costs.base import CostModel

DUMMY: Final = BatchShape(1, 1, 0, 0, 0, 0)
"""The batch of a rank without work: one token. Source: vLLM 0.33.0,
``v1/worker/gpu_worker.py`` (`execute_dummy_batch`)."""


class RankStep(NamedTuple):
    """A step of one of the ranks."""

    cost: StepCost
    """As long as that of the others."""
    wait_s: float
    """Its wait for the slowest rank: part of ``cost.allreduce_s``."""

    def slowed(self, factor: float) -> RankStep:
        """Return the same step if it takes so many times as long."""
        if factor == 1.0:
            return self
        return RankStep(slowed(self.cost, factor), self.wait_s * factor)


def steps_together(
    model: CostModel,
) -> Callable[[Sequence[BatchShape]], list[RankStep]]:
    """Return the price of a step of all ranks: the longest of theirs, and the rest.

    Every layer with experts waits for all ranks, and layers are alike, so a step takes
    what the rank that is slowest outside of the experts takes, and experts and
    exchanges of the tokens of all.
    """
    step = model.step
    together = model.together if isinstance(model, Together) else _nothing

    def steps(shapes: Sequence[BatchShape]) -> list[RankStep]:
        shapes = [shape if any(shape) else DUMMY for shape in shapes]
        alone = [step(shape) for shape in shapes]
        experts_s, exchange_s = together(shapes)
        longest_s = max(cost[0] for cost in alone)
        total_s = longest_s + experts_s + exchange_s
        found = []
        for own in alone:
            own_s, gemm_s, prefill_s, decode_s, head_s, reduce_s, *moved, flag = own[
                :10
            ]
            wait_s = longest_s - own_s
            reduce_s += exchange_s + wait_s
            parts = (gemm_s + experts_s, prefill_s, decode_s, head_s, reduce_s, *moved)
            cost = StepCost._make((total_s, *parts, flag, total_s, total_s))
            found.append(RankStep(cost, wait_s))
        return found

    return steps


def _nothing(shapes: Sequence[BatchShape]) -> tuple[float, float]:
    """Return the seconds in which ranks work together: none, priced one by one."""
    del shapes
    return 0.0, 0.0
