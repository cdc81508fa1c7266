"""Steps in flight: when each of them leaves the stages that it goes through."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel, StepCost
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.batch import BatchShape


class StepInFlight(NamedTuple):
    """A step whose output has not been processed."""

    step: int
    output: SchedulerOutput
    end_s: float


class StagedCostModel(Protocol):
    """A cost model of an engine whose steps go through stages."""

    def stage_times(self, shape: BatchShape) -> Sequence[tuple[float, float]]:
        """Return seconds on the way to each stage, and seconds in it."""
        ...


class BatchQueue:
    """The batches of an engine core that are in flight, the oldest first.

    ::

        scheduler call -> stage 0 -> link -> stage 1 -> ... -> output processed

    A batch enters a stage when it has left the one before and been sent, and the batch
    ahead of it has left the stage.

    Parameters
    ----------
    max_concurrent_batches
        Batches that may be in flight; see `scheduler.max_concurrent_batches`.
    cost_model
        A `StagedCostModel`, or one whose steps are of one stage.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/engine/core.py`` (`step_with_batch_queue`): filling the
    queue comes before waiting for the oldest output.
    """

    def __init__(self, max_concurrent_batches: int, cost_model: CostModel) -> None:
        self.steps = deque[StepInFlight]()
        self._max_steps = max_concurrent_batches
        staged = hasattr(cost_model, "stage_times")
        self._staged = cast("StagedCostModel", cost_model) if staged else None
        self._free_s: list[float] = []  # when the last batch leaves each stage

    def end_s(self, now_s: float, shape: BatchShape, cost: StepCost) -> float:
        """Let a batch enter; return when its output is there."""
        times = (
            [(0.0, cost.total_s)]
            if self._staged is None
            else self._staged.stage_times(shape)
        )
        free_s = self._free_s or [now_s] * len(times)
        end_s = now_s
        for stage, (sent_s, stage_s) in enumerate(times):
            end_s = max(end_s + sent_s, free_s[stage]) + stage_s
            free_s[stage] = end_s
        self._free_s = free_s
        return end_s

    def push(self, step: int, output: SchedulerOutput, end_s: float) -> None:
        self.steps.append(StepInFlight(step, output, end_s))

    def has_room(self, scheduler: Any) -> bool:
        """Whether the next batch is formed before the oldest output is waited for."""
        return len(self.steps) < self._max_steps and bool(
            self.steps[-1].output.scheduled
            or scheduler.num_running
            or scheduler.num_waiting
        )

    def pop(self, now_s: float) -> StepInFlight:
        """Return the oldest step; its end is no earlier than now."""
        oldest = self.steps.popleft()
        return oldest if oldest.end_s >= now_s else oldest._replace(end_s=now_s)

    @property
    def computes(self) -> bool:
        """Whether a step in flight has tokens."""
        return any(each.output.scheduled for each in self.steps)
