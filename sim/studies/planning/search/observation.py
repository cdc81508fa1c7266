"""From the tables of a run to its warm-up and to the numbers that objectives bound."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.metrics import SERVED
from sim.results.recording.tokens import InterTokenLatencies, Streaks
from sim.results.schema import LATENCIES
from sim.results.tables.percentiles import percentiles
from sim.results.tables.steps import span_columns, spans_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sim.results.recording.recorder import Recording
    from sim.results.summary.objectives import Objective
    from sim.results.tables.memory import ResultTable

    Floats = NDArray[np.float64]
    Weighted = tuple[NDArray[np.float64], NDArray[np.int64]]

_REQUEST_COLUMNS = ("ttft_s", "tpot_s", "e2el_s", "queue_s", "num_preemptions")
_NUM_BINS = 100
MAX_SHARE = 0.25
"""Most of a run that is given up: a change later than that is traffic, not start."""
_USAGE_SCALE = 1_000_000_000
"""Time is a weight in whole nanoseconds, as percentiles want it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one engine on requests that count: those after the warm-up."""

    columns: dict[str, Floats]
    """Of the requests that were served: latencies in seconds and preemptions."""
    num_requests: int
    """Requests that count, served or not."""
    num_rejected: int
    num_late: int
    """Requests that had not begun when the last request of all arrived."""
    usage: Weighted
    """KV cache usage of steps while requests arrived, and nanoseconds of each."""
    itl: Weighted
    """Inter-token latencies in seconds and how often each; empty unless asked for."""


def sample_of(recording: Recording, warmup_s: float, *, with_itl: bool) -> Sample:
    """Return the part of a run, cut short or not, that begins after the warm-up.

    Inter-token latencies cost time: they are counted only where an objective asks.
    """
    requests = recording.request_table
    arrival_s = requests["arrival_s"]
    last_s = last_arrival_s(recording)
    counts = arrival_s >= warmup_s
    is_served = requests.is_one_of("status", SERVED) & counts
    first_s = requests["first_scheduled_s"]
    is_late = counts & ~(first_s <= last_s)  # NaN: never
    rejected = requests.is_one_of("status", ("finished_rejected",)) & counts
    itl = (np.zeros(0), np.zeros(0, np.int64))
    if with_itl:
        itl = _itl(recording, requests["request_id"][is_served])
    return Sample(
        columns={
            name: requests[name][is_served].astype(np.float64)
            for name in _REQUEST_COLUMNS
        },
        num_requests=int(counts.sum()),
        num_rejected=int(rejected.sum()),
        num_late=int(is_late.sum()) - int(rejected.sum()),
        usage=_usage(recording, warmup_s),
        itl=itl,
    )


def _itl(recording: Recording, request_ids: NDArray[np.int64]) -> Weighted:
    batches: list[tuple[Floats, NDArray[np.int64]]] = []
    for part in recording.of_rank:  # streaks count the steps of their own engine
        streaks = part.streaks
        chosen = np.isin(streaks.owner, request_ids)
        some = Streaks()
        some.add(streaks.owner[chosen], streaks.begin[chosen], streaks.end[chosen])
        batches += InterTokenLatencies(part.step_table, some).batches()
    values = [np.zeros(0), *(values for values, _ in batches)]
    weights = [np.zeros(0, np.int64), *(weights for _, weights in batches)]
    return np.concatenate(values), np.concatenate(weights)


def last_arrival_s(recording: Recording) -> float:
    return float(recording.request_table["arrival_s"].max(initial=0.0))


def steps_inside(
    recording: Recording, warmup_s: float, columns: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Return columns of the steps between the warm-up and the last arrival.

    Beside them stands ``held_s``, the `spans_s` of the steps.
    """
    last_s = last_arrival_s(recording)
    names = dict.fromkeys((*columns, *span_columns(recording.step_table)))
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for batch in recording.step_table.batches(list(names)):
        inside = (batch["start_s"] >= warmup_s) & (batch["start_s"] <= last_s)
        for name, found in parts.items():
            found.append(batch[name][inside])
    steps = {name: np.concatenate([np.zeros(0), *p]) for name, p in parts.items()}
    return steps | {"held_s": spans_s(steps)}


def _usage(recording: Recording, warmup_s: float) -> Weighted:
    steps = steps_inside(recording, warmup_s, ("kv_cache_usage",))
    time_ns = steps["held_s"] * _USAGE_SCALE
    return steps["kv_cache_usage"], time_ns.astype(np.int64)


def values_of(
    samples: Sequence[Sample], objectives: Sequence[Objective]
) -> dict[str, float | None]:
    """Return the number of each objective, by name; None where none was measured.

    The requests of all samples, of replicas that share the traffic, count alike.
    """
    return {each.name: _value(samples, each) for each in objectives}


def _value(samples: Sequence[Sample], objective: Objective) -> float | None:
    if objective.of == "goodput":
        return _goodput(samples, objective)
    if objective.of == "preemptions":
        served = _joined(samples, "num_preemptions")
        return float(served.sum() / len(served)) if len(served) else None
    scale = 1e3 if objective.of in LATENCIES else 1.0
    values, weights = _weighted(samples, objective.of)
    known = ~np.isnan(values)
    values, weights = values[known], weights[known]
    total = int(weights.sum())
    if not total:
        return None
    if objective.percent is None:
        return float((values * weights).sum() / total) * scale
    if objective.percent == inf:
        return float(values.max()) * scale
    found = percentiles(lambda: [(values, weights)], [objective.percent])
    return found[0] * scale


def _weighted(samples: Sequence[Sample], of: str) -> Weighted:
    if of in {"itl", "kv_cache_usage"}:
        pairs = [each.itl if of == "itl" else each.usage for each in samples]
        values = np.concatenate([values for values, _ in pairs])
        return values, np.concatenate([weights for _, weights in pairs])
    values = _joined(samples, f"{of}_s")
    return values, np.ones(len(values), np.int64)


def _joined(samples: Sequence[Sample], name: str) -> Floats:
    return np.concatenate([each.columns[name] for each in samples])


def _goodput(samples: Sequence[Sample], objective: Objective) -> float | None:
    """Return the share of requests that were served within all limits."""
    total = sum(each.num_requests for each in samples)
    if not total:
        return None
    good: Any = True
    for of, limit_ms in objective.limits_ms:
        # A request of one token has no TPOT to miss.
        good = good & ~(_joined(samples, f"{of}_s") * 1e3 > limit_ms)
    return float(np.sum(good) / total)


def numbers_in_system(requests: ResultTable) -> Floats:
    """Return the requests in the system at even times up to the last arrival."""
    arrival_s = np.sort(requests["arrival_s"])
    finish_s = requests["finish_s"]
    finish_s = np.sort(finish_s[~np.isnan(finish_s)])
    times_s = arrival_s[-1] * np.arange(1, _NUM_BINS + 1) / _NUM_BINS
    arrived = np.searchsorted(arrival_s, times_s, side="right")
    gone = np.searchsorted(finish_s, times_s, side="right")
    numbers: Floats = (arrived - gone).astype(np.float64)
    return numbers


def mean_life_s(requests: ResultTable) -> float:
    """Return the mean latency of requests that were served; 0 if none was."""
    is_served = requests.is_one_of("status", SERVED)
    lives_s = requests["e2el_s"][is_served]
    return float(lives_s.mean()) if len(lives_s) else 0.0


def warmup_share(runs: Sequence[Floats]) -> float:
    """Return the share of a run to leave out, by MSER on the mean of several runs.

    The truncation that leaves the smallest standard error of the mean of the rest
    (White, 1997): too short a warm-up leaves a slope, too long a one leaves little.
    `runs` have `numbers_in_system` of the same traffic with other seeds, which average
    out the bursts.
    """
    mean = np.mean(np.stack(list(runs)), axis=0)
    candidates = range(int(len(mean) * MAX_SHARE) + 1)
    errors = [_squared_error(mean[first:]) for first in candidates]
    return int(np.argmin(errors)) / len(mean)


def _squared_error(values: Floats) -> float:
    return float(((values - values.mean()) ** 2).sum() / len(values) ** 2)
