"""The JSON that ``vllm bench serve --save-result`` writes.

With ``--save-detailed`` it holds a list an entry a request (`input_lens`,
`output_lens`, `ttfts`, `itls`, newer releases `start_times`), otherwise totals only.
A request that failed has an empty list of gaps and TTFT 0. The client measures from
sending on, so its TTFT contains the way to the engine and its front end.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.results.schema import LATENCIES
from sim.studies.validation.observed import (
    MeasuredError,
    Observed,
    ObservedRequests,
    column,
    counts,
)
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TOTALS: Final = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
)
_STATISTICS: Final = ("mean", "median", "p50", "p90", "p95", "p99")


def read_vllm_bench(text: str, path: Path) -> Observed:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeasuredError(f"{path} is cut off or no JSON; copy it again") from error
    if not isinstance(data, dict) or "completed" not in data:
        raise MeasuredError(
            f"{path} is no result of 'vllm bench serve': it has no 'completed'"
        )
    requests, itl_s = (None, None)
    if "ttfts" in data and "itls" in data:
        requests, itl_s = _detailed(data, path)
    return Observed(
        source=f"vllm bench serve, {path.name}",
        requests=requests,
        itl_s=itl_s,
        numbers=_numbers(data),
        notes=(
            "latencies were measured by the client: its TTFT contains the network and "
            "the server's front end, which are not simulated",
        ),
    )


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    names = [
        *_TOTALS,
        *(f"{s}_{latency}_ms" for latency in LATENCIES for s in _STATISTICS),
    ]
    found = {name: float(data[name]) for name in names if _is_number(data.get(name))}
    for latency in LATENCIES:
        if f"median_{latency}_ms" in found:
            found.setdefault(f"p50_{latency}_ms", found[f"median_{latency}_ms"])
    return found


def _detailed(
    data: Mapping[str, Any], path: Path
) -> tuple[ObservedRequests, np.ndarray[Any, np.dtype[np.float64]]]:
    names = ("input_lens", "output_lens", "ttfts", "itls")
    has_starts = data.get("start_times") is not None
    _check_lists(data, (*names, "start_times") if has_starts else names, path)
    ttft_s = column(data, "ttfts", path)
    sums_s = np.array([added(gaps) for gaps in data["itls"]])
    failed = (ttft_s == 0.0) | np.isnan(ttft_s)
    if failed.all():
        raise MeasuredError(
            f"{path}: every ttft is 0: no request was served, and there is nothing to "
            "compare"
        )
    arrival_s = None
    if has_starts:
        arrival_s = column(data, "start_times", path)
        if np.isnan(arrival_s).any():
            raise MeasuredError(
                f"{path}: start_times must be seconds, one a request; got null: remove "
                "the key, and arrivals are the workload's"
            )
        arrival_s = arrival_s - arrival_s.min()
    requests = ObservedRequests(
        num_prompt_tokens=counts(data, "input_lens", path),
        num_output_tokens=counts(data, "output_lens", path),
        ttft_s=np.where(failed, np.nan, ttft_s),
        e2el_s=np.where(failed, np.nan, ttft_s + sums_s),
        arrival_s=arrival_s,
    )
    return requests, np.fromiter(chain.from_iterable(data["itls"]), np.float64)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false of NaN, too


def _check_lists(data: Mapping[str, Any], names: tuple[str, ...], path: Path) -> None:
    """Refuse lists that are none, are empty or of different length."""
    lengths = {}
    for name in names:
        if not isinstance(data.get(name), list):
            raise MeasuredError(
                f"{path}: {name} must be a list, an entry a request; write it again "
                "with --save-detailed, or without"
            )
        lengths[name] = len(data[name])
    if len(set(lengths.values())) != 1:
        raise MeasuredError(
            f"{path}: lists differ in length: {lengths}; write it again"
        )
    if not lengths["ttfts"]:
        raise MeasuredError(f"{path}: ttfts is empty: no request was measured")
    for i, gaps in enumerate(data["itls"]):
        if not isinstance(gaps, list) or not all(
            _is_number(gap) and gap >= 0.0 for gap in gaps
        ):
            raise MeasuredError(
                f"{path}: itls of request {i + 1} must be seconds >= 0; mend it"
            )
