"""Columns of a run, collected as it happens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from cache.errors import require
from sim import schema

if TYPE_CHECKING:
    from sim.cost import StepCost
    from sim.request import Request
    from sim.scheduler.base import Preemption, Scheduler, SchedulerOutput

_CHUNK_ROWS = 8192
# What a row holds while it is collected: StepCost stands in it as it is.
_ROW_COLUMNS = (
    *list(schema.STEPS)[:11],
    "extrapolated",
    *[name for name in list(schema.STEPS)[11:] if name != "num_finished"],
)


@dataclass(frozen=True, slots=True)
class InterTokenLatencies:
    """The inter-token latencies of all served requests, without a value per token.

    Parameters
    ----------
    values_s
        Distinct latencies in seconds.
    weights
        How many tokens came after each.
    """

    values_s: npt.NDArray[np.float64]
    weights: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recording:
    """The tables of a run (`sim.schema`) and what the summary needs besides."""

    steps: pd.DataFrame
    requests: pd.DataFrame
    preemptions: pd.DataFrame
    itl: InterTokenLatencies
    extrapolated_share: float
    """Share of the engine's busy time in steps that the cost model extrapolated."""
    occupancy_s: float
    """Integral of the number of requests in the system over time (Little's law)."""


class Recorder:
    """Keeps every step, request and preemption of one run.

    Steps are collected in flat chunks of floats: exact, since counts stay far below
    2**53, and several times cheaper than a column each.
    """

    def __init__(self) -> None:
        self.num_arrived = 0
        self.num_finished = 0
        self.num_left = 0
        self.active: dict[int, Request] = {}
        self._rows: list[float] = []
        self._chunks: list[npt.NDArray[np.float64]] = []
        self._num_finished_by_step: list[int] = []
        self._requests: list[tuple[Any, ...]] = []
        self._preemptions: list[tuple[Any, ...]] = []
        self._streak_begins: list[int] = []
        self._streak_ends: list[int] = []
        self._gaps: list[tuple[int, int]] = []
        self._occupancy_s = 0.0
        self._occupied_since_s = 0.0

    # -- sim.engine.StepRecorder ----------------------------------------------

    def arrived(self, request: Request) -> None:
        """See `StepRecorder.arrived`."""
        self._occupy(request.arrival_s)
        self.num_arrived += 1
        self.active[request.request_id] = request

    def step(
        self,
        step: int,
        start_s: float,
        cost: StepCost,
        output: SchedulerOutput,
        scheduler: Scheduler,
    ) -> None:
        """See `StepRecorder.step`."""
        shape = output.shape
        usage = scheduler.cache_usage()
        self._rows += (
            step,
            start_s,
            *cost,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_swapped,
            shape.num_decodes + shape.num_prefill_tokens,
            shape.num_decodes,
            shape.num_prefills,
            shape.num_prefill_tokens,
            usage.kv_cache_usage,
            usage.cpu_cache_usage,
            usage.num_physical_blocks,
            usage.num_logical_blocks,
            usage.num_physical_tokens,
            usage.num_logical_tokens,
            len(output.preemptions),
            shape.num_swapped_in_blocks,
            shape.num_swapped_out_blocks,
            shape.num_copied_blocks,
            output.num_recomputed_tokens,
        )
        for preemption in output.preemptions:
            self._preempted(step, start_s, preemption)
        if len(self._rows) >= _CHUNK_ROWS * len(_ROW_COLUMNS):
            self._flush()

    def stepped(self, end_s: float, finished: list[Request]) -> None:
        """See `StepRecorder.stepped`."""
        self._num_finished_by_step.append(len(finished))
        if finished:
            self._occupy(end_s)
            for request in finished:
                del self.active[request.request_id]
                self._close(request)
                self._note_tokens(request)
            self.num_finished += len(finished)

    def left(self, request: Request, now_s: float) -> None:
        """See `StepRecorder.left`."""
        self._occupy(now_s)
        del self.active[request.request_id]
        self._close(request)
        self.num_left += 1

    def check(self, scheduler: Scheduler) -> None:
        """Prove that no request is lost or counted twice (invariant 1).

        Raises
        ------
        InvariantError
            If the queues do not hold as many requests as came and did not go.
        """
        queued = scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped
        gone = self.num_finished + self.num_left
        require(
            self.num_arrived == queued + gone,
            f"{self.num_arrived} requests arrived, {queued} are queued, {gone} left",
        )
        require(
            len(self.active) == queued,
            f"{len(self.active)} requests are active, {queued} are queued",
        )

    # -- collecting -----------------------------------------------------------

    def _occupy(self, now_s: float) -> None:
        """Advance the integral of requests in the system to now."""
        self._occupancy_s += len(self.active) * (now_s - self._occupied_since_s)
        self._occupied_since_s = now_s

    def _flush(self) -> None:
        rows = np.array(self._rows, dtype=np.float64)
        self._chunks.append(rows.reshape(-1, len(_ROW_COLUMNS)))
        self._rows = []

    def _preempted(self, step: int, now_s: float, preemption: Preemption) -> None:
        victim = preemption.request
        self._preemptions.append(
            (
                now_s,
                step,
                victim.request_id,
                preemption.for_request.request_id,
                preemption.reason,
                preemption.mode.value,
                preemption.num_tokens_lost,
                victim.num_output_tokens,
                preemption.num_blocks_freed,
                preemption.num_blocks_moved,
                preemption.kv_cache_usage_before,
                preemption.kv_cache_usage_after,
                victim.num_preemptions,
            )
        )

    def _close(self, request: Request) -> None:
        """Keep the row of a request."""
        num_output_tokens = request.num_output_tokens
        ttft_s = request.first_token_s - request.arrival_s
        e2el_s = request.finish_s - request.arrival_s
        tpot_s = (
            (e2el_s - ttft_s) / (num_output_tokens - 1)
            if num_output_tokens > 1
            else math.nan
        )
        self._requests.append(
            (
                request.request_id,
                request.arrival_s,
                request.num_prompt_tokens,
                num_output_tokens,
                request.num_sequences,
                request.num_generated_tokens or num_output_tokens,
                request.parent_id,
                request.status.value,
                request.reason,
                request.first_scheduled_s,
                request.first_token_s,
                request.finish_s,
                request.first_scheduled_s - request.arrival_s,
                ttft_s,
                tpot_s,
                e2el_s,
                request.num_preemptions,
                request.num_cached_tokens,
                request.num_recomputed_tokens,
            )
        )

    def _note_tokens(self, request: Request) -> None:
        """Keep how the tokens of a served request followed one another."""
        last_before = -1
        for first, last in request.streaks:
            if last_before >= 0:
                self._gaps.append((last_before, first))
            self._streak_begins.append(first)
            self._streak_ends.append(last)
            last_before = last

    # -- the end --------------------------------------------------------------

    def finish(self, now_s: float) -> Recording:
        """Close the books at `now_s`; requests still active become rows as they are."""
        self._occupy(now_s)
        self._flush()
        for request in self.active.values():
            self._close(request)
        table = np.concatenate(self._chunks)
        columns = {name: table[:, i] for i, name in enumerate(_ROW_COLUMNS)}
        columns["num_finished"] = np.array(self._num_finished_by_step, dtype=np.float64)
        latency_s = columns["latency_s"]
        extrapolated_s = float((columns["extrapolated"] * latency_s).sum())
        requests = pd.DataFrame(self._requests, columns=list(schema.REQUESTS))
        return Recording(
            steps=pd.DataFrame(
                {
                    name: columns[name].astype(kind)
                    for name, kind in schema.STEPS.items()
                }
            ),
            requests=_typed(requests, schema.REQUESTS).sort_values(
                "request_id", ignore_index=True
            ),
            preemptions=_typed(
                pd.DataFrame(self._preemptions, columns=list(schema.PREEMPTIONS)),
                schema.PREEMPTIONS,
            ),
            itl=self._inter_token_latencies(columns["start_s"] + latency_s),
            extrapolated_share=extrapolated_s / max(float(latency_s.sum()), 1e-300),
            occupancy_s=self._occupancy_s,
        )

    def _inter_token_latencies(
        self, end_s: npt.NDArray[np.float64]
    ) -> InterTokenLatencies:
        """Weigh each step by the tokens whose predecessor came one step earlier."""
        num_steps = len(end_s)
        # A streak from step a to step b has one interval in each of a+1 .. b.
        begins = np.bincount(
            np.array(self._streak_begins, dtype=np.int64) + 1, minlength=num_steps + 1
        )
        ends = np.bincount(
            np.array(self._streak_ends, dtype=np.int64) + 1, minlength=num_steps + 1
        )
        weights = np.cumsum(begins - ends)[:num_steps]
        values_s = np.diff(end_s, prepend=0.0)
        used = weights > 0
        gaps = np.array(self._gaps, dtype=np.int64).reshape(-1, 2)
        return InterTokenLatencies(
            values_s=np.concatenate(
                [values_s[used], end_s[gaps[:, 1]] - end_s[gaps[:, 0]]]
            ),
            weights=np.concatenate(
                [weights[used], np.ones(len(gaps), dtype=np.int64)]
            ).astype(np.int64),
        )


def _typed(frame: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    return frame.astype(dict(columns.items()))
