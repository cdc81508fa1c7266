"""Output of a replay: JSON, a table of steps, a figure, and lines on the terminal."""

from __future__ import annotations

import csv
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibrate.replay.compare import GATES, MAKESPAN_GATE, Row
from sim.results.output import ResultFiles, write_json
from sim.views.plots.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILLION,
    house_style,
    legend_above,
    set_log_axis,
    set_time_axis,
    time_unit,
    titled_figure,
    to_png,
)

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from calibrate.replay.compare import Comparison, OfKind
    from calibrate.replay.run import Replayed

_LOOKS: Final = {
    "decode": (BLUE, "o"),
    "mixed": (ORANGE, "s"),
    "prefill": (GREEN, "^"),
    "swap": (VERMILLION, "D"),
    "copy": (PURPLE, "v"),
}
_WINDOW: Final = 31
"""Steps of a kind over which the running median is taken."""
_MOST_ERROR: Final = 60.0
"""Percent beyond which errors are drawn at the edge."""
JSON_FILE: Final = "replay.json"
CSV_FILE: Final = "replay.csv"
PNG_FILE: Final = "replay.png"
FILES: Final = ResultFiles(
    "a replay", JSON_FILE, frozenset({JSON_FILE, CSV_FILE, PNG_FILE})
)
_COLUMNS: Final = (
    *("steps", "run", "of", "error", "p90", "bias", "gate", ""),
    *("whole", "device", "host ms"),
)
"""Of the table: errors are medians, of what is judged, of whole steps, of the device's
part; the last is the host's time before the device begins."""
WIDTH: Final = 100
"""Columns of the table where no terminal says how many there are."""


@house_style
def draw(comparison: Comparison, title: str) -> bytes:
    """Return the figure, a PNG.

    Left: measured over predicted milliseconds, on logarithmic axes, with the diagonal
    and 10 % beside it. Right: the error over the simulated time, with running medians
    of each kind.
    """
    headline = (
        f"{len(comparison.rows):,} simulated steps executed: makespan off by "
        f"{comparison.makespan_error:+.1f} %"
    )
    figure = titled_figure(headline, title)
    cloud = figure.add_axes((0.065, 0.1, 0.39, 0.73))
    over_time = figure.add_axes((0.54, 0.1, 0.44, 0.73))
    _draw_cloud(cloud, comparison)
    _draw_errors(over_time, comparison)
    return to_png(figure)


def _pairs(comparison: Comparison, rows: list[Row]) -> NDArray[np.float64]:
    """Return predicted and measured milliseconds, (2, n)."""
    pairs = [
        (row.predicted_s, row.wall_s)
        if comparison.judges_whole
        else (row.predicted_device_s, row.device_s)
        for row in rows
    ]
    return 1e3 * np.array(pairs).T


def _draw_cloud(axes: Axes, comparison: Comparison) -> None:
    pairs = _pairs(comparison, list(comparison.rows))
    low, high = 0.8 * pairs.min(), 1.25 * pairs.max()
    line = np.array([low, high])
    axes.fill_between(line, 0.9 * line, 1.1 * line, color="#E8E8E8", lw=0, zorder=0)
    axes.plot(line, line, color=GREY, lw=0.8, zorder=1)
    for of in comparison.kinds:
        rows = [row for row in comparison.rows if row.kind == of.kind]
        predicted, measured = _pairs(comparison, rows)
        colour, marker = _LOOKS[of.kind]
        axes.plot(
            predicted,
            measured,
            linestyle="none",
            marker=marker,
            markersize=3.2,
            markeredgewidth=0.0,
            alpha=0.6,
            color=colour,
            label=f"{of.kind}: {comparison.judged(of).median:.1f} %",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    set_log_axis(axes.xaxis, low, high)
    set_log_axis(axes.yaxis, low, high)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("predicted (ms)")
    axes.set_ylabel("measured (ms)")
    legend_above(axes, num_columns=3)


def _draw_errors(axes: Axes, comparison: Comparison) -> None:
    stop_s = max(1e-3, *(row.start_s for row in comparison.rows))
    seconds, _ = time_unit(stop_s)
    for of in comparison.kinds:
        rows = [row for row in comparison.rows if row.kind == of.kind]
        at = np.array([row.start_s for row in rows]) / seconds
        errors = 100.0 * np.array([comparison.error_of(row) for row in rows])
        shown = np.clip(errors, -_MOST_ERROR, _MOST_ERROR)
        colour, marker = _LOOKS[of.kind]
        axes.plot(
            at,
            shown,
            linestyle="none",
            marker=marker,
            markersize=2.4,
            markeredgewidth=0.0,
            alpha=0.35,
            color=colour,
        )
        if len(rows) >= 2 * _WINDOW:
            axes.plot(at, _running_median(errors), color=colour, lw=1.5)
    axes.axhline(0.0, color=GREY, lw=0.8)
    axes.set_ylim(-1.03 * _MOST_ERROR, 1.03 * _MOST_ERROR)
    set_time_axis(axes, stop_s)
    axes.set_ylabel("error: predicted beside measured (%)")


def _running_median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    half = _WINDOW // 2
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(values, half, mode="edge"), _WINDOW
    )
    return np.median(windows, axis=1)


def write_files(
    replayed: Replayed, facts: dict[str, Any], title: str, directory: Path
) -> None:
    content = (
        facts
        | replayed.comparison.to_dict()
        | {
            "num_chosen": replayed.num_chosen,
            "stopped": replayed.stopped or None,
            "skipped": {str(step): why for step, why in replayed.skipped.items()},
        }
    )
    write_json(directory / JSON_FILE, content)
    with (directory / CSV_FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in replayed.comparison.rows)
    (directory / PNG_FILE).write_bytes(draw(replayed.comparison, title))


def show(replayed: Replayed, title: str) -> None:
    """Print one table: errors and times by kind, the makespan, the worst steps."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    comparison = replayed.comparison
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        left = name in {"steps", ""}
        table.add_column(name, justify="left" if left else "right")
    for of in comparison.kinds:
        table.add_row(*_cells(comparison, of))
    console.print(table)
    for line in _lines(replayed):
        console.print(Text(line), soft_wrap=True)


def _cells(comparison: Comparison, of: OfKind) -> tuple[str, ...]:
    judged = comparison.judged(of)
    verdict = "ok" if comparison.passes(of) else "missed"
    return (
        of.kind,
        f"{of.num_executed:,}",
        f"{of.num_recorded:,}",
        f"{judged.median:.1f} %",
        f"{judged.p90:.1f} %",
        f"{judged.bias:+.1f} %",
        f"{GATES[of.kind]:.0f} %",
        verdict,
        f"{of.whole.median:.1f} %",
        f"{of.device.median:.1f} %",
        f"{1e3 * of.host_p50_s:.2f}",
    )


def _lines(replayed: Replayed) -> list[str]:
    comparison = replayed.comparison
    predicted_s, measured_s = comparison.makespan()
    error = comparison.makespan_error
    verdict = "ok" if abs(error) <= MAKESPAN_GATE else "missed"
    judged = (
        "whole steps are judged, from upload to sampled tokens"
        if comparison.judges_whole
        else "the device's part is judged: host time was not fitted (see --into)"
    )
    lines = [
        f"makespan: predicted {predicted_s:.2f} s, measured {measured_s:.2f} s, "
        f"{error:+.1f} % (gate {MAKESPAN_GATE:.0f} % {verdict}); {judged}"
    ]
    worst = ", ".join(
        f"{row.step} ({row.kind}, {100 * comparison.error_of(row):+.0f} %)"
        for row in comparison.worst(5)
    )
    lines.append(f"worst steps: {worst}")
    outside = sum(row.extrapolated for row in comparison.rows)
    if outside:
        lines.append(f"extrapolated: {outside:,} of {len(comparison.rows):,} steps")
    if replayed.stopped:
        lines.append(
            f"stopped by {replayed.stopped} after {len(comparison.rows):,} of "
            f"{replayed.num_chosen:,} steps: the rest is not judged"
        )
    if replayed.skipped:
        step, why = next(iter(replayed.skipped.items()))
        lines.append(f"skipped {len(replayed.skipped):,} steps, step {step}: {why}")
    return lines
