"""Counters and histograms of a run as vLLM's ``/metrics`` would show them at its end.

Names, labels and bounds of buckets are those of vLLM (``vllm/v1/metrics/loggers.py``);
``inter_token_latency_seconds`` and ``request_time_per_output_token_seconds`` are those
of releases from 0.11 on. Histograms are of requests that were served, so that their
means are those of ``summary.json``.
"""

from __future__ import annotations

import math
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sim.results.folder import lacks
from sim.results.metrics import is_served
from sim.results.schema import REQUEST_S, TOKEN_S, TTFT_S, one_two_five

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from prometheus_client.metrics_core import Metric

    from sim.results.folder import Columns, RunFolder

    Floats = npt.NDArray[np.float64]

_COUNTERS: Final = {
    "num_preemptions": ("num_preemptions", "Preemptions of the engine."),
    "prompt_tokens": ("total_input_tokens", "Prompt tokens of served requests."),
    "generation_tokens": ("total_output_tokens", "Generated tokens, served requests."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
}
"""Name after ``vllm:``; key of ``summary.json`` and help."""

_HISTOGRAMS: Final[dict[str, tuple[Callable[[Columns], Floats], Sequence[float]]]] = {
    "time_to_first_token_seconds": (lambda r: r["ttft_s"], TTFT_S),
    "request_time_per_output_token_seconds": (lambda r: r["tpot_s"], TOKEN_S),
    "e2e_request_latency_seconds": (lambda r: r["e2el_s"], REQUEST_S),
    "request_queue_time_seconds": (lambda r: r["queue_s"], REQUEST_S),
    "request_inference_time_seconds": (
        lambda r: r["finish_s"] - r["first_scheduled_s"],
        REQUEST_S,
    ),
    "request_prefill_time_seconds": (
        lambda r: r["first_token_s"] - r["first_scheduled_s"],
        REQUEST_S,
    ),
    "request_decode_time_seconds": (
        lambda r: r["finish_s"] - r["first_token_s"],
        REQUEST_S,
    ),
}
_REASONS: Final = {
    "stop": ("finished_stopped",),
    "length": ("finished_length_capped",),
    "abort": ("finished_aborted", "finished_rejected"),
}
_COLUMNS: Final = (
    *("status", "num_prompt_tokens", "num_generated_tokens", "queue_s", "ttft_s"),
    *("tpot_s", "e2el_s", "first_scheduled_s", "first_token_s", "finish_s"),
)


def write_prometheus(folder: RunFolder, path: Path) -> list[str]:
    """Write the text of a scrape; return what the results do not tell."""
    metrics = CollectorRegistry()
    metrics.register(_Collector(folder))
    path.write_bytes(generate_latest(metrics))
    if folder.recorded("itl.parquet") is not None:
        return []
    return [
        "vllm:inter_token_latency_seconds is left out; for it, run it with --itl exact"
    ]


class _Collector(Collector):
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._labels = {
            "model_name": str(folder.engine.get("model")),
            "engine": "0",
        }

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance: names are not looked up in the registry."""
        return ()

    def _number(self, key: str) -> float:
        """Return a number of the summary, or refuse a file that has none there."""
        number = self._folder.summary[key]
        if isinstance(number, int | float) and isfinite(number):
            return number
        raise lacks(self._folder.directory / "summary.json", "number", key)

    def collect(self) -> Iterator[Metric]:
        requests = self._folder.columns("requests", _COLUMNS)
        for name, (key, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=self._names)
            counter.add_metric(self._values, self._number(key))
            yield counter
        yield self._success(requests["status"])
        yield from self._gauges(requests["status"])
        yield self._cache_config()
        served = is_served(requests["status"])
        done = {name: column[served] for name, column in requests.items()}
        for name, (take, bounds) in _HISTOGRAMS.items():
            yield self._histogram(name, bounds, [take(done)])
        bounds = one_two_five(int(self._number("max_model_len")))
        for name in ("prompt", "generation"):
            column = "num_prompt_tokens" if name == "prompt" else "num_generated_tokens"
            yield self._histogram(f"request_{name}_tokens", bounds, [done[column]])
        if self._folder.recorded("itl.parquet") is not None:
            gaps = (gaps_s for _, gaps_s in self._folder.token_gaps())
            yield self._histogram("inter_token_latency_seconds", TOKEN_S, gaps)

    @property
    def _names(self) -> list[str]:
        return list(self._labels)

    @property
    def _values(self) -> list[str]:
        return list(self._labels.values())

    def _success(self, status: npt.NDArray[Any]) -> Metric:
        counter = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason.",
            labels=[*self._names, "finished_reason"],
        )
        for reason, statuses in _REASONS.items():
            number = int(np.isin(status.astype(str), statuses).sum())
            counter.add_metric([*self._values, reason], number)
        return counter

    def _gauges(self, status: npt.NDArray[Any]) -> Iterator[Metric]:
        """Yield the engine's state when the run was over."""
        counts = {each: int((status == each).sum()) for each in set(status)}
        running = counts.get("running", 0)
        waiting = sum(counts.get(e, 0) for e in ("waiting", "preempted", "swapped"))
        usage = self._last_usage() if running + waiting else 0.0
        for name, value, text in (
            ("num_requests_running", running, "Requests in execution batches."),
            ("num_requests_waiting", waiting, "Requests that wait."),
            ("kv_cache_usage_perc", usage, "KV-cache usage, 1 means all of it."),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge

    def _last_usage(self) -> float:
        usage = 0.0
        for batch in self._folder.step_table.batches(("kv_cache_usage",)):
            usage = float(batch["kv_cache_usage"][-1])
        return usage

    def _cache_config(self) -> Metric:
        summary, engine = self._folder.summary, self._folder.engine
        labels = {
            "block_size": summary["block_size"],
            "num_gpu_blocks": summary["num_gpu_blocks"],
            "num_cpu_blocks": summary["num_cpu_blocks"],
            "gpu_memory_utilization": summary["capacity"]["gpu_memory_utilization"],
            "cache_dtype": engine.get("kv_cache_dtype"),
            "engine": "0",
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=list(labels)
        )
        info.add_metric([str(value) for value in labels.values()], 1)
        return info

    def _histogram(
        self, name: str, bounds: Sequence[float], parts: Iterable[npt.NDArray[Any]]
    ) -> Metric:
        family = HistogramMetricFamily(
            f"vllm:{name}", f"{name.replace('_', ' ')}.", labels=self._names
        )
        counts, total = histogram(parts, bounds)
        edges = [*map(floatToGoString, bounds), "+Inf"]
        buckets = list(zip(edges, counts, strict=True))
        family.add_metric(self._values, buckets, total)
        return family


def histogram(
    parts: Iterable[npt.NDArray[Any]], bounds: Sequence[float]
) -> tuple[list[int], float]:
    """Return cumulative counts up to each bound and of all, and the sum; no NaN."""
    counts = np.zeros(len(bounds) + 1, np.int64)
    totals = []
    for part in parts:
        values = np.sort(part[~np.isnan(part)])
        counts[:-1] += np.searchsorted(values, bounds, side="right")
        counts[-1] += len(values)
        totals.append(float(values.sum()))
    return counts.tolist(), math.fsum(totals)
