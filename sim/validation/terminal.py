"""What ``kvsim validate`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_WIDTH: Final = 100
_ROWS: Final = (
    *(
        f"{s}_{n}_ms"
        for n in ("ttft", "tpot", "itl", "e2el")
        for s in ("mean", "p50", "p90", "p99")
    ),
    *("duration", "completed", "request_throughput", "output_throughput"),
    *("num_preemptions", "prefix_cache_hits"),
)


def print_report(report: Mapping[str, Any], directory: Path) -> None:
    """Print the table of errors, what was fitted and how far the curves are apart."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(Text(report["title"], style="bold"))
    console.print(Text(f"measured: {report['source']}"))
    console.print(_metrics(report))
    for line in [*_fit_lines(report), *_curve_lines(report), *_pressure_lines(report)]:
        console.print(Text(line), soft_wrap=True)
    for note in report["notes"]:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    console.print(Text(f"report in {directory}"), soft_wrap=True)


def _metrics(report: Mapping[str, Any]) -> Table:
    judged = report.get("judged_metrics")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if not name else "right")
    if judged is not None:
        table.add_column("error, judged part", justify="right")
    for name in _ROWS:
        if name not in report["metrics"]:
            continue
        found = report["metrics"][name]
        row = [
            name.replace("_", " "),
            _number(found["predicted"]),
            _number(found["measured"]),
            _percent(found),
        ]
        if judged is not None:
            row.append(_percent(judged.get(name, {})))
        table.add_row(*row)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def _percent(found: Mapping[str, float]) -> str:
    return f"{found['error_pct']:+.1f} %" if "error_pct" in found else "-"


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
        "kv_cache_usage": ("KV usage", "points"),
    }
    parts = [
        f"{names[key][0]} {found['mean_abs']:.2f} {names[key][1]} (mean measured "
        f"{found['measured_mean']:.1f})"
        for key, found in curves.items()
    ]
    return [f"curves apart on average: {', '.join(parts)}"]


def _pressure_lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for found in report.get("by_kv_usage", []):
        parts = [
            f"{name} {found[key]['bias_pct']:+.1f} % (|error| "
            f"{found[key]['p50_abs_pct']:.1f} %)"
            for key, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2E"))
            if key in found
        ]
        lines.append(
            f"KV usage {found['usage_from']:.0%} to {found['usage_to']:.0%}, "
            f"{found['n']} requests, medians: {', '.join(parts)}"
        )
    return lines
