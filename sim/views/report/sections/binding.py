"""What a run was bound by, in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from sim.costs.base import STEP_PARTS
from sim.views.report.html import count, decimal, percent
from sim.views.report.sections.step_time import PART_NAMES

if TYPE_CHECKING:
    from sim.views.report.source import Run

_OFTEN_IDLE: Final = 0.5
_MOSTLY: Final = 0.5
_OFTEN_FULL: Final = 0.2
_SOMETIMES_FULL: Final = 0.05
_MANY_PREEMPTIONS: Final = 0.02
"""Preemptions a request."""


def bound_by(run: Run) -> str:
    """Return what kept a run from being faster: room first, then time.

    Requests that wait although a step has tokens to spare, or that are preempted, would
    be served if there were more of what they wait for; `sim.studies.planning.binding`
    asks in the same order. Otherwise it is what steps spend their time on.
    """
    if not run.steps.num_steps:
        return "Nothing ran: there is not a single step."
    swap_s, total_s = run.steps.seconds["swap_s"], run.steps.seconds["latency_s"]
    if swap_s > _MOSTLY * total_s:
        return f"Bound by swapping: {_largest_parts(run)}."
    waiting = float(run.summary.get("num_waiting_mean") or 0.0)
    is_waiting = waiting >= 1.0 or _queue_share(run) > _MOSTLY
    return _by_room(run, is_waiting=is_waiting) or _by_time(run, is_waiting=is_waiting)


def _by_room(run: Run, *, is_waiting: bool) -> str | None:
    """Return which room requests wait for, if that is what binds."""
    s, waits = run.summary, run.steps.waits
    waited_s = max(waits.total_s, 1e-300)
    for_seqs, for_blocks = waits.for_seqs_s / waited_s, waits.for_blocks_s / waited_s
    if is_waiting and for_seqs > _MOSTLY:
        return (
            f"Bound by admission: {percent(for_seqs)} of all waiting is for one of "
            f"{count(s['max_num_seqs'])} places (max_num_seqs)."
        )
    full = full_share(run)
    a_request = s["num_preemptions"] / max(s["num_requests"], 1)
    is_full = full > _OFTEN_FULL and a_request > _MANY_PREEMPTIONS
    if is_full or (is_waiting and for_blocks > _MOSTLY and full > _SOMETIMES_FULL):
        return (
            f"Bound by KV capacity: {percent(for_blocks)} of all waiting is for "
            f"some of the {count(s['num_gpu_blocks'])} blocks, with "
            f"{decimal(a_request)} preemptions a request."
        )
    return None


def _by_time(run: Run, *, is_waiting: bool) -> str:
    s, waits = run.summary, run.steps.waits
    if is_waiting and waits.for_tokens_s > _MOSTLY * waits.total_s:
        return (
            f"Bound by the time of steps: prompts wait for the "
            f"{count(s['max_num_batched_tokens'])} tokens of a step "
            f"(max_num_batched_tokens), and {_largest_parts(run)}."
        )
    idle = 1.0 - float(s.get("engine_busy_share") or 0.0)
    if idle > _OFTEN_IDLE:
        return f"Bound by nothing: the engine is idle for {percent(idle)} of the time."
    return f"Bound by the time of steps: {_largest_parts(run)}."


def full_share(run: Run) -> float:
    """Return the share of the time at which the cache was full, see `FULL`."""
    return run.steps.waits.full_s / max(float(run.summary["duration"]), 1e-300)


def _queue_share(run: Run) -> float:
    """Return the share of all time to the first token that was spent queueing."""
    r = run.requests
    ttft_s = r["ttft_s"]
    known = np.isfinite(ttft_s)
    queued_s = (r["first_scheduled_s"] - r["arrival_s"])[known]
    return float(queued_s.sum() / max(float(ttft_s[known].sum()), 1e-300))


def _largest_parts(run: Run) -> str:
    seconds = run.steps.seconds
    total_s = max(seconds["latency_s"], 1e-300)
    largest = sorted(STEP_PARTS, key=lambda part: -seconds[part])[:2]
    first, second = (f"{percent(seconds[part] / total_s)}" for part in largest)
    return (
        f"steps spend {first} of their time on {PART_NAMES[largest[0]]} and {second} "
        f"on {PART_NAMES[largest[1]]}"
    )
