"""A sweep's page: what became of its runs, its metrics against what was varied."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sim.errors import ResultsError
from sim.results.folder import read_json
from sim.results.summary.compared import short_value
from sim.studies.sweeps.knee import LATENCY, THROUGHPUT, knees
from sim.views.report import charts
from sim.views.report.html import (
    Markup,
    breakable,
    bullets,
    count,
    data,
    decimal,
    element,
    join,
    listed,
    paragraph,
    plural,
    shortened,
    table,
)
from sim.views.report.looks import run_colour
from sim.views.report.page import Section
from sim.views.report.sections.latency import value_axis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MAX_ROWS: Final = 500
"""Runs that the table holds."""

MAX_LINES: Final = 8
_MAX_ERROR_CHARACTERS: Final = 300
METRICS: Final = {
    "p50_ttft_ms": "p50 TTFT (ms)",
    "p95_ttft_ms": "p95 TTFT (ms)",
    "p99_ttft_ms": "p99 TTFT (ms)",
    "p95_tpot_ms": "p95 TPOT (ms)",
    "p99_tpot_ms": "p99 TPOT (ms)",
    "output_throughput": "output tokens/s",
    "num_preemptions": "preemptions",
    "kv_cache_usage_mean": "KV usage, mean",
    "gpu_hours": "GPU hours",
}
"""Numbers of each run that the page shows."""

_BEST: Final = (
    ("p95_ttft_ms", False),
    ("p99_ttft_ms", False),
    ("output_throughput", True),
)
"""Numbers of which the page names the best setting, and whether a high one is good."""

_OF_KNEES: Final = (THROUGHPUT, LATENCY)
_VERDICT: Final = "verdict"
"""Column of whether the objectives hold, where there are any."""
_MOST_NAMED: Final = 20
"""Runs that a sentence names."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep."""

    title: str  # how many runs, over what
    path: Path  # as given
    facts: Mapping[str, Any]  # contents of ``sweep.json``
    keys: tuple[str, ...]  # what was varied
    rows: tuple[Row, ...]  # a table a run, in their order

    @property
    def done(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "done"]

    def varied(self) -> tuple[str, ...]:
        return tuple(
            key for key in self.keys if len({str(row[key]) for row in self.rows}) > 1
        )


def load_sweep(path: Path) -> Sweep:
    facts = read_json(path / "sweep.json")
    files = sorted((path / "runs").glob("*.parquet"))
    if not files:
        raise ResultsError(
            f"no run of the sweep in '{path}' has finished; go on with 'kvsim sweep' "
            f"and --resume"
        )
    rows: list[Row] = []
    try:
        names = pq.read_schema(files[0]).names
        keys = tuple(names[names.index("repeat") + 1 : names.index("status")])
        keys = tuple(key for key in keys if key != "seed")
        wanted = ["run", "repeat", *keys, "seed", "status", "error"]
        wanted += [*METRICS, *_OF_KNEES, _VERDICT]
        for file in map(pq.ParquetFile, files):
            names = file.schema_arrow.names
            rows += file.read([name for name in wanted if name in names]).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ResultsError(
            f"'{path / 'runs'}' cannot be read: {error}; sweep again"
        ) from error
    rows.sort(key=lambda row: row["run"])
    for row in rows:
        row.update({key: _in_few_words(row[key]) for key in keys})
        row[_VERDICT] = json.loads(row.get(_VERDICT) or "null")
    over = f" over {listed([*keys])}" if keys else ""
    return Sweep(f"{plural(len(rows), 'run')}{over}", path, facts, keys, tuple(rows))


def _in_few_words(value: Any) -> Any:
    """Return what is JSON in the dataset, as tables and lists are, in few words."""
    if isinstance(value, str) and value.startswith(("{", "[", '"')):
        return short_value(json.loads(value))
    return value


def _outcome(sweep: Sweep) -> Iterator[Markup | charts.Chart]:
    statuses: dict[str, int] = {}
    for row in sweep.rows:
        statuses[row["status"]] = statuses.get(row["status"], 0) + 1
    told = [
        element("data", count(number), " ", status, value=number, data_key=status)
        for status, number in statuses.items()
    ]
    yield paragraph("Runs: ", join(told, ", "), ".", class_="lead")
    expected = sweep.facts.get("num_runs")
    if isinstance(expected, int) and expected > len(sweep.rows):
        missing = count(expected - len(sweep.rows))
        yield paragraph(
            f"{missing} of {count(expected)} runs are missing: 'kvsim sweep' with "
            f"--resume goes on.",
            class_="warn",
        )
    found = [*_objectives(sweep), *knees(sweep.done, sweep.varied()), *_best(sweep)]
    if found:
        yield bullets(found)
    if failed := [row for row in sweep.rows if row["status"] != "done"]:
        yield _failures(sweep, failed)


def _objectives(sweep: Sweep) -> Iterator[str]:
    """Yield which runs keep the objectives, if any are judged by some."""
    judged = [row for row in sweep.done if row[_VERDICT]]
    kept = [str(row["run"]) for row in judged if row[_VERDICT]["holds"]]
    if judged:
        number = f"{count(len(kept))} of {plural(len(judged), 'run')}"
        told = f"The objectives hold in {number}"
        which = listed(kept) if len(kept) <= _MOST_NAMED else ""
        yield f"{told}: {which}." if which else f"{told}."


def _best(sweep: Sweep) -> Iterator[Markup]:
    """Yield which settings did best, of the mean over repeats."""
    for metric, is_high_good in _BEST:
        groups = _groups(sweep.done, sweep.varied(), metric)
        if len(groups) < 2:
            continue
        means = {key: float(np.mean(values)) for key, values in groups.items()}
        pick = max if is_high_good else min
        best = pick(means, key=lambda key: means[key])
        which = "Highest" if is_high_good else "Lowest"
        setting = listed(
            [
                f"{key} = {'null' if value is None else value}"
                for key, value in zip(sweep.varied(), best, strict=True)
            ]
        )
        yield join(
            [f"{which} {METRICS[metric]}: {decimal(means[best])}, with {setting}."]
        )


def _groups(
    rows: Sequence[Row], keys: Sequence[str], metric: str
) -> dict[tuple[Any, ...], list[float]]:
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        value = row.get(metric)
        if value is not None:
            groups.setdefault(tuple(row[key] for key in keys), []).append(float(value))
    return groups


def _failures(sweep: Sweep, failed: Sequence[Row]) -> Markup:
    rows = [
        (
            row["run"],
            _setting(sweep, row),
            row["status"],
            shortened(_last_line(row["error"]), _MAX_ERROR_CHARACTERS),
        )
        for row in failed[:MAX_ROWS]
    ]
    caption = f"Runs that did not end as they should ({count(len(failed))})"
    return table(caption, ["run", "setting", "status", "why"], rows, class_="texts")


def _last_line(error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return lines[-1] if lines else ""


def _setting(sweep: Sweep, row: Row) -> str:
    return ", ".join(f"{key} = {row[key]}" for key in sweep.varied())


def _curves(sweep: Sweep) -> Iterator[Markup | charts.Chart]:
    """Yield each metric against the key with most values, a line for the others."""
    x_key = _x_key(sweep)
    if x_key is None or not sweep.done:
        yield paragraph("No number was varied that runs could be drawn against.")
        return
    others = [key for key in sweep.varied() if key != x_key]
    lines = list(dict.fromkeys(tuple(r[k] for k in others) for r in sweep.done))
    if len(lines) > MAX_LINES:
        yield paragraph(
            f"{count(len(lines))} combinations of {listed(others)}: the first "
            f"{MAX_LINES} have a line, the others are points.",
            class_="note",
        )
    for metric, label in METRICS.items():
        series, values = _lines(sweep, x_key, others, lines, metric)
        if not values:
            continue
        axis = value_axis(label, values)
        yield charts.Chart(
            metric.replace("_", "-"),
            f"{label} against {x_key}: mean over repeats.",
            (charts.Panel(axis, tuple(series)),),
            x=charts.Axis(x_key),
            height_px=340,
        )


def _x_key(sweep: Sweep) -> str | None:
    """Return the varied key with most values, all of them numbers."""
    found = None
    most = 1
    for key in sweep.varied():
        values = {row[key] for row in sweep.rows}
        is_number = all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in values
        )
        if is_number and len(values) > most:
            found, most = key, len(values)
    return found


def _lines(
    sweep: Sweep,
    x_key: str,
    others: Sequence[str],
    lines: Sequence[tuple[Any, ...]],
    metric: str,
) -> tuple[list[charts.Series], list[float]]:
    series: list[charts.Series] = []
    every: list[float] = []
    for place, line in enumerate(lines):
        rows = [r for r in sweep.done if tuple(r[k] for k in others) == line]
        groups = dict(sorted(_groups(rows, [x_key], metric).items()))
        if not groups:
            continue
        x = np.array([float(key[0]) for key in groups])
        y = np.array([float(np.mean(values)) for values in groups.values()])
        every += y.tolist()
        label = ", ".join(f"{k} = {v}" for k, v in zip(others, line, strict=True))
        texts = tuple(
            f"{label}\n{x_key} = {key[0]:g}\nmean {np.mean(v):,.5g} of "
            f"{plural(len(v), 'run')} ({min(v):,.5g} to {max(v):,.5g})"
            for key, v in groups.items()
        )
        look = run_colour(place + 1)
        if place < MAX_LINES:
            dash, symbol = charts.DASHES[place % 4], charts.SYMBOLS[place % 4]
            name = label or METRICS[metric]
            series.append(
                charts.Line(name, look, x, y, dash, symbol=symbol, texts=texts)
            )
        else:
            series.append(charts.Points("other", "waiting", x, y, texts=texts))
    return series, every


def _table(sweep: Sweep) -> Iterator[Markup | charts.Chart]:
    """Yield a row a run; columns that are the same in all runs are said, not drawn."""
    metrics = [name for name in METRICS if any(name in row for row in sweep.rows)]
    keys = ["repeat", *sweep.keys, "seed"]
    varied = [key for key in keys if len({str(row[key]) for row in sweep.rows}) > 1]
    if same := [f"{k} {_told(sweep.rows[0][k])}" for k in keys if k not in varied]:
        yield paragraph(f"The same in all runs: {listed(same)}.", class_="note")
    if len(sweep.rows) > MAX_ROWS:
        yield paragraph(
            f"The first {count(MAX_ROWS)} of {plural(len(sweep.rows), 'run')}; the "
            f"dataset has all of them.",
            class_="note",
        )
    is_judged = any(row[_VERDICT] for row in sweep.rows)
    rows = [
        [
            *(_told(row[key]) for key in ("run", *varied, "status")),
            *(_number(row, metric) for metric in metrics),
            *([_judged(row)] if is_judged else []),
        ]
        for row in sweep.rows[:MAX_ROWS]
    ]
    head = ["run", *map(breakable, varied), "status"]
    texts = {
        place
        for place, key in enumerate(varied, 1)
        if any(isinstance(row[key], str) for row in sweep.rows)
    }
    head += [METRICS[each] for each in metrics]
    if is_judged:
        texts.add(len(head))
        head.append("objectives")
    yield table("Runs", head, rows, left=texts, class_="many")


def _judged(row: Row) -> str:
    """Tell whether a run keeps its objectives, or those that it misses."""
    verdict = row[_VERDICT]
    if verdict is None:
        return "-"
    missed = [each["name"] for each in verdict["objectives"] if not each["holds"]]
    if missed:
        return f"missed: {', '.join(missed)}"
    return "kept" if verdict["holds"] else "missed: not all were served"


def _told(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(row: Row, metric: str) -> object:
    value = row.get(metric)
    if value is None:
        return "-"
    return data(decimal(value), value, metric, row["run"])


def _provenance(sweep: Sweep) -> Iterator[Markup | charts.Chart]:
    yield paragraph(
        "Every run is a row of the dataset in ",
        element("code", str(sweep.path / "runs")),
        "; its column config runs again as it is. Latencies have no intervals here: "
        "each point is simulated once a repeat.",
        class_="box",
    )
    versions = sweep.facts.get("versions", {})
    yield table("Versions", ["package", "version"], [*versions.items()], class_="texts")


SWEEP_SECTIONS: Final = (
    Section("summary", "What matters first", _outcome),
    Section("curves", "Against what was varied", _curves),
    Section("runs", "Runs", _table),
    Section("provenance", "What this rests on", _provenance),
)
"""In the order of the page."""
