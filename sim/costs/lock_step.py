"""The length of a step that data-parallel ranks take together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel, StepCost

DUMMY: Final = BatchShape(1, 1, 0, 0, 0, 0)
"""What a rank without work computes: one token. Source: vLLM 0.33.0,
``v1/worker/gpu_worker.py`` (`execute_dummy_batch`)."""


@runtime_checkable
class Together(Protocol):
    """Optional part of a cost model: what ranks that divide experts do together.

    ``step`` of such a model is then the price of a rank by itself, without experts.
    """

    def together(self, num_tokens: int, most_tokens: int) -> tuple[float, float]:
        """Return seconds of experts and of exchanges, the same for every rank.

        Parameters
        ----------
        num_tokens, most_tokens
            Tokens of all ranks, and of the rank with most.
        """
        ...


class RankStep(NamedTuple):
    """A step of one of the ranks."""

    cost: StepCost
    """As long as that of the others."""
    wait_s: float
    """What it waited for the slowest: part of ``cost.allreduce_s``."""


def steps_together(model: CostModel, shapes: Sequence[BatchShape]) -> list[RankStep]:
    """Return the step of each rank: the longest of theirs, and what all do together.

    Every layer with experts waits for all ranks, and layers are alike, so a step takes
    what the rank that is slowest outside of the experts takes, and experts and
    exchanges of the tokens of all.
    """
    alone = [model.step(shape if any(shape) else DUMMY) for shape in shapes]
    tokens = [shape.num_decodes + shape.num_prefill_tokens or 1 for shape in shapes]
    experts_s = exchange_s = 0.0
    if isinstance(model, Together):
        experts_s, exchange_s = model.together(sum(tokens), max(tokens))
    longest_s = max(cost.total_s for cost in alone)
    total_s = longest_s + experts_s + exchange_s
    steps = []
    for cost in alone:
        wait_s = longest_s - cost.total_s
        length = cost._replace(
            total_s=total_s,
            gemm_s=cost.gemm_s + experts_s,
            allreduce_s=cost.allreduce_s + exchange_s + wait_s,
            lo_s=total_s,
            hi_s=total_s,
        )
        steps.append(RankStep(length, wait_s))
    return steps
