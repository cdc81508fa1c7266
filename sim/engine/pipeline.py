"""Steps in flight: when each of them leaves the stages that it goes through."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from sim.costs.steps.ahead import HostAhead
from sim.scheduler.base import ScheduledDrafts, SchedulerOutput
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel
    from sim.results.recording.step_log import StepLog
    from sim.scheduler.batch import BatchShape


_MOST_STAGES = 1024
"""As many as there are layers, at most."""
NOTHING = SchedulerOutput(drafts=ScheduledDrafts({}, set()))


class StepInFlight(NamedTuple):
    """A step whose output has not been processed."""

    step: int
    output: SchedulerOutput
    end_s: float
    computes: bool = False
    """Whether it has tokens."""


class StagedCostModel(Protocol):
    """A cost model of an engine whose steps go through stages."""

    def stage_times(self, shape: BatchShape) -> Sequence[tuple[float, float]]:
        """Return seconds on the way to each stage, and seconds in it."""
        ...


class RunsBeside(Protocol):
    """Work that runs beside steps on the GPU."""

    def enter(self, begin_s: float, total_s: float, *, computes: bool) -> float:
        """Let a step begin that takes so long alone; return what it takes more."""
        ...


class Stages:
    """When batches leave the stages that they go through.

    ::

        scheduler call -> stage 0 -> link -> stage 1 -> ... -> output processed

    With asynchronous scheduling the host is the first stage: it forms no batch before
    it is through with the last one. A batch enters a stage when it has left the one
    before and been sent, and the batch ahead of it has left the stage. In a pipeline a
    request has its turn in one call of as many as there are stages, so a batch with
    decodes enters the first one when the batch so many calls ahead has its tokens.

    Parameters
    ----------
    cost_model
        A `StagedCostModel`, or one whose steps are of one stage.

    Attributes
    ----------
    has_output
        Whether the latest turn of the engine core ended with the output of a step.
    last_s
        When the latest batch with tokens leaves the last stage, in seconds.
    hidden_ns
        Time of the host, in nanoseconds, that was hidden as a whole.
    num_unwritten
        Latest steps of which the log has no row yet.
    beside
        What runs beside steps on the GPU and adds to them, where there is something.
    """

    num_unwritten = 0
    beside: RunsBeside | None = None

    def __init__(self, cost_model: CostModel) -> None:
        staged = hasattr(cost_model, "stage_times")
        self._staged = cast("StagedCostModel", cost_model) if staged else None
        self._ahead = cost_model if isinstance(cost_model, HostAhead) else None
        self._has_host = getattr(cost_model, "first_stage_is_host", False)
        self._free_s: list[float] = []  # when the last batch leaves each link and stage
        self._ready_s = -inf  # when the host is through with it
        self.last_s = -inf
        self._latest_s = deque[float](maxlen=_MOST_STAGES)  # ends, of empty ones, too
        self._overlapped_s = 0.0
        self.hidden_ns = 0
        self.has_output = False

    @property
    def overlapped_s(self) -> float:
        """How much longer steps would have taken one after the other."""
        return self._overlapped_s + self.hidden_ns / 1e9

    def hold_host(self, until_s: float) -> None:
        """Let the host form no batch before then."""
        self._ready_s = max(self._ready_s, until_s)

    def end_s(self, now_s: float, shape: BatchShape, total_s: float) -> float:
        """Let a batch enter; return when its output is there.

        That of a batch without tokens is there when those ahead are through.
        """
        if not (shape.num_decodes or shape.num_prefill_tokens):
            last_s = self.last_s
            end_s = last_s if last_s > now_s else now_s + total_s
            if self.beside is not None:
                begin_s = max(last_s, now_s)
                end_s += self.beside.enter(begin_s, end_s - begin_s, computes=False)
            self._latest_s.append(end_s)
            return end_s
        if self._staged is None:
            return self._enter(now_s, [(0.0, total_s)])
        times = (
            self._staged.stage_times(shape)
            if self._ahead is None
            else self._ahead.stage_times(shape, total_s)
        )
        if not self._has_host:
            return self._enter(now_s, times)
        if len(times) == 2:
            (_, host_s), (_, gpu_s) = times
            return self._enter_ahead(now_s, host_s, gpu_s)
        latest_s, num_stages = self._latest_s, len(times) - 1
        known_s = -inf  # tokens that its decodes begin with
        if shape.num_decodes and len(latest_s) >= num_stages:
            known_s = latest_s[-num_stages]
        end_s = self._enter(now_s, times, known_s)
        self._ready_s = self._free_s[0]
        latest_s.append(end_s)
        return end_s

    def _enter(
        self,
        now_s: float,
        times: Sequence[tuple[float, float]],
        known_s: float = -inf,
    ) -> float:
        """Let a batch with tokens enter that takes so long to each stage, and in it.

        It leaves the first one, and is not in the second before `known_s`.
        """
        free_s = self._free_s or [now_s] * len(times)
        end_s, before_s = now_s, free_s[-1]
        for stage, (sent_s, stage_s) in enumerate(times):
            end_s = max(end_s + sent_s, free_s[stage]) + stage_s
            free_s[stage] = end_s
            if stage == 0:
                end_s = max(end_s, known_s)
        self._free_s = free_s
        self.last_s = end_s
        alone_s = added([sent_s + stage_s for sent_s, stage_s in times])
        self._overlapped_s += max(alone_s - (end_s - max(before_s, now_s)), 0.0)
        return end_s

    def _enter_ahead(self, now_s: float, host_s: float, gpu_s: float) -> float:
        """Let a batch with tokens enter that takes so long of the host and the GPU.

        Time that is hidden as a whole is counted in nanoseconds, so that many steps
        add the same together as one by one.
        """
        ready_s, before_s = self._ready_s, self.last_s
        self._ready_s = ready_s = (now_s if now_s > ready_s else ready_s) + host_s
        if self.beside is not None:
            begin_s = ready_s if ready_s > before_s else before_s
            gpu_s += self.beside.enter(begin_s, gpu_s, computes=True)
        if ready_s <= before_s:
            end_s = before_s + gpu_s
            self.hidden_ns += round(host_s * 1e9)
        else:
            end_s = ready_s + gpu_s
            in_turn_s = end_s - (before_s if before_s > now_s else now_s)
            self._overlapped_s += max(host_s + gpu_s - in_turn_s, 0.0)
        self.last_s = end_s
        return end_s


class BatchQueue(Stages):
    """The batches of an engine core that are in flight, the oldest first.

    Parameters
    ----------
    max_concurrent_batches
        Batches that may be in flight; see `scheduler.max_concurrent_batches`.
    cost_model
        See `Stages`.
    log
        Takes when outputs are processed.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/engine/core.py`` (`step_with_batch_queue`): filling the
    queue comes before waiting for the oldest output.
    """

    def __init__(
        self, max_concurrent_batches: int, cost_model: CostModel, log: StepLog
    ) -> None:
        super().__init__(cost_model)
        self._log = log
        self.steps = deque[StepInFlight]()
        self._known: list[tuple[int, float]] = []  # steps ahead, and when it was told
        self._max_steps = max_concurrent_batches

    @property
    def has_steps(self) -> bool:
        """Whether outputs are to come."""
        return bool(self.steps)

    @property
    def num_steps(self) -> int:
        """Steps of which the outputs are to come."""
        return len(self.steps)

    def push(self, step: int, output: SchedulerOutput, end_s: float) -> None:
        self.steps.append(StepInFlight(step, output, end_s, bool(output.scheduled)))

    def has_room(self, scheduler: Any) -> bool:
        """Whether the next batch is formed before the oldest output is waited for."""
        return len(self.steps) < self._max_steps and bool(
            self.steps[-1].computes or scheduler.num_running or scheduler.num_waiting
        )

    def pop(self, now_s: float) -> StepInFlight:
        """Return the oldest step; it is processed no earlier than now."""
        oldest = self.steps.popleft()
        end_s = max(oldest.end_s, now_s, self._ready_s)
        self._log.outputs_s.append(end_s)
        self.has_output = True
        if self._known:
            self._known = [(ahead - 1, told_s) for ahead, told_s in self._known]
            self._write_known()
        return oldest._replace(end_s=end_s)

    def note_known(self, told_s: float) -> None:
        """Note when the output was told of a step that is not put in flight.

        Outputs are written in the order of steps, so that it may wait for others.
        """
        self._known.append((len(self.steps), told_s))
        self.has_output = True
        self._write_known()

    def _write_known(self) -> None:
        while self._known and not self._known[0][0]:
            self._log.outputs_s.append(self._known.pop(0)[1])

    def pop_if_full(self, now_s: float, scheduler: Any) -> StepInFlight:
        """Return the step that is waited for before the next batch is formed.

        The oldest step, or, as long as there is room, none: only the host, if it is
        busy.
        """
        if self.has_room(scheduler):
            self.has_output = False
            return StepInFlight(-1, NOTHING, max(now_s, self._ready_s))
        return self.pop(now_s)

    @property
    def computes(self) -> bool:
        """Whether a step in flight has tokens."""
        return any(each.computes for each in self.steps)
