"""Output of ``kvsim validate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from sim.cli.console import number_table, output_console
from sim.results.schema import OF_REQUESTS
from sim.studies.validation.compare import METRICS
from sim.studies.validation.sharpness import SHOWN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.table import Table

_WHOLE: Final = frozenset({"completed", "num_preemptions", "prefix_cache_hits"})
_FROM: Final = 100.0
"""From here on a number has one decimal, below two."""


def print_report(report: Mapping[str, Any], directory: Path) -> None:
    console = output_console()
    console.print(Text(report["title"], style="bold"))
    console.print(Text(f"measured: {report['source']}"))
    console.print(_metrics(report))
    for line in [*_fit_lines(report), *_curve_lines(report)]:
        console.print(Text(line), soft_wrap=True)
    console.print(Text(report["sharpness"]["verdict"]), soft_wrap=True)
    if report["sharpness"]["has_pressure"]:
        console.print(_more_blocks(report))
        for line in _pressure_lines(report):
            console.print(Text(line), soft_wrap=True)
    for note in report["notes"]:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    console.print(Text(f"report in {directory}"), soft_wrap=True)


def _metrics(report: Mapping[str, Any]) -> Table:
    judged = report.get("judged_metrics")
    names = ["", "predicted", "measured", "error"]
    if judged is not None:
        names.append("error, judged part")
    table = number_table(*names, texts=[""], header_style="table.header")
    for name in METRICS:
        found = report["metrics"][name]
        row = [
            name.replace("_", " "),
            _number(name, found["predicted"]),
            _number(name, found["measured"]),
            _percent(found),
        ]
        if judged is not None:
            row.append(_percent(judged.get(name, {})))
        table.add_row(*row)
    return table


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in _WHOLE:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= _FROM else f"{value:,.2f}"


def _percent(found: Mapping[str, float | None]) -> str:
    error = found.get("error_pct")
    return "-" if error is None else f"{error:+.1f} %"


def _more_blocks(report: Mapping[str, Any]) -> Table:
    """Return the predictions of other numbers of blocks."""
    columns = [(f"{report['num_gpu_blocks']:,} blocks, as given", report["metrics"])]
    for each in report["sharpness"]["more_blocks"]:
        title = f"+{each['more_pct']} %: {each['num_gpu_blocks']:,}"
        columns.append((title, each["metrics"]))
    names = ["predicted with", "measured", *(title for title, _ in columns)]
    table = number_table(*names, texts=["predicted with"], header_style="table.header")
    for name in SHOWN:
        row = [name.replace("_", " "), _number(name, columns[0][1][name]["measured"])]
        for _, metrics in columns:
            found = metrics[name]
            text = _number(name, found["predicted"])
            if found["error_pct"] is not None:
                text += f" ({_percent(found)})"
            row.append(text)
        table.add_row(*row)
    return table


def _fit_lines(report: Mapping[str, Any]) -> list[str]:
    fit = report["fit"]
    if fit is None:
        return ["nothing was fitted"]
    values = ", ".join(f"{key} = {value:.4g}" for key, value in fit["values"].items())
    return [
        f"fitted: {values}, on the {fit['num_requests']} requests that had ended by "
        f"{fit['split_s']:.1f} s (error there {fit['error_before_pct']:.1f} % before, "
        f"{fit['error_after_pct']:.1f} % after)"
    ]


def _curve_lines(report: Mapping[str, Any]) -> list[str]:
    curves = report.get("curves")
    if not curves:
        return []
    names = {
        "num_running": ("running", "requests"),
        "num_waiting": ("waiting", "requests"),
        "num_swapped": ("swapped", "requests"),
        "kv_cache_usage": ("KV usage", "points"),
    }
    parts = [
        f"{names[key][0]} {found['mean_abs']:.2f} {names[key][1]} (mean measured "
        f"{found['measured']:.1f})"
        for key, found in curves.items()
    ]
    return [f"curves apart on average: {', '.join(parts)}"]


def _pressure_lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    usage_of = report.get("kv_usage_of", "").removeprefix("the ")
    for found in report.get("by_kv_usage", []):
        parts = [
            f"{each.label} {found[each.key]['bias_pct']:+.1f} % (|error| "
            f"{found[each.key]['p50_abs_pct']:.1f} %)"
            for each in OF_REQUESTS
            if each.key in found
        ]
        lines.append(
            f"KV usage ({usage_of}) {found['usage_from']:.0%} to "
            f"{found['usage_to']:.0%}, "
            f"{found['n']} requests, medians: {', '.join(parts)}"
        )
    return lines
