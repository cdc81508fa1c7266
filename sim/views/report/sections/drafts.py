"""The section on draft tokens: how often accepted, at which load, for what room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.views.plots.run.drafts import loads_of, verifies
from sim.views.report.charts import Axis, Chart, Line, Panel
from sim.views.report.html import (
    Markup,
    count,
    data,
    datum,
    decimal,
    paragraph,
    percent,
    table,
)
from sim.views.report.looks import colour, dash, name, symbol, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.views.plots.run.drafts import Loads
    from sim.views.report.source import Run

_PANELS: Final = (
    ("length", "tokens a verification"),
    ("num_tokens", "tokens a step"),
    ("token_ms", "ms a token of a request"),
    ("num_draft_blocks", "blocks for drafts"),
)
"""Attributes of `Loads`, and their names in words."""

_RATES: Final = "spec_decode_per_position_acceptance_rates"


def has_drafts(runs: Sequence[Run]) -> bool:
    """Whether the steps of any of the runs verify draft tokens."""
    return any(_verifies(run) for run in runs)


def show_drafts(runs: Sequence[Run]) -> Iterator[Markup | Chart]:
    """Return the accepted tokens, and the gain and room of drafts against load."""
    shown = [run for run in runs if _verifies(run)]
    for run in runs:
        if run not in shown:
            yield paragraph(f"{run.label}: no drafts are verified", class_="note")
    loads = [(run, loads_of(run.folder.step_table)) for run in shown]
    loads = [(run, each) for run, each in loads if len(each.num_drafts)]
    if loads:
        yield Chart(
            "drafts",
            "Steps by the requests whose drafts they verify: what a verification and a "
            "step yield, how long a request waits for a token, and KV blocks that are "
            "held for drafts.",
            tuple(
                Panel(
                    Axis(title, low=0.0),
                    tuple(_line(runs, run, of, which, title) for run, of in loads),
                )
                for which, title in _PANELS
            ),
            x=Axis("requests whose drafts a step verifies", low=0.0),
            height_px=680,
        )
    yield _numbers(shown)
    yield _positions(shown)


def _verifies(run: Run) -> bool:
    return verifies(run.folder.step_table)


def _line(runs: Sequence[Run], run: Run, loads: Loads, which: str, title: str) -> Line:
    return Line(
        name(runs, run, title if len(runs) == 1 else ""),
        colour(run),
        loads.num_drafts,
        getattr(loads, which),
        dash(run),
        symbol=symbol(run),
    )


def _numbers(shown: Sequence[Run]) -> Markup:
    head = ["run", "drafts", "tokens drafted", "accepted", "share accepted"]
    head += ["tokens a verification", "of KV blocks"]
    rows = [
        [
            tag(run),
            datum(run, key := "spec_decode_num_drafts", count(run.summary[key])),
            datum(run, key := "spec_decode_draft_tokens", count(run.summary[key])),
            datum(run, key := "spec_decode_accepted_tokens", count(run.summary[key])),
            datum(
                run,
                key := "spec_decode_acceptance_rate",
                percent(run.summary[key] / 100.0),
            ),
            datum(
                run, key := "spec_decode_acceptance_length", decimal(run.summary[key])
            ),
            datum(run, key := "kv_cache_usage_drafts_mean", percent(run.summary[key])),
        ]
        for run in shown
    ]
    caption = "Drafts that were verified; what they hold of the pool, over time"
    return table(caption, head, rows)


def _positions(shown: Sequence[Run]) -> Markup:
    most = max(len(run.summary[_RATES]) for run in shown)
    head: list[object] = ["run", *(f"draft {i}" for i in range(1, most + 1))]
    rows = []
    for run in shown:
        rates = run.summary[_RATES]
        cells = [
            data(percent(rate), rate, f"{_RATES}[{i}]", run.number)
            for i, rate in enumerate(rates)
        ]
        rows.append([tag(run), *cells, *["-"] * (most - len(rates))])
    caption = "Verifications in which a draft and all before it were accepted"
    return table(caption, head, rows)
