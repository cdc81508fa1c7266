"""The results of a simulation in the form of a measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from sim.results.metrics import SERVED
from sim.studies.validation.observed import Observed, ObservedRequests, TimeSeries

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.results.run import Results
    from sim.studies.validation.observed import Floats

_COLUMNS: Final = (
    *("start_s", "latency_s", "num_running", "num_waiting"),
    *("num_swapped", "kv_cache_usage"),
)


def observed_of(results: Results, lines: NDArray[np.int64] | None = None) -> Observed:
    """Return what a simulation found, as a measurement of it would say."""
    table = results.recording.request_table
    order = np.argsort(table["parent_id"], kind="stable")
    if lines is None:
        lines = np.arange(len(order))
    places = np.empty(len(order), np.int64)
    places[lines] = order
    served = table.is_one_of("status", SERVED)[places]

    def of_served(name: str) -> Floats:
        return np.where(served, table[name][places], np.nan)

    summary = results.summary
    return Observed(
        source="simulation",
        requests=ObservedRequests(
            num_prompt_tokens=table["num_prompt_tokens"][places].astype(np.int64),
            num_output_tokens=table["num_output_tokens"][places].astype(np.int64),
            ttft_s=of_served("ttft_s"),
            e2el_s=of_served("e2el_s"),
            arrival_s=table["arrival_s"][places],
            num_cached_tokens=table["num_cached_tokens"][places].astype(np.int64),
            num_preemptions=table["num_preemptions"][places].astype(np.int64),
        ),
        numbers={
            key: float(value)
            for key, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        },
    )


def series_of(results: Results, time_s: Floats) -> TimeSeries:
    """Return the engine's state at some moments.

    Between two steps, that is while nothing runs, the engine is empty; requests that
    arrive during a step wait.
    """
    steps = _steps_around(results, time_s)
    busy = time_s < steps["start_s"] + steps["latency_s"]
    arrivals_s = np.sort(results.recording.request_table["arrival_s"])
    begun = np.searchsorted(arrivals_s, steps["start_s"], side="right")
    arrived = np.searchsorted(arrivals_s, time_s, side="right") - begun
    waiting = np.where(busy, steps["num_waiting"] + arrived, 0)
    return TimeSeries(
        time_s=time_s,
        num_running=np.where(busy, steps["num_running"], 0.0),
        num_waiting=waiting.astype(np.float64),
        num_swapped=np.where(busy, steps["num_swapped"], 0.0),
        kv_cache_usage=np.where(busy, steps["kv_cache_usage"], 0.0),
    )


def usage_over(results: Results, begin_s: Floats, end_s: Floats) -> Floats:
    """Return the mean KV usage over the time that each request was in the system."""
    edges, area = [np.zeros(1)], [np.zeros(1)]
    for batch in results.step_table.batches(_COLUMNS):
        ends_s = batch["start_s"] + batch["latency_s"]
        edges.append(np.stack([batch["start_s"], ends_s], axis=1).ravel())
        gained = batch["kv_cache_usage"] * batch["latency_s"]
        total = area[-1][-1] + np.cumsum(gained)
        area.append(np.stack([total - gained, total], axis=1).ravel())
    time_s, integral = np.concatenate(edges), np.concatenate(area)
    spent = np.interp(end_s, time_s, integral) - np.interp(begin_s, time_s, integral)
    length_s = np.maximum(end_s - begin_s, 1e-12)
    usage: Floats = np.clip(spent / length_s, 0.0, 1.0)
    return usage


def _steps_around(results: Results, time_s: Floats) -> dict[str, Floats]:
    """Return the columns of the last step that began by each moment."""
    found = {name: np.zeros(len(time_s)) for name in _COLUMNS}
    found["start_s"] -= 1.0
    for batch in results.step_table.batches(_COLUMNS):
        places = np.searchsorted(batch["start_s"], time_s, side="right") - 1
        known = places >= 0
        for name in _COLUMNS:
            found[name][known] = batch[name][places[known]]
    return found
