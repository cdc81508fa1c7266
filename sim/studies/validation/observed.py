"""Observations of a run, real or simulated, as far as its files say.

Every source gives some of it: per-request times, one state a second, or totals only.
What a source does not say is None and is not compared. A simulation is a source, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.errors import UserError
from sim.results.fleet.ranks import parts_of, tables_of_rank
from sim.results.metrics import SERVED
from sim.results.recording.recorder import Recording
from sim.results.tables.steps import span_columns, spans_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    from sim.results.fleet.ranks import RankTables
    from sim.results.folder import RunFolder
    from sim.results.run import Results
    from sim.results.tables.memory import ResultTable
    from sim.results.tables.steps import StepTable

    _OfEngine = Recording | RankTables | RunFolder


"""Latencies that are compared, as `vllm bench serve` names them."""


class MeasuredError(UserError):
    """A file of measurements that cannot be read or does not fit the configuration."""


@dataclass(frozen=True, slots=True)
class ObservedRequests:
    """One entry a request, in the order of the workload; NaN where it was not served.

    All are arrays of shape (requests,).
    """

    num_prompt_tokens: Ints
    num_output_tokens: Ints
    ttft_s: Floats
    """From the moment the engine took the request in."""
    e2el_s: Floats
    arrival_s: Floats | None = None
    """When the engine took it in, on the workload's clock; None if not recorded."""
    num_cached_tokens: Ints | None = None
    """Prompt tokens found in the prefix cache."""
    num_preemptions: Ints | None = None
    engine: Ints | None = None
    """Number of the engine that served it, where there are several."""

    @property
    def num_requests(self) -> int:
        return len(self.ttft_s)

    @property
    def tpot_s(self) -> Floats:
        """Seconds a token after the first; NaN with fewer than two."""
        gaps = self.num_output_tokens - 1
        safe = np.where(gaps > 0, gaps, 1)
        seconds: Floats = np.where(gaps > 0, (self.e2el_s - self.ttft_s) / safe, np.nan)
        return seconds


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """The engine's state at moments of the workload's clock; arrays of one length."""

    time_s: Floats
    num_running: Floats | None = None
    num_waiting: Floats | None = None
    num_swapped: Floats | None = None
    """Waiting with their blocks on the CPU; apart from `num_waiting`."""
    kv_cache_usage: Floats | None = None
    """Between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of one source on a run, or of several together."""

    source: str
    """Kind and name of the file, for reports."""
    requests: ObservedRequests | None = None
    itl_s: Floats | None = None
    """All gaps between tokens, in any order."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Totals and statistics under the names of ``summary.json``, where the source has
    them itself; what follows from `requests` is computed instead."""
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of `numbers` that are known no better: the least and the most each may be."""
    series: TimeSeries | None = None
    begins_at_queue: bool = False
    """Whether latencies begin and end at the engine, without its front end."""
    notes: tuple[str, ...] = ()
    """Facts of the source that the reader of a report should know, a sentence each."""
    warnings: tuple[str, ...] = ()
    """Probable mistakes in it, a sentence each."""


def column(
    rows: Mapping[str, Any], name: str, where: Path, *, least: float = 0.0
) -> Floats:
    """Return a column of numbers, none below `least`; NaN where it is empty."""
    if name not in rows:
        there = ", ".join(map(str, rows))
        raise MeasuredError(
            f"{where}: column '{name}' is missing; it has {there[:200]}"
            f"{_FOLLOWS.get(name, '')}"
        )
    values = np.empty(len(rows[name]))
    for i, value in enumerate(rows[name]):
        try:
            values[i] = float(value) if value not in (None, "") else np.nan
        except (TypeError, ValueError, OverflowError):
            values[i] = np.inf
        if not (np.isnan(values[i]) or least <= values[i] < np.inf):
            raise MeasuredError(
                f"{where}: {name} of row {i + 1} must be a number >= {least:g}; got "
                f"{str(value)[:40]!r}: {_remedy(name)}"
            )
    return values


_FOLLOWS: Final = {
    "first_token_s": "; it is arrival_s + TTFT, in seconds",
    "last_token_s": "; it is first_token_s + TPOT x (output_tokens - 1), in seconds",
}


def _remedy(name: str) -> str:
    if name in {"t", "arrival_s", "queued_s"}:
        return "give seconds on any clock"
    if name in {"first_token_s", "last_token_s"}:
        return "give seconds, or leave it empty if the request failed"
    return "mend or remove the row"


_MOST: Final = 2.0**53
"""Up to there every whole number is one that a table holds."""


def counts(rows: Mapping[str, Any], name: str, where: Path) -> Ints:
    values = column(rows, name, where)
    is_whole = (values == np.floor(values)) & (values <= _MOST)
    wrong = np.flatnonzero(~is_whole)
    if len(wrong):
        raise MeasuredError(
            f"{where}: {name} of row {wrong[0] + 1} must be a whole number up to 2^53; "
            f"got {rows[name][wrong[0]]!r}: mend or remove the row"
        )
    return values.astype(np.int64)


_COLUMNS: Final = (
    *("start_s", "latency_s", "num_running", "num_waiting"),
    *("num_swapped", "kv_cache_usage"),
)


def observed_of(results: Results, lines: NDArray[np.int64] | None = None) -> Observed:
    """Return the results of a simulation, as a measurement would have them."""
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
    part = next((name for name in ("engine", "rank") if name in table.kinds), None)
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
            engine=None if part is None else table[part][places].astype(np.int64),
        ),
        numbers={
            key: float(value)
            for key, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        },
    )


def series_of(results: Results, time_s: Floats) -> TimeSeries:
    """Return the engine's state at some moments; of several the sum, of usage the mean.

    Between two steps, that is while nothing runs, the engine is empty; requests that
    arrive during a step wait.
    """
    is_ahead = "overlapped_s" in results.summary
    states = [_states_of(part, time_s, is_ahead=is_ahead) for part in _engines(results)]
    running, waiting, swapped, usage = np.sum(states, axis=0)
    return TimeSeries(time_s, running, waiting, swapped, usage / len(states))


def _engines(results: Results) -> Sequence[_OfEngine]:
    """Return the tables of each engine: of its rows only."""
    recording = results.recording
    if isinstance(recording, Recording):
        return recording.of_rank
    _, told = parts_of(results.summary)
    parts = [tables_of_rank(recording, number) for number in range(len(told))]
    return parts or [recording]


def _states_of(part: _OfEngine, time_s: Floats, *, is_ahead: bool) -> list[Floats]:
    """Return running, waiting and swapped requests of one engine, and its usage."""
    steps = _steps_around(part.step_table, time_s)
    table = part.request_table
    busy = time_s < steps["start_s"] + steps["latency_s"]
    if is_ahead:  # steps wait for those in flight before them
        busy |= _num_inside(table, time_s) > 0
    arrivals_s = np.sort(table["arrival_s"])
    begun = np.searchsorted(arrivals_s, steps["start_s"], side="right")
    arrived = np.searchsorted(arrivals_s, time_s, side="right") - begun
    waiting = np.where(busy, steps["num_waiting"] + arrived, 0)
    return [
        np.where(busy, steps["num_running"], 0.0),
        waiting.astype(np.float64),
        np.where(busy, steps["num_swapped"], 0.0),
        np.where(busy, steps["kv_cache_usage"], 0.0),
    ]


def _num_inside(table: ResultTable, time_s: Floats) -> Ints:
    """Return how many requests have arrived and not left at some moments."""
    left_s = np.where(table.is_one_of("status", SERVED), table["finish_s"], np.nan)
    came_s = table["arrival_s"][~np.isnan(left_s)]
    num_left = np.searchsorted(np.sort(left_s[~np.isnan(left_s)]), time_s, side="right")
    num_came = np.searchsorted(np.sort(came_s), time_s, side="right")
    return num_came - num_left


def usage_over(
    results: Results, begin_s: Floats, end_s: Floats, engine: Ints | None = None
) -> Floats:
    """Return the mean KV usage of its engine while each request was in the system.

    `engine` says which, where there are several.
    """
    parts = _engines(results)
    if engine is None or len(parts) == 1:
        return _usage_over(parts[0].step_table, begin_s, end_s)
    usage = np.zeros(len(begin_s))
    for place, part in enumerate(parts):
        own = engine == place
        usage[own] = _usage_over(part.step_table, begin_s[own], end_s[own])
    return usage


def _usage_over(table: StepTable, begin_s: Floats, end_s: Floats) -> Floats:
    names = (*span_columns(table), "kv_cache_usage")
    batches = [*table.batches(names)]
    steps = {
        name: np.concatenate([np.zeros(1), *(batch[name] for batch in batches)])
        for name in names
    }
    start_s, usage = steps["start_s"], steps["kv_cache_usage"]
    ends_s = start_s + spans_s(steps)
    total = np.cumsum(usage * (ends_s - start_s))
    before = np.append(0.0, total[:-1])
    time_s = np.stack([start_s, ends_s], axis=1).ravel()
    integral = np.stack([before, total], axis=1).ravel()
    spent = np.interp(end_s, time_s, integral) - np.interp(begin_s, time_s, integral)
    length_s = np.maximum(end_s - begin_s, 1e-12)
    mean: Floats = np.clip(spent / length_s, 0.0, 1.0)
    return mean


def _steps_around(table: StepTable, time_s: Floats) -> dict[str, Floats]:
    """Return the columns of the last step that began by each moment."""
    found = {name: np.zeros(len(time_s)) for name in _COLUMNS}
    found["start_s"] -= 1.0
    for batch in table.batches(_COLUMNS):
        places = np.searchsorted(batch["start_s"], time_s, side="right") - 1
        known = places >= 0
        for name in _COLUMNS:
            found[name][known] = batch[name][places[known]]
    return found
