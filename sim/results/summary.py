"""The summary of a run: numbers, provenance, and what the user should be told."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.errors import CostError
from sim.results import fleets
from sim.results.group_usage import mean_blocks
from sim.results.metrics import (
    by_slo_class,
    cache_and_queues,
    latencies,
    sessions,
    throughput,
)
from sim.scheduler.v1.dialect import dialect_of
from workloads.columns import RequestColumns, largest
from workloads.traces import TRACE_READERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.config.tables import RunConfig
    from sim.config.workload import WorkloadConfig
    from sim.hardware.capacity import CapacityEstimate
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.results.recorder import Recording
    from sim.results.step_table import StepTable
    from sim.results.traffic import Traffic
    from sim.scheduler.base import Scheduler
    from workloads.spec import RequestSpec

_PACKAGES = ("kvsim", "simpy", "numpy", "pandas", "pyarrow", "matplotlib")
_OVERLOAD_SHARE = 0.05


LONGEST_S: Final = 1e18
"""Longest run: of longer ones squares of times may be too large for a number."""


def numbers(
    recording: Recording,
    capacity: CapacityEstimate,
    num_requests: int,
    duration_s: float,
) -> dict[str, Any]:
    """Return the measured numbers, and the engine's resolved arguments.

    Raises
    ------
    CostError
        If the run was so long that its numbers cannot be summed up.
    """
    if duration_s > LONGEST_S:
        raise CostError(
            f"a run may last {LONGEST_S:g} s at most, got {duration_s:g} s; mend what "
            f"makes its steps so long, such as cost"
        )
    summary = throughput(recording.request_table, num_requests, duration_s)
    summary |= latencies(recording.request_table, recording.itl)
    summary |= {
        "num_gpu_blocks": capacity.num_gpu_blocks,
        "num_gpu_blocks_low": capacity.num_gpu_blocks_low,
        "num_gpu_blocks_high": capacity.num_gpu_blocks_high,
        "num_cpu_blocks": capacity.num_cpu_blocks,
        "block_size": capacity.block_size,
        "max_model_len": capacity.max_model_len,
        "max_num_seqs": capacity.max_num_seqs,
        "max_num_batched_tokens": capacity.max_num_batched_tokens,
    }
    return summary | cache_and_queues(recording, duration_s)


def groups(recording: Recording, traffic: Traffic) -> dict[str, Any]:
    """Return the numbers of service levels and sessions, where there are any."""
    found = {
        "by_slo_class": by_slo_class(recording.request_table),
        "sessions": sessions(recording.request_table, traffic.session_id),
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def kv_cache_groups(
    recording: Recording, capacity: CapacityEstimate, duration_s: float
) -> dict[str, Any]:
    """Return the usage of each kind of KV cache group, where there are several."""
    if (rows := recording.group_table) is None:
        return {}
    told = []
    for place, kind in enumerate(capacity.kv_cache_groups):
        blocks = rows["num_blocks"][rows["kind"] == place]
        held = mean_blocks(rows, place, np.array([0.0, max(duration_s, 1e-300)]))
        told.append(
            {
                "kind": kind["kind"],
                "num_groups": kind["num_groups"],
                "num_layers": kind["num_layers"],
                "block_size": kind["block_size"],
                "num_blocks_mean": float(held[0]),
                "num_blocks_max": int(blocks.max(initial=0)),
            }
        )
    return {"kv_cache_groups": told}


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: _version(name) for name in _PACKAGES
    }


@cache
def _version(package: str) -> str:
    """Return a version that is looked up once: half the time of a tiny run."""
    return version(package)


def pool_warnings(
    capacity: CapacityEstimate,
    model: ModelArchitecture,
    config: RunConfig,
    *,
    frees_window: bool,
) -> list[str]:
    """Say where the pool is not what the user may take it for.

    `frees_window` says whether layers that all have one window free what is behind it.
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


def stall_warning(scheduler: Scheduler) -> str:
    """Say where the requests stand that nothing can move any more."""
    behind = "behind one that cache or limits can never hold"
    if scheduler.num_running or scheduler.num_swapped:
        behind = (
            f"while {scheduler.num_swapped} are swapped out and "
            f"{scheduler.num_running} run, and none can go on"
        )
    return (
        f"the queue stalled: {scheduler.num_waiting} requests wait {behind}; leave "
        f"engine.admission_check on"
    )


def release_name(engine: EngineConfig) -> str:
    """Return the name of its scheduler, and the release."""
    return f"{scheduler_name(engine)} {engine.version}"


def scheduler_name(engine: EngineConfig) -> str:
    """Return the generation's name, or that of the user's class."""
    kind = engine.scheduler
    return Path(kind if isinstance(kind, str) else str(kind.get("kind"))).name


def scheduling(engines: Iterable[EngineConfig], numbers: Mapping[str, Any]) -> str:
    """Return how steps follow each other in the engines of each pool, in words."""
    engines = [*engines]
    ahead = [engine for engine in engines if engine.schedules_ahead]
    ways = [_ahead_in_words(ahead, numbers)] if ahead else []
    for engine in engines:
        if not engine.schedules_ahead:
            num_stages = engine.pipeline_parallel_size
            pipeline = f", {num_stages} steps in flight in a pipeline"
            ways.append(f"synchronous scheduling{pipeline if num_stages > 1 else ''}")
    return "; ".join(dict.fromkeys(ways))


def _ahead_in_words(engines: Sequence[EngineConfig], numbers: Mapping[str, Any]) -> str:
    """Return the schedulers that form steps ahead, with their gains and losses."""
    names = [
        each.generation.ahead_in_words
        + (f" of {num_stages} stages" if num_stages > 1 else "")
        for each in engines
        for num_stages in (each.pipeline_parallel_size,)
    ]
    has_stages = any(each.pipeline_parallel_size > 1 for each in engines)
    hidden = "overlapped" if has_stages else "of the host hidden"
    are_known = all(
        each.generation.always_ahead or dialect_of(each.version).knows_async_scheduling
        for each in engines
    )
    return (
        " and ".join(dict.fromkeys(names))
        + f" ({numbers['overlapped_s']:,.1f} s {hidden}, "
        f"{numbers['num_wasted_tokens']:,} tokens wasted"
        + ("" if are_known else "; preempted requests as from 0.28 on")
        + ")"
    )


def title(config: RunConfig) -> str:
    engine = config.engine
    on = fleets.gpus_of(engine) if config.fleet is None else fleets.title(config)
    return ", ".join(
        (
            f"{Path(engine.model).name} on {on}",
            " and ".join(dict.fromkeys(map(release_name, config.engines()))),
            workload_title(config.workload),
            *_users(config.workload),
        )
    )


def _users(workload: WorkloadConfig) -> list[str]:
    number = workload.max_concurrent_users
    return [] if number is None else [f"{number:,} users"]


def workload_title(workload: WorkloadConfig) -> str:
    if workload.trace:
        path = Path(str(workload.trace.get("path", "trace")))
        how = " by superposition" * (workload.trace.get("scale_by") == "superposition")
        return f"{path.name} at {workload.trace.get('rate_scale', 1.0):g} x rate{how}"
    if workload.preset:
        return f"{workload.preset.name} at {workload.preset.rate_scale:g} x rate"
    if workload.sessions:
        name = f"{Path(str(workload.sessions.get('kind'))).name} sessions"
        arrivals = dict(workload.sessions.get("arrivals") or {})
        scale = workload.sessions.get("rate_scale", 1.0)
    else:
        assert workload.synthetic is not None
        name, arrivals = "synthetic", workload.synthetic.arrivals
        scale = workload.synthetic.rate_scale
    rate = f" {arrivals['rate']:g}/s" if "rate" in arrivals else ""
    return f"{name}, {arrivals.get('kind')}{rate} at {scale:g} x rate"
