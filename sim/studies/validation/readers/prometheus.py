"""The text of vLLM's ``/metrics`` after a run: counters and histograms.

Names changed over the releases; each quantity has a list of them. A histogram gives
its mean exactly (sum over count); a percentile lies somewhere in a bucket, is taken on
the straight line through it, and a prediction in that bucket has no error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from sim.studies.validation.observed import MeasuredError, Observed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from prometheus_client.metrics_core import Metric

_HISTOGRAMS: Final = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "tpot": ("vllm:request_time_per_output_token_seconds",),
    "e2el": ("vllm:e2e_request_latency_seconds",),
}
"""Before `inter_token_latency_seconds`, ``time_per_output_token_seconds`` was what held
a sample for each token."""

_COUNTERS: Final = {
    "num_preemptions": ("vllm:num_preemptions",),
    "prefix_cache_queries": (
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries",
    ),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "total_input_tokens": ("vllm:prompt_tokens",),
    "total_output_tokens": ("vllm:generation_tokens",),
    "completed": ("vllm:request_success",),
}
_NOT_SERVED: Final = ("abort", "error")
_PERCENTILES: Final = (50, 90, 95, 99)

Buckets = list[tuple[float, float]]
"""Upper edge in seconds and cumulative count, ascending."""


def looks_like_prometheus(text: str) -> bool:
    return any(line.startswith("vllm:") for line in text.splitlines())


def read_prometheus(text: str, path: Path) -> Observed:
    """Read a scrape; the engine must have served nothing before the run."""
    from prometheus_client.parser import (  # noqa: PLC0415  (this reader only)
        text_string_to_metric_families,
    )

    try:
        families = {each.name: each for each in text_string_to_metric_families(text)}
    except ValueError as error:
        raise MeasuredError(
            f"{path} is no Prometheus text: {str(error)[:120]}; scrape it again"
        ) from error
    _check_finite(families, path)
    _check_one_engine(families, path)
    numbers = _totals(families)
    bounds: dict[str, tuple[float, float]] = {}
    for latency, names in _HISTOGRAMS.items():
        metric = _first(families, names)
        if metric is not None:
            found, of_percentiles = _distribution(latency, metric)
            numbers |= found
            bounds |= of_percentiles
    if not numbers:
        raise MeasuredError(
            f"{path} has none of vLLM's counters; is it the right port?"
        )
    notes = [
        "counters are of the engine's whole life: it must have served this run only"
    ]
    if bounds:
        widest = max(
            (high - low) / numbers[name] for name, (low, high) in bounds.items()
        )
        notes.append(
            f"percentiles lie in buckets up to {widest:.0%} of their value wide; "
            f"errors are what lies beyond"
        )
    return Observed(
        source=f"metrics of vLLM, {path.name}",
        numbers=numbers,
        bounds=bounds,
        notes=tuple(notes),
    )


def _check_finite(families: Mapping[str, Metric], path: Path) -> None:
    names = {name for group in (_HISTOGRAMS, _COUNTERS) for name in _all(group)}
    for name in sorted(names & families.keys()):
        for sample in families[name].samples:
            if not (math.isfinite(sample.value) and sample.value >= 0.0):
                raise MeasuredError(
                    f"{path}: {sample.name} must be a number >= 0; got "
                    f"{sample.value:g}: scrape it again"
                )


def _all(group: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [name for names in group.values() for name in names]


def _check_one_engine(families: Mapping[str, Metric], path: Path) -> None:
    engines = {
        (sample.labels.get("model_name", ""), sample.labels.get("engine", ""))
        for name, metric in families.items()
        if name.startswith("vllm:")
        for sample in metric.samples
    }
    for place, what in enumerate(("models", "engines")):
        found = sorted({names[place] for names in engines} - {""})
        if len(found) > 1:
            raise MeasuredError(
                f"{path} has counters of {len(found)} {what} ({', '.join(found[:4])}); "
                "a simulation is of one: keep the lines of one, and give the requests "
                "that it served"
            )


def _first(families: Mapping[str, Metric], names: Sequence[str]) -> Metric | None:
    return next((families[name] for name in names if name in families), None)


def _totals(families: Mapping[str, Metric]) -> dict[str, float]:
    found = {}
    for key, names in _COUNTERS.items():
        metric = _first(families, names)
        if metric is not None:
            found[key] = math.fsum(
                sample.value
                for sample in metric.samples
                if not sample.name.endswith("_created")
                and sample.labels.get("finished_reason") not in _NOT_SERVED
            )
    return found


def _distribution(
    latency: str, metric: Metric
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return mean and percentiles in ms, and the bucket of each of the latter."""
    total_s = count = 0.0
    edges: dict[float, float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_sum"):
            total_s += sample.value
        elif sample.name.endswith("_count"):
            count += sample.value
        elif sample.name.endswith("_bucket"):
            edge = float(sample.labels["le"])
            edges[edge] = edges.get(edge, 0.0) + sample.value
    if not count:
        return {}, {}
    found = {f"mean_{latency}_ms": total_s / count * 1e3}
    bounds = {}
    for percent in _PERCENTILES:
        name, rank = f"p{percent}_{latency}_ms", percent / 100.0 * count
        value_s, low_s, high_s = _in_bucket(sorted(edges.items()), rank)
        if value_s > 0.0:
            found[name] = value_s * 1e3
            bounds[name] = low_s * 1e3, high_s * 1e3
    return found, bounds


def _in_bucket(buckets: Buckets, rank: float) -> tuple[float, float, float]:
    """Return the value of a rank in seconds, and the edges of its bucket."""
    low_s = below = 0.0
    for edge_s, cumulative in buckets:
        if cumulative >= rank and math.isfinite(edge_s):
            share = (rank - below) / (cumulative - below) if cumulative > below else 1.0
            return low_s + (edge_s - low_s) * share, low_s, edge_s
        if math.isfinite(edge_s):
            low_s, below = edge_s, cumulative
    return 0.0, 0.0, 0.0
