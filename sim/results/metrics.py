"""From the tables of a run to the numbers of its summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from sim.errors import CostError
from sim.results.recording.usage import mean_between
from sim.results.schema import OF_REQUESTS, PERCENTILES, STATISTICS
from sim.results.tables.percentiles import MAX_NUM_SORTED, percentiles
from workloads.requests.long_arrays import chosen, collected, parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.hardware.capacity import CapacityEstimate
    from sim.results.recording.recorder import Recording
    from sim.results.recording.tokens import InterTokenLatencies
    from sim.results.recording.traffic import Traffic
    from sim.results.tables.memory import ResultTable

USAGE_PERCENTILES = (5, 25, 50, 75, 95)
SERVED = ("finished_stopped", "finished_length_capped")

LONGEST_S: Final = 1e18
"""Longest run: of longer ones squares of times may be too large for a number."""

Floats = npt.NDArray[np.float64]


def quantity(value: float) -> str:
    """Return a number with four digits, or all of those before its point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def in_words(times_ms: Sequence[float | None], digits: int) -> tuple[list[str], str]:
    """Return times as texts, and their unit: s where one of them has 100 s or more."""
    is_long = any(each is not None and each >= 1e5 for each in times_ms)
    scale, unit = (1e3, "s") if is_long else (1.0, "ms")
    texts = ["-" if n is None else f"{n / scale:,.{digits}f}" for n in times_ms]
    return texts, unit


def is_served(statuses: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which requests were served to their end: not rejected, not aborted."""
    return np.isin(statuses, SERVED)


def distribution_ms(
    name: str, values_s: Floats, is_wanted: npt.NDArray[np.bool_] | None = None
) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles, in milliseconds.

    Keys are those of ``vllm bench serve``; values are None where nothing was
    measured. NaN in `values_s` is left out, and so is what is not wanted.
    """
    is_known = ~np.isnan(values_s)
    if is_wanted is not None:
        is_known &= is_wanted
    known = chosen(values_s, is_known)
    if not len(known):
        return _in_ms(name, None)
    mean = float(np.average(known))
    squares = collected(((some - mean) ** 2 for some in parts(known)), np.float64)
    std = float(np.sqrt(np.average(squares)))
    del squares
    return _in_ms(name, (mean, std, percentiles(lambda: _batches(known), PERCENTILES)))


def _batches(values: Floats) -> Iterator[tuple[Floats, npt.NDArray[np.int64]]]:
    """Yield values, each with the weight 1."""
    ones = np.ones(min(len(values), MAX_NUM_SORTED), np.int64)
    for first in range(0, len(values), MAX_NUM_SORTED):
        some = values[first : first + MAX_NUM_SORTED]
        yield some, ones[: len(some)]


def _itl_ms(itl: InterTokenLatencies) -> dict[str, float | None]:
    """Return `distribution_ms` of every token of the served requests."""
    number, mean, std = itl.moments
    return _in_ms("itl", (mean, std, itl.percentiles(PERCENTILES)) if number else None)


def _in_ms(
    name: str, found: tuple[float, float, list[float]] | None
) -> dict[str, float | None]:
    """Name mean, standard deviation and percentiles in seconds, or their absence."""
    if found is None:
        return {f"{statistic}_{name}_ms": None for statistic in STATISTICS}
    mean, std, ranked = found
    numbers = [mean, ranked[0], std, *ranked]
    return {
        f"{statistic}_{name}_ms": number * 1e3
        for statistic, number in zip(STATISTICS, numbers, strict=True)
    }


def latencies(requests: ResultTable, itl: InterTokenLatencies) -> dict[str, Any]:
    """Return TTFT, TPOT, ITL and end-to-end latency of requests that were served."""
    return (
        of_served(requests, ("ttft", "tpot"))
        | _itl_ms(itl)
        | of_served(requests, ("e2el",))
    )


def of_served(requests: ResultTable, names: Sequence[str]) -> dict[str, float | None]:
    """Return the distributions of columns, without ``_s``, of served requests."""
    is_served = requests.is_one_of("status", SERVED)
    found: dict[str, float | None] = {}
    for name in names:
        found |= distribution_ms(name, requests[f"{name}_s"], is_served)
    return found


def throughput(
    requests: ResultTable, num_requests: int, duration_s: float
) -> dict[str, Any]:
    """Return counts and rates over the run, named as ``vllm bench serve`` does.

    `num_requests` are the workload's: more than arrived where some were never sent.
    """
    is_served = requests.is_one_of("status", SERVED)
    completed = int(is_served.sum())
    num_input, num_output = (
        int(requests[name].sum(where=is_served, dtype=np.int64))
        for name in ("num_prompt_tokens", "num_generated_tokens")
    )
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    last_arrival_s = float(requests["arrival_s"].max(initial=0.0))
    statuses = requests.counts("status")
    rejected = statuses["finished_rejected"]
    # A prompt that could not be read is lost as one is on an engine that dies.
    aborted = statuses["finished_aborted"] + statuses["finished_error"]
    rate = requests.num_rows / last_arrival_s if last_arrival_s > 0 else None
    unsent = num_requests - requests.num_rows
    return {
        "duration": duration_s,
        "num_requests": num_requests,
        "completed": completed,
        "length_capped": statuses["finished_length_capped"],
        "rejected": rejected,
        "aborted": aborted,
        "unsent": unsent,
        "unfinished": requests.num_rows - completed - rejected - aborted,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_rate": rate,
        "request_throughput": completed * per_s,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
    }


def goodput(
    requests: ResultTable,
    limits_ms: Mapping[str, float],
    num_requests: int,
    duration_s: float,
) -> dict[str, Any]:
    """Return how many requests were served within all limits, and how many a second.

    A request of one token has no TPOT to miss.
    """
    is_good = requests.is_one_of("status", SERVED)
    for name, limit_ms in limits_ms.items():
        column = f"{name.removesuffix('_ms')}_s"
        is_good &= ~(requests[column] * 1e3 > limit_ms)
    num_good = int(is_good.sum())
    return {
        "goodput": dict(limits_ms),
        "goodput_share": num_good / num_requests if num_requests else 0.0,
        "request_goodput": num_good / duration_s if duration_s > 0 else 0.0,
    }


def cache_and_queues(recording: Recording, duration_s: float) -> dict[str, Any]:
    """Return preemptions, cache usage and queue lengths; means are over time.

    The engine's idle time counts as an empty cache and empty queues. Queues are read
    right after each scheduler call, so ``num_waiting_mean`` leaves out the wait of a
    request until the next call; ``num_in_system_mean`` counts it. Of several engines
    queues are added up, usage is that of all pools, and maxima are those of one engine.
    """
    totals, preemptions = recording.totals, recording.preemption_table
    modes = preemptions.counts("mode")
    elapsed_s = max(duration_s, 1e-300)
    num_steps = totals.num_steps

    def mean_over_time(column: str) -> float:
        return totals.integral(column) / elapsed_s

    return {
        "num_preemptions": preemptions.num_rows,
        "num_preemptions_swap": modes.get("swap", 0),
        "num_preemptions_recompute": modes.get("recompute", 0),
        "num_requests_preempted": len(np.unique(preemptions["request_id"])),
        "kv_cache_usage_mean": mean_over_time("kv_cache_usage") / totals.num_engines,
        "kv_cache_usage_max": totals.max["kv_cache_usage"],
        **{
            f"p{percent}_kv_cache_usage": totals.usage_percentile(percent, duration_s)
            for percent in USAGE_PERCENTILES
        },
        "num_running_mean": mean_over_time("num_running"),
        "num_running_max": int(totals.max["num_running"]),
        "num_waiting_mean": mean_over_time("num_waiting"),
        "num_waiting_max": int(totals.max["num_waiting"]),
        "num_in_system_mean": recording.occupancy_s / elapsed_s,
        "swapped_in_blocks": totals.total["num_swapped_in_blocks"],
        "swapped_out_blocks": totals.total["num_swapped_out_blocks"],
        "copied_blocks": totals.total["num_copied_blocks"],
        "recomputed_tokens": totals.total["num_recomputed_tokens"],
        "num_steps": num_steps,
        # as a sum of steps it may be more by rounding
        "engine_busy_share": min(totals.busy_s / elapsed_s / totals.num_engines, 1.0),
        "mean_step_ms": totals.busy_s / num_steps * 1e3 if num_steps else None,
    }


def by_slo_class(requests: ResultTable) -> dict[str, Any]:
    """Return counts and latencies of each service level; empty with fewer than two."""
    numbers = requests.counts("slo_class")
    names = sorted(name for name, number in numbers.items() if number)
    if len(names) < 2:
        return {}
    is_served = requests.is_one_of("status", SERVED)
    unnamed = "none" if "none" not in names else "(none)"
    classes = {}
    for name in names:
        rows = is_served & requests.is_one_of("slo_class", (name,))
        facts: dict[str, Any] = {
            "num_requests": numbers[name],
            "completed": int(rows.sum()),
        }
        for each in OF_REQUESTS:
            facts |= distribution_ms(each.key, requests[each.column], rows)
        classes[name or unnamed] = facts
    return classes


def sessions(
    requests: ResultTable, planned: npt.NDArray[np.integer[Any]]
) -> dict[str, Any]:
    """Return how many sessions there were and how long they took; empty without any."""
    ids, num_planned = np.unique(planned[planned >= 0], return_counts=True)
    if not len(ids):
        return {}
    in_session = requests["session_id"] >= 0
    owner = np.searchsorted(ids, requests["session_id"][in_session])
    _, first = np.unique(requests["parent_id"][in_session], return_index=True)
    num_sent = np.bincount(owner[first], minlength=len(ids))
    is_served = requests.is_one_of("status", SERVED)[in_session]
    is_whole = num_sent == num_planned
    is_whole[owner[~is_served]] = False
    begin_s, end_s = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.fmin.at(begin_s, owner, requests["arrival_s"][in_session])
    np.fmax.at(end_s, owner, requests["finish_s"][in_session])
    durations_s = (end_s - begin_s)[is_whole]
    return {
        "num_sessions": len(ids),
        "num_started": int((num_sent > 0).sum()),
        "num_completed": len(durations_s),
        "num_turns": int(num_sent.sum()),
        "mean_turns": float(num_sent.sum() / max(1, (num_sent > 0).sum())),
        "mean_duration_s": float(durations_s.mean()) if len(durations_s) else None,
        "max_duration_s": float(durations_s.max()) if len(durations_s) else None,
    }


def numbers_of(
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
    edges_s = np.array([0.0, max(duration_s, 1e-300)])
    told = []
    for place, kind in enumerate(capacity.kv_cache_groups):
        blocks = rows["num_blocks"][rows["kind"] == place]
        held = mean_between(rows, "num_blocks", edges_s, kind=place)
        told.append(
            {
                "kind": kind["kind"],
                "num_groups": kind["num_groups"],
                "num_layers": kind["num_layers"],
                "block_size": kind["block_size"],
                "num_blocks_mean": float(held[0]),
                "num_blocks_max": int(blocks.max(initial=0)),
                **{key: kind[key] for key in ("num_blocks",) if key in kind},
            }
        )
    return {"kv_cache_groups": told}
