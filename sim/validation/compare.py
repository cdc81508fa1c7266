"""Errors of a prediction: totals, percentiles, request by request, curves, pressure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from sim.validation.observed import Floats, Observed, ObservedRequests, TimeSeries

    Mask = NDArray[np.bool_]

PERCENTILES: Final = (50, 90, 99)
TOTALS: Final = (
    "duration",
    "completed",
    "request_throughput",
    "output_throughput",
    "num_preemptions",
    "prefix_cache_hits",
)
USAGE_EDGES: Final = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Edges of the bins of KV usage: fine where the cache is full."""

Comparison = dict[str, float]
"""``predicted``, ``measured`` and ``error_pct``: signed, in percent of what was
measured; without the last where nothing was measured to be a percentage of."""


def compared(predicted: float, measured: float) -> Comparison:
    """Return both values and the signed error in percent."""
    found = {"predicted": predicted, "measured": measured}
    if measured:
        found["error_pct"] = 100.0 * (predicted - measured) / measured
    elif predicted == measured:
        found["error_pct"] = 0.0
    return found


def metrics(
    predicted: Observed, measured: Observed, part: Mask | None = None
) -> dict[str, Comparison]:
    """Return every statistic that both sides have, by its name in ``summary.json``.

    Parameters
    ----------
    predicted, measured
        Their requests in the same order.
    part
        (requests,) the requests to judge; None for all, with the totals of the run.
    """
    left, right = (
        numbers_of(predicted, measured, part),
        numbers_of(measured, None, part),
    )
    return {
        name: compared(left[name], value)
        for name, value in right.items()
        if name in left
    }


def numbers_of(
    observed: Observed, other: Observed | None, part: Mask | None
) -> dict[str, float]:
    """Return statistics by name: those of the requests first, then what was told.

    Requests that `other` did not serve are left out, so that both sides speak of the
    same ones.
    """
    found: dict[str, float] = {}
    requests = observed.requests
    if requests is not None:
        found |= _of_requests(requests, _served_by(requests, other, part))
    if part is None:
        if observed.itl_s is not None and len(observed.itl_s):
            found |= statistics("itl", observed.itl_s)
        if requests is not None and requests.arrival_s is not None:
            # the same rule on both sides: from the first arrival to the last token
            found |= _totals(requests)
        for name, value in observed.numbers.items():
            if name in TOTALS or name.endswith("_ms"):
                found.setdefault(name, value)
    return found


def _served_by(
    requests: ObservedRequests, other: Observed | None, part: Mask | None
) -> Mask:
    served: Mask = ~np.isnan(requests.e2el_s)
    if other is not None and other.requests is not None:
        served &= ~np.isnan(other.requests.e2el_s)
    return served if part is None else served & part


def _of_requests(requests: ObservedRequests, rows: Mask) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("ttft", "tpot", "e2el"):
        values = getattr(requests, f"{name}_s")[rows]
        found |= statistics(name, values[~np.isnan(values)])
    for key, values in (
        ("prefix_cache_hits", requests.num_cached_tokens),
        ("num_preemptions", requests.num_preemptions),
    ):
        if values is not None:
            found[key] = float(values[rows].sum())
    return found


def statistics(name: str, values_s: Floats) -> dict[str, float]:
    """Return mean and percentiles in milliseconds, interpolated between ranks."""
    if not len(values_s):
        return {}
    ranked = np.percentile(values_s, PERCENTILES)
    found = {f"mean_{name}_ms": float(values_s.mean()) * 1e3}
    for percent, value in zip(PERCENTILES, ranked.tolist(), strict=True):
        found[f"p{percent}_{name}_ms"] = value * 1e3
    return found


def _totals(requests: ObservedRequests) -> dict[str, float]:
    """Return what follows from per-request times of a whole run."""
    assert requests.arrival_s is not None
    served = ~np.isnan(requests.e2el_s)
    if not served.any():
        return {}
    ends_s = (requests.arrival_s + requests.e2el_s)[served]
    duration_s = float(ends_s.max() - requests.arrival_s.min())
    return {
        "duration": duration_s,
        "completed": float(served.sum()),
        "request_throughput": float(served.sum()) / duration_s,
        "output_throughput": float(requests.num_output_tokens[served].sum())
        / duration_s,
    }


def per_request(
    predicted: ObservedRequests, measured: ObservedRequests, part: Mask | None = None
) -> dict[str, dict[str, float]]:
    """Return how far single requests are off, by latency.

    ``n``, ``mean_abs_pct``, ``p50_abs_pct``, ``p90_abs_pct``, and ``bias_pct``, the
    median of the signed errors.
    """
    found = {}
    for name in ("ttft", "tpot", "e2el"):
        errors = 100.0 * relative_errors(predicted, measured, name)
        if part is not None:
            errors = errors[part]
        errors = errors[~np.isnan(errors)]
        if len(errors):
            size = np.abs(errors)
            found[name] = {
                "n": float(len(errors)),
                "mean_abs_pct": float(size.mean()),
                "p50_abs_pct": float(np.median(size)),
                "p90_abs_pct": float(np.percentile(size, 90)),
                "bias_pct": float(np.median(errors)),
            }
    return found


def relative_errors(
    predicted: ObservedRequests, measured: ObservedRequests, name: str
) -> Floats:
    """Return (predicted - measured) / measured of every request; NaN where unknown."""
    left, right = getattr(predicted, f"{name}_s"), getattr(measured, f"{name}_s")
    known = right > 0.0
    errors: Floats = np.where(known, left / np.where(known, right, 1.0) - 1.0, np.nan)
    return errors


def curves(predicted: TimeSeries, measured: TimeSeries) -> dict[str, dict[str, float]]:
    """Return the distance of the curves of states, at the moments of `measured`.

    ``mean_abs``, ``max_abs`` and ``mean_signed`` in requests, usage in percentage
    points; and the mean of what was measured.
    """
    found = {}
    for name, scale in (
        ("num_running", 1.0),
        ("num_waiting", 1.0),
        ("kv_cache_usage", 100.0),
    ):
        left, right = getattr(predicted, name), getattr(measured, name)
        if left is None or right is None:
            continue
        apart = scale * (left - right)
        apart = apart[~np.isnan(apart)]
        if len(apart):
            found[name] = {
                "mean_abs": float(np.abs(apart).mean()),
                "max_abs": float(np.abs(apart).max()),
                "mean_signed": float(apart.mean()),
                "measured_mean": float(np.nanmean(scale * right)),
            }
    return found


def by_pressure(
    predicted: ObservedRequests, measured: ObservedRequests, usage: Floats
) -> list[dict[str, Any]]:
    """Return the errors in bins of the KV usage that each request lived through.

    Parameters
    ----------
    predicted, measured
        In the same order.
    usage
        (requests,) mean share of the KV blocks in use meanwhile.

    Returns
    -------
    list
        One entry a bin that has requests: ``usage_from``, ``usage_to``, ``n``, and what
        `per_request` says of them.
    """
    last = len(USAGE_EDGES) - 2
    bins = np.clip(np.searchsorted(USAGE_EDGES, usage, side="right") - 1, 0, last)
    found = []
    for place in range(last + 1):
        rows = (bins == place) & ~np.isnan(usage) & ~np.isnan(measured.e2el_s)
        if rows.any():
            errors: Mapping[str, Any] = per_request(predicted, measured, rows)
            found.append(
                {
                    "usage_from": USAGE_EDGES[place],
                    "usage_to": USAGE_EDGES[place + 1],
                    "n": int(rows.sum()),
                    **errors,
                }
            )
    return found
