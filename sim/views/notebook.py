"""A summary as notebooks show it: everything that is not ours is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from sim.results.schema import SHOWN_STATISTICS
from sim.results.summary.rows import latency_rows, summary_rows
from sim.results.summary.verdict import verdict_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def summary_html(summary: Mapping[str, Any]) -> str:
    """Return a summary in short: the verdict, facts, latencies, warnings."""
    parts = [
        f"<p><strong>{escape(str(summary['title']))}</strong></p>",
        *(f"<p>{escape(line)}</p>" for line in verdict_lines(summary)),
        table_html([], summary_rows(summary)),
        table_html(["ms", *SHOWN_STATISTICS], latency_rows(summary)),
    ]
    if summary["warnings"]:
        items = "".join(f"<li>{escape(line)}</li>" for line in summary["warnings"])
        parts.append(f"<ul>{items}</ul>")
    return f"<div>{''.join(parts)}</div>"


def verdict_html(verdict: Mapping[str, Any]) -> str:
    """Return the verdict of a plan on a model, as ``plan.json`` has it."""
    said = [verdict["one_engine"], *verdict["margin"], verdict["binds"]]
    said += [*verdict["alternatives"], *verdict["routers"], *verdict["fleets"]]
    said += [*verdict["changes"], verdict["confidence"]]
    told = "".join(f"<li>{escape(line)}</li>" for line in said if line)
    answer = f"<p><strong>{escape(verdict['answer'])}</strong></p>"
    return f"{answer}{f'<ul>{told}</ul>' * bool(told)}"


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
