"""Warnings of a run: where its numbers could be taken for more than they are."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.summary.provenance import scheduler_name
from sim.scheduler.request import RequestStatus
from workloads.requests.columns import RequestColumns, largest
from workloads.traces import TRACE_READERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.tables import RunConfig
    from sim.hardware.capacity import CapacityEstimate
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.results.recording.recorder import Recorder, Recording
    from sim.results.tables.steps import StepTable
    from sim.scheduler.base import Scheduler
    from workloads.spec import RequestSpec

_OVERLOAD_SHARE = 0.05


def pool_warnings(
    capacity: CapacityEstimate,
    model: ModelArchitecture,
    config: RunConfig,
    *,
    frees_window: bool,
) -> list[str]:
    """Say where the pool is not what the user may take it for.

    `frees_window` says whether layers that all have one window free blocks behind it.
    """
    warnings = [
        *capacity.warnings,
        *(f"not simulated: {line}" for line in capacity.not_simulated),
    ]
    held, asked = capacity.max_model_len, config.engine.max_model_len
    whose = "the model's own" if asked is None else "the one asked for"
    longest = model.max_position_embeddings if asked is None else asked
    if held < longest:
        warnings.append(
            f"max_model_len is {held:,}, what the cache holds; {whose} is {longest:,}, "
            f"with which a real engine may refuse to start"
        )
    window = model.sliding_window
    is_told_apart = len(set(model.layer_kinds)) > 1  # groups free them
    is_freed = frees_window or config.engine.sliding_window is not None
    if is_told_apart or is_freed:
        return warnings
    if window is not None and window < held:
        warnings.append(
            f"blocks behind the model's sliding window stay held: set "
            f"engine.sliding_window to {window} to free them"
        )
    return warnings


def scheduler_warnings(
    estimated: CapacityEstimate, used: CapacityEstimate, config: RunConfig
) -> list[str]:
    """Say where the scheduler's own rules bound the length of a sequence."""
    if used.max_model_len >= estimated.max_model_len:
        return []
    return [
        f"max_model_len is {used.max_model_len:,} instead of "
        f"{estimated.max_model_len:,}: the longest sequence that the "
        f"{scheduler_name(config.engine)} scheduler can always bring to an end with "
        f"{used.num_gpu_blocks:,} blocks, its watermark and "
        f"{used.max_num_batched_tokens:,} max_num_batched_tokens"
    ]


def fan_out_warnings(specs: Sequence[RequestSpec]) -> list[str]:
    """Say which requests count where samples and beams are served one by one."""
    warnings = []
    if largest(specs, "best_of") > 1:
        warnings.append(
            "best_of: this engine serves every sample as a request of its own, so "
            "requests and input tokens count each sample (parent_id joins them)"
        )
    if largest(specs, "beam_width") > 1:
        warnings.append(
            "beam_width: this engine has no beam search; its front end asks for beams "
            "token by token, so latencies of those rows are of one token, and a step "
            "may pass between an answer and the next question"
        )
    return warnings


def oracle_warnings(config: RunConfig, is_closed_loop: bool) -> list[str]:
    """Say so if the run knows what no engine can know."""
    engine = config.engine
    if engine.evictor_kind != "clairvoyant" or not engine.prefix_caching:
        return []
    line = (
        "engine.evictor: clairvoyant has read the prompts to come: this is no engine, "
        "but about the best that any eviction could do"
    )
    if is_closed_loop:
        line += "; their order is the workload's, from which a closed loop departs"
    return [line]


def rounded_times_warnings(
    config: RunConfig, specs: Sequence[RequestSpec]
) -> list[str]:
    """Say so if a router meets requests that were recorded as coming at once."""
    trace, fleet = config.workload.trace, config.fleet
    if fleet is None or fleet.num_engines == 1 or trace is None:
        return []
    reader = TRACE_READERS.get(trace["kind"])
    if reader is None or "spread_arrivals" not in signature(reader).parameters:
        return []
    times_s = (
        specs.arrival_s
        if isinstance(specs, RequestColumns)
        else [each.arrival_s for each in specs if each.previous_id is None]
    )
    num_times = len(np.unique(times_s))
    if len(times_s) < 2 * num_times:
        return []
    return [
        f"the trace's times are rounded: {len(times_s):,} requests arrive at "
        f"{num_times:,} times, and a router that hears of load late sends those of one "
        "time alike; set workload.trace.spread_arrivals to true"
    ]


def rejections(recording: Recording) -> tuple[int, str]:
    """Return how many requests were rejected, and a line that names the first."""
    requests = recording.request_table
    rejected = np.flatnonzero(requests.is_one_of("status", ("finished_rejected",)))
    if not len(rejected):
        return 0, ""
    first = rejected[0]
    return len(rejected), (
        f"{len(rejected)} of {requests.num_rows} requests were rejected, the first "
        f"(request {requests['request_id'][first]}): {requests['reason'][first]}"
    )


def unsent_warning(numbers: dict[str, Any]) -> str | None:
    """Say so if sessions ended early, as a turn of theirs got no answer."""
    if not numbers["unsent"]:
        return None
    return (
        f"{numbers['unsent']:,} of {numbers['num_requests']:,} requests were not sent: "
        f"the one that they waited for was rejected or aborted, and the session ended"
    )


def overload_warning(recording: Recording, summary: dict[str, Any]) -> str | None:
    """Say so if the queue was long when the last request arrived.

    Latencies then tell how long the run was, not how good the engine is.
    """
    requests = recording.request_table
    if not requests.num_rows:
        return None
    last_s = float(requests["arrival_s"].max())
    steps = [each.step_table for each in recording.of_rank]
    num_waiting = sum(_num_waiting(each, last_s) for each in steps)
    limit = max(10, _OVERLOAD_SHARE * requests.num_rows)
    if last_s <= 0 or num_waiting < limit:
        return None
    return (
        f"overloaded: {num_waiting:,} requests were waiting when the last one arrived "
        f"({summary['request_rate']:.2f} requests/s came, "
        f"{summary['request_throughput']:.2f} were served); latencies grow with the "
        f"length of the run"
    )


def _num_waiting(steps: StepTable, time_s: float) -> int:
    """Return the requests that wait at the first step from `time_s` on; 0 if none."""
    for batch in steps.batches(("start_s", "num_waiting")):
        first = int(batch["start_s"].searchsorted(time_s))
        if first < len(batch["start_s"]):
            return int(batch["num_waiting"][first])
    return 0


def stall_warning(
    schedulers: Sequence[Scheduler], recorders: Sequence[Recorder]
) -> str:
    """Say where the requests stand that nothing can move any more, and which is why.

    Both of each engine; a recorder has the unfinished in their order of arrival.
    """
    num_waiting = sum(scheduler.num_waiting for scheduler in schedulers)
    num_running = sum(scheduler.num_running for scheduler in schedulers)
    num_swapped = sum(scheduler.num_swapped for scheduler in schedulers)
    waits = f"{num_waiting} request{' waits' if num_waiting == 1 else 's wait'}"
    remedy = "leave engine.admission_check on"
    behind = "behind one that cache or limits can never hold"
    if num_running or num_swapped:
        behind = (
            f"while {num_swapped} are swapped out and {num_running} run, and none can "
            f"go on"
        )
    for scheduler, recorder in zip(schedulers, recorders, strict=True):
        requests = recorder.active.values()
        # The one that is in the way has mostly been admitted, or heads the queue.
        by_place = sorted(
            requests, key=lambda each: each.status is RequestStatus.WAITING
        )
        for request in by_place:
            if (error := scheduler.admission_error(request)) is not None:
                if num_waiting:
                    behind = "behind one that can never be served"
                return (
                    f"the queue stalled: {waits} {behind}, where a real engine hangs: "
                    f"request {request.request_id}: {error}; {remedy}, which rejects "
                    f"it on arrival"
                )
    for scheduler in schedulers:
        reason = getattr(scheduler, "stall_reason", None)
        if scheduler.num_waiting and reason is not None and (told := reason()):
            return f"the queue stalled: {waits}: {told}"
    return f"the queue stalled: {waits} {behind}; {remedy}"
