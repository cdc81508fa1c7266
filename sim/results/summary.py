"""The summary of a run: numbers, provenance, and what the user should be told."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import fleets
from sim.results.drafts import draft_rows
from sim.results.group_usage import mean_blocks
from sim.results.metrics import (
    by_slo_class,
    cache_and_queues,
    latencies,
    sessions,
    throughput,
)
from sim.results.ranks import ONE, parts_of
from sim.results.schema import LATENCIES, SHOWN_STATISTICS
from sim.results.transfers import transfer_rows
from sim.scheduler.v1.dialect import dialect_of
from workloads.columns import largest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sim.config.tables import EngineConfig, RunConfig
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


def numbers(
    recording: Recording,
    capacity: CapacityEstimate,
    num_requests: int,
    duration_s: float,
) -> dict[str, Any]:
    """Return what was measured, and the engine's resolved arguments."""
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
    """Return what was measured of service levels and sessions, where there are any."""
    found = {
        "by_slo_class": by_slo_class(recording.request_table),
        "sessions": sessions(recording.request_table, traffic.session_id),
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def kv_cache_groups(
    recording: Recording, capacity: CapacityEstimate, duration_s: float
) -> dict[str, Any]:
    """Return what each kind of KV cache group held, where there are several."""
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
        f"{scheduler_name(config)} scheduler can always bring to an end with "
        f"{used.num_gpu_blocks:,} blocks, its watermark and "
        f"{used.max_num_batched_tokens:,} max_num_batched_tokens"
    ]


def fan_out_warnings(specs: Sequence[RequestSpec]) -> list[str]:
    """Say what counts as a request where samples and beams are served one by one."""
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


def scheduler_name(config: RunConfig) -> str:
    """Return the generation's name, or that of the user's class."""
    kind = config.engine.scheduler
    return Path(kind if isinstance(kind, str) else str(kind.get("kind"))).name


def scheduling(engines: Iterable[EngineConfig], numbers: Mapping[str, Any]) -> str:
    """Return how steps follow each other in the engines of each pool, in words."""
    return "; ".join(dict.fromkeys(_scheduling(each, numbers) for each in engines))


def _scheduling(engine: EngineConfig, numbers: Mapping[str, Any]) -> str:
    num_stages = engine.pipeline_parallel_size
    if engine.schedules_ahead:
        known = dialect_of(engine.version).knows_async_scheduling
        return (
            f"asynchronous scheduling ({numbers['overlapped_s']:,.1f} s of the host "
            f"hidden, {numbers['num_wasted_tokens']:,} tokens wasted"
            + ("" if known else "; preempted requests as from 0.28 on")
            + ")"
        )
    if num_stages > 1:
        return f"synchronous scheduling, {num_stages} steps in flight in a pipeline"
    refused = engine.refuses_ahead
    return "synchronous scheduling" + (
        f" (the release schedules ahead, which is not built with {refused})"
        if refused
        else ""
    )


def title(config: RunConfig) -> str:
    engine = config.engine
    num_gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size
    num_gpus *= engine.data_parallel_size
    gpus = f"{num_gpus} x {engine.gpu}" if num_gpus > 1 else engine.gpu
    on = Path(gpus).name if config.fleet is None else fleets.title(config)
    return ", ".join(
        (
            f"{Path(engine.model).name} on {on}",
            f"{scheduler_name(config)} {engine.version}",
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


def clock(seconds: float) -> str:
    """Format simulated seconds as h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a summary as (name, text), without wall time."""
    s = summary
    unserved = ", ".join(
        f"{s[key]:,} {key.replace('_', ' ')}"
        for key in ("rejected", "aborted", "unsent", "unfinished", "length_capped")
        if s[key]
    )
    rows = [
        (
            "requests",
            f"{s['completed']:,} of {s['num_requests']:,} completed"
            + (f", {unserved}" if unserved else ""),
        ),
        ("simulated time", f"{clock(s['duration'])} in {s['num_steps']:,} steps"),
        (
            "throughput",
            f"{s['request_throughput']:.2f} requests/s{_offered(s)}, "
            f"{s['output_throughput']:,.0f} output tokens/s",
        ),
        (
            "KV cache",
            f"{s['num_gpu_blocks']:,} blocks{_interval(s)}{_block_size(s)}; usage mean "
            f"{s['kv_cache_usage_mean']:.1%}, max {s['kv_cache_usage_max']:.1%}",
        ),
        *_ranks(s),
        *fleets.rows(s),
        *_kv_groups(s),
        (
            "preemptions",
            f"{s['num_preemptions']:,}, of {s['num_requests_preempted']:,} requests; "
            f"{s['recomputed_tokens']:,} tokens recomputed",
        ),
        *_moves(s),
        _queues(s),
    ]
    if s.get("prefix_cache_queries"):
        hits = s["prefix_cache_hits"] / s["prefix_cache_queries"]
        evicted = s.get("num_evictions")
        rows.append(
            (
                "prefix cache",
                f"{hits:.2%} of {s['prefix_cache_queries']:,} prompt tokens hit"
                + ("" if evicted is None else f"; {evicted:,} blocks evicted"),
            )
        )
    return [*rows, *transfer_rows(s), *draft_rows(s), *_uncertainty(s), *_groups(s)]


def _block_size(summary: Mapping[str, Any]) -> str:
    """Say how many tokens a block holds, where that does not depend on its group."""
    sizes = {kind["block_size"] for kind in summary.get("kv_cache_groups", ())}
    if len(sizes) > 1:
        return ""
    size = sizes.pop() if sizes else summary["block_size"]
    return f" of {size:,} tokens"


def _kv_groups(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = summary.get("kv_cache_groups", ())
    sizes = {kind["block_size"] for kind in kinds}
    for place, kind in enumerate(kinds):
        size = f", blocks of {kind['block_size']:,} tokens" if len(sizes) > 1 else ""
        yield (
            "" if place else "KV groups",
            f"{layers_in_words(kind)}{size}: mean {kind['num_blocks_mean']:,.0f} "
            f"blocks, max {kind['num_blocks_max']:,}",
        )


def layers_in_words(kind: Mapping[str, Any]) -> str:
    """Return the layers of a kind of group, such as ``3 x 12 layers, full attention``.

    `kind` has the keys of ``kv_cache_groups`` in a summary.
    """
    times = f"{kind['num_groups']} x " if kind["num_groups"] > 1 else ""
    return f"{times}{kind['num_layers']} layers, {kind['kind']}"


def _uncertainty(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how far the cost model may be off, where it says so."""
    ttft, tpot = summary["mean_ttft_ms_interval"], summary["mean_tpot_ms_interval"]
    said = [
        f"{name} mean {found[0]:,.1f} to {found[1]:,.1f} ms"
        for name, found in (("TTFT", ttft), ("TPOT", tpot))
        if found
    ]
    if share := summary["extrapolated_share"]:
        said.append(f"{share:.2%} of busy time extrapolated")
    if said:
        yield "kernel bounds", ", ".join(said)


def _groups(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if s := summary.get("sessions"):
        mean_s = s["mean_duration_s"]
        lasted = "" if mean_s is None else f", {mean_s:,.1f} s each on average"
        yield (
            "sessions",
            f"{s['num_completed']:,} of {s['num_sessions']:,} completed{lasted}; "
            f"{s['mean_turns']:.1f} turns on average",
        )
    for name, numbers in summary.get("by_slo_class", {}).items():
        if not numbers["completed"]:
            yield f"class {name}", f"0 of {numbers['num_requests']:,} completed"
            continue
        parts = (
            f"{label} p50 {numbers[f'p50_{key}_ms']:,.0f}, "
            f"p95 {numbers[f'p95_{key}_ms']:,.0f}, "
            f"p99 {numbers[f'p99_{key}_ms']:,.0f} ms"
            for key, label in (("ttft", "TTFT"), ("e2el", "E2E"))
        )
        yield f"class {name}", f"{numbers['completed']:,} completed; {'; '.join(parts)}"


def _ranks(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not (ranks := summary.get("ranks")):
        return []
    text = f"{len(ranks)}, with a pool each"
    if (share := summary.get("wait_share")) is not None:
        num_dummies = summary["num_dummy_steps"]
        text += f"; {num_dummies:,} dummy steps, {share:.1%} of time waiting"
    return [("ranks", text)]


def _queues(summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return the queues; of ranks means are those of all, maxima of one."""
    s = summary
    part, parts = parts_of(s)
    of_all, of_one = (" in all", f" on {ONE[part]}") if parts else ("", "")
    return (
        "running",
        f"mean {s['num_running_mean']:.1f}{of_all}, max {s['num_running_max']:,} of "
        f"{s['max_num_seqs']:,}{of_one}; waiting mean {s['num_waiting_mean']:.1f}"
        f"{of_all}, max {s['num_waiting_max']:,}",
    )


def _moves(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    s = summary
    moves = []
    if s["swapped_out_blocks"]:
        moves.append(
            f"{s['num_preemptions_swap']:,} preemptions by swapping, "
            f"{s['swapped_out_blocks']:,} blocks out, {s['swapped_in_blocks']:,} in"
        )
    if s["copied_blocks"]:
        moves.append(f"{s['copied_blocks']:,} copied on write")
    return [("blocks moved", "; ".join(moves))] if moves else []


def _offered(summary: Mapping[str, Any]) -> str:
    rate = summary["request_rate"]
    return "" if rate is None else f" of {rate:.2f} offered"


def _interval(summary: Mapping[str, Any]) -> str:
    low, high = summary["num_gpu_blocks_low"], summary["num_gpu_blocks_high"]
    return "" if low == high else f" ({low:,} to {high:,})"


def latency_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the latencies as a name and a text for each of `SHOWN_STATISTICS`."""
    for latency in LATENCIES.values():
        keys = (f"{each}_{latency.key}_ms" for each in SHOWN_STATISTICS)
        numbers = (summary[key] for key in keys)
        yield latency.label, *("-" if n is None else f"{n:,.1f}" for n in numbers)
