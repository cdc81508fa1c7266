"""Small pieces of HTML for notebooks: everything that is not ours is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def summary_html(summary: Mapping[str, Any]) -> str:
    """Return what matters of a summary: facts, latencies, warnings."""
    # The rows of the terminal, which need rich: imported by notebooks only.
    from sim.cli.terminal import summary_rows  # noqa: PLC0415

    parts = [
        f"<p><strong>{escape(str(summary['title']))}</strong></p>",
        table_html([], summary_rows(summary)),
        table_html(["ms", *_STATISTICS], _latency_rows(summary)),
    ]
    if summary["warnings"]:
        items = "".join(f"<li>{escape(line)}</li>" for line in summary["warnings"])
        parts.append(f"<ul>{items}</ul>")
    return f"<div>{''.join(parts)}</div>"


def _latency_rows(summary: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for key, name in _LATENCIES.items():
        cells = (summary[f"{statistic}_{key}_ms"] for statistic in _STATISTICS)
        yield name, *("-" if cell is None else f"{cell:,.1f}" for cell in cells)


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose rows begin with a heading; all texts are escaped."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in header)
    body = "".join(_row(row) for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' * bool(head)}{body}</table>"


def _row(cells: Sequence[str]) -> str:
    first, *others = cells
    side = "left" if len(others) == 1 else "right"
    told = "".join(f'<td style="text-align:{side}">{escape(c)}</td>' for c in others)
    return (
        f'<tr><th scope="row" style="text-align:left">{escape(first)}</th>{told}</tr>'
    )
