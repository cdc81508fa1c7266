"""From the tables of a run to the numbers of its summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

    from sim.recorder import InterTokenLatencies, Recording

PERCENTILES = (50, 90, 95, 99)
SERVED = ("finished_stopped", "finished_length_capped")

Floats = npt.NDArray[np.float64]


def weighted_percentile(
    values: Floats, weights: npt.NDArray[np.int64], percent: float
) -> float:
    """Return a percentile of `values`, each taken `weights` times.

    Equals ``numpy.percentile`` (linear interpolation) on the repeated values.
    O(n log n) in distinct values.

    Raises
    ------
    ValueError
        If there is nothing to take a percentile of.
    """
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weights[order])
    if not len(cumulated) or cumulated[-1] == 0:
        raise ValueError("percentile of nothing")
    rank = (int(cumulated[-1]) - 1) * percent / 100
    below = int(rank)
    low, high = values[order][
        np.searchsorted(
            cumulated, [below, min(below + 1, int(cumulated[-1]) - 1)], side="right"
        )
    ]
    return float(low + (high - low) * (rank - below))


def distribution_ms(
    name: str, values_s: Floats, weights: npt.NDArray[np.int64] | None = None
) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles, in milliseconds.

    Keys are those of ``vllm bench serve``; values are None where nothing was
    measured. NaN in `values_s` is left out.
    """
    known = ~np.isnan(values_s)
    values_s = values_s[known]
    weights = np.ones(len(values_s), np.int64) if weights is None else weights[known]
    names = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES)]
    if not weights.sum():
        return {f"{statistic}_{name}_ms": None for statistic in names}
    mean = float(np.average(values_s, weights=weights))
    std = float(np.sqrt(np.average((values_s - mean) ** 2, weights=weights)))
    percentiles = [weighted_percentile(values_s, weights, p) for p in PERCENTILES]
    numbers = [mean, percentiles[0], std, *percentiles]
    return {
        f"{statistic}_{name}_ms": number * 1e3
        for statistic, number in zip(names, numbers, strict=True)
    }


def latencies(requests: pd.DataFrame, itl: InterTokenLatencies) -> dict[str, Any]:
    """Return TTFT, TPOT, ITL and end-to-end latency of requests that were served."""
    served = requests[requests["status"].isin(SERVED)]
    summary: dict[str, Any] = {}
    for name in ("ttft", "tpot"):
        summary |= distribution_ms(name, served[f"{name}_s"].to_numpy(np.float64))
    summary |= distribution_ms("itl", itl.values_s, itl.weights)
    summary |= distribution_ms("e2el", served["e2el_s"].to_numpy(np.float64))
    return summary


def throughput(
    requests: pd.DataFrame, num_requests: int, duration_s: float
) -> dict[str, Any]:
    """Return counts and rates over the run, named as ``vllm bench serve`` does.

    Parameters
    ----------
    requests
        The requests that arrived.
    num_requests
        Requests of the workload; more where the run was interrupted.
    duration_s
        Simulated seconds.
    """
    served = requests[requests["status"].isin(SERVED)]
    num_input = int(served["num_prompt_tokens"].sum())
    num_output = int(served["num_generated_tokens"].sum())
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    last_arrival_s = float(requests["arrival_s"].max()) if len(requests) else 0.0
    statuses = requests["status"].value_counts()
    rejected = int(statuses.get("finished_rejected", 0))
    aborted = int(statuses.get("finished_aborted", 0))
    return {
        "duration": duration_s,
        "num_requests": num_requests,
        "completed": len(served),
        "length_capped": int(statuses.get("finished_length_capped", 0)),
        "rejected": rejected,
        "aborted": aborted,
        "unfinished": num_requests - len(served) - rejected - aborted,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_rate": len(requests) / last_arrival_s if last_arrival_s > 0 else None,
        "request_throughput": len(served) * per_s,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
    }


def cache_and_queues(recording: Recording, duration_s: float) -> dict[str, Any]:
    """Return preemptions, cache usage and queue lengths; means are over time.

    The engine's idle time counts as an empty cache and empty queues. Queues are read
    right after each scheduler call, so ``num_waiting_mean`` leaves out the wait of a
    request until the next call; ``num_in_system_mean`` counts it.
    """
    steps, preemptions = recording.steps, recording.preemptions
    latency_s = steps["latency_s"].to_numpy(np.float64)
    modes = preemptions["mode"].value_counts()
    elapsed_s = max(duration_s, 1e-300)

    def mean_over_time(column: str) -> float:
        return float((steps[column].to_numpy(np.float64) * latency_s).sum()) / elapsed_s

    def total(column: str) -> int:
        return int(steps[column].sum())

    return {
        "num_preemptions": len(preemptions),
        "num_preemptions_swap": int(modes.get("swap", 0)),
        "num_preemptions_recompute": int(modes.get("recompute", 0)),
        "num_requests_preempted": int(preemptions["request_id"].nunique()),
        "kv_cache_usage_mean": mean_over_time("kv_cache_usage"),
        "kv_cache_usage_max": float(steps["kv_cache_usage"].max())
        if len(steps)
        else 0.0,
        "num_running_mean": mean_over_time("num_running"),
        "num_running_max": int(steps["num_running"].max()) if len(steps) else 0,
        "num_waiting_mean": mean_over_time("num_waiting"),
        "num_waiting_max": int(steps["num_waiting"].max()) if len(steps) else 0,
        "num_in_system_mean": recording.occupancy_s / elapsed_s,
        "swapped_in_blocks": total("num_swapped_in_blocks"),
        "swapped_out_blocks": total("num_swapped_out_blocks"),
        "copied_blocks": total("num_copied_blocks"),
        "recomputed_tokens": total("num_recomputed_tokens"),
        "num_steps": len(steps),
        "engine_busy_share": float(latency_s.sum()) / elapsed_s,
        "mean_step_ms": float(latency_s.mean()) * 1e3 if len(steps) else None,
    }
