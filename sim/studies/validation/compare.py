"""Errors of a prediction: totals, percentiles, request by request, curves, pressure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.results.schema import LATENCIES, OF_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from sim.studies.validation.observed import (
        Floats,
        Observed,
        ObservedRequests,
        TimeSeries,
    )

    Mask = NDArray[np.bool_]

PERCENTILES: Final = (50, 90, 95, 99)
STATISTICS: Final = ("mean", *(f"p{percent}" for percent in PERCENTILES))
TOTALS: Final = (
    "duration",
    "completed",
    "request_throughput",
    "output_throughput",
    "num_preemptions",
    "prefix_cache_hits",
)
METRICS: Final = (
    *(f"{statistic}_{name}_ms" for name in LATENCIES for statistic in STATISTICS),
    *TOTALS,
)
"""Statistics that a report always has, measured or not."""
USAGE_EDGES: Final = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Edges of the bins of KV usage: fine where the cache is full."""

_LEAST: Final = 1e-9
"""Least value that errors are a share of: shorter than a nanosecond is none."""

Comparison = dict[str, float | None]
"""``predicted``, ``measured``, and the error in percent of the measured value:
``error_pct`` with its sign, ``abs_error_pct`` without. None where a side does not know
the value, or where nothing was measured to be a percentage of."""


def compared(
    predicted: float | None,
    measured: float | None,
    bounds: tuple[float, float] | None = None,
) -> Comparison:
    """Compare two numbers; within `bounds` of the measured one there is no error."""
    error: float | None = None
    if predicted is not None and measured is not None:
        low, high = bounds or (measured, measured)
        beyond = predicted - min(max(predicted, low), high)
        if abs(measured) >= _LEAST:
            error = 100.0 * beyond / measured
        elif not beyond:
            error = 0.0
    return {
        "predicted": predicted,
        "measured": measured,
        "error_pct": error,
        "abs_error_pct": None if error is None else abs(error),
    }


def metrics(
    predicted: Observed, measured: Observed, part: Mask | None = None
) -> dict[str, Comparison]:
    """Return statistics of both sides, by their names in ``summary.json``.

    All of `METRICS`, whether measured or not, and what else both sides have; of a part
    of the requests only what both sides have.
    """
    left, right = (
        numbers_of(predicted, measured, part),
        numbers_of(measured, predicted, part),
    )
    always = METRICS if part is None else ()
    return {
        name: compared(left.get(name), right.get(name), measured.bounds.get(name))
        for name in dict.fromkeys((*always, *right))
        if name in always or name in left
    }


def numbers_of(
    observed: Observed, other: Observed | None, part: Mask | None
) -> dict[str, float]:
    """Return statistics by name: those of the requests first, then what was told.

    Requests that `other` did not serve are left out, so that both sides speak of the
    same ones; totals are of all that each side served.
    """
    found: dict[str, float] = {}
    requests = observed.requests
    if requests is not None:
        others = None if other is None else other.requests
        found |= _of_requests(requests, others, part)
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


def _of_requests(
    requests: ObservedRequests, others: ObservedRequests | None, part: Mask | None
) -> dict[str, float]:
    """Return statistics of the requests whose value both sides know."""
    found: dict[str, float] = {}
    rows = _known_by_both(requests, others, "e2el")
    if part is not None:
        rows &= part
    for name in (each.key for each in OF_REQUESTS):
        known = rows & _known_by_both(requests, others, name)
        found |= statistics(name, getattr(requests, f"{name}_s")[known])
    for key, values in (
        ("prefix_cache_hits", requests.num_cached_tokens),
        ("num_preemptions", requests.num_preemptions),
    ):
        if values is not None:
            found[key] = float(values[rows].sum())
    return found


def _known_by_both(
    requests: ObservedRequests, others: ObservedRequests | None, name: str
) -> Mask:
    known: Mask = ~np.isnan(getattr(requests, f"{name}_s"))
    if others is not None:
        known &= ~np.isnan(getattr(others, f"{name}_s"))
    return known


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
    """Return the totals of per-request times of a whole run."""
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
    for name in (each.key for each in OF_REQUESTS):
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
    known = right >= _LEAST
    errors: Floats = np.where(known, left / np.where(known, right, 1.0) - 1.0, np.nan)
    return errors


def curves(predicted: TimeSeries, measured: TimeSeries) -> dict[str, Comparison]:
    """Return the distance of the curves of states, at the moments of `measured`.

    ``mean_abs``, ``max_abs`` and ``mean_signed`` in requests, usage in percentage
    points; and the means as `compared` gives them.
    """
    found: dict[str, Comparison] = {}
    for name, scale in (
        ("num_running", 1.0),
        ("num_waiting", 1.0),
        ("num_swapped", 1.0),
        ("kv_cache_usage", 100.0),
    ):
        left, right = getattr(predicted, name), getattr(measured, name)
        if left is None or right is None:
            continue
        known = ~np.isnan(left - right)
        if known.any():
            ours, theirs = scale * left[known], scale * right[known]
            apart = ours - theirs
            found[name] = compared(float(ours.mean()), float(theirs.mean())) | {
                "mean_abs": float(np.abs(apart).mean()),
                "max_abs": float(np.abs(apart).max()),
                "mean_signed": float(apart.mean()),
            }
    return found


def by_pressure(
    predicted: ObservedRequests,
    measured: ObservedRequests,
    usage: Mapping[str, Floats],
) -> list[dict[str, Any]]:
    """Return the errors in bins of the KV usage at the time."""
    last = len(USAGE_EDGES) - 2
    found = []
    for place in range(last + 1):
        errors: dict[str, Any] = {}
        for name, values in usage.items():
            bins = np.searchsorted(USAGE_EDGES, values, side="right") - 1
            rows = (np.clip(bins, 0, last) == place) & ~np.isnan(values)
            of_all: Mapping[str, Any] = per_request(predicted, measured, rows)
            if name in of_all:
                errors[name] = of_all[name]
        if errors:
            found.append(
                {
                    "usage_from": USAGE_EDGES[place],
                    "usage_to": USAGE_EDGES[place + 1],
                    "n": int(max(each["n"] for each in errors.values())),
                    **errors,
                }
            )
    return found
