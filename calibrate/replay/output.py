"""What a replay leaves: JSON, a table of steps, a figure, and lines on the terminal."""

from __future__ import annotations

import csv
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibrate.replay.compare import GATES, MAKESPAN_GATE, Row
from calibrate.replay.figure import draw
from sim.results.output import ResultFiles, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from calibrate.replay.compare import Comparison, OfKind
    from calibrate.replay.run import Replayed

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


def write_files(
    replayed: Replayed, facts: dict[str, Any], title: str, directory: Path
) -> None:
    """Write ``replay.json``, ``replay.csv`` and ``replay.png``.

    Parameters
    ----------
    replayed
        What was executed.
    facts
        What was run on what, for the JSON.
    title
        The same in words, for the figure.
    directory
        Where to; must exist.
    """
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
