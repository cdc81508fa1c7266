"""Output of ``kvsim workload describe`` and ``curve``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from sim.cli.console import facts_table, number_table, output_console
from workloads.analysis.description import quantiles

if TYPE_CHECKING:
    from rich.table import Table

    from sim.studies.prefixes.report import PrefixReport
    from workloads.analysis import Description
    from workloads.analysis.description import SessionShape


def print_curve(report: PrefixReport) -> None:
    """Print the curve at the sizes at which the bound is known, and at the answer."""
    console = output_console()
    console.print(Text(report.title, style="bold"), soft_wrap=True)
    possible = report.curve.token_hit_rate(report.curve.possible_hits)
    if not possible:
        return
    names = ["blocks", "tokens", "LRU", "share of possible", "future known"]
    if report.is_bound:
        names[2:4] = ["LRU at most"]
    if report.memory is not None:
        names.insert(2, "GiB")
    table = number_table(*names)
    asked = float(report.need.num_blocks)
    for row in report.rows(num_rows=2):
        if row["num_blocks"] == 0.0:
            continue
        style = "bold" if row["num_blocks"] == asked else None
        cells = _curve_cells(row, possible)
        if report.is_bound:
            del cells[-2]
        table.add_row(*cells, style=style)
    console.print(table)
    if kinds := report.kinds():
        console.print(_kinds(kinds))


def _kinds(kinds: list[dict[str, Any]]) -> Table:
    """Return the tokens that layers of each kind keep, and those that a hit needs."""
    texts = ["layers", "a hit needs"]
    names = ["layers", "bytes/token", "a hit needs", "infinite: tokens", "GiB"]
    table = number_table(*names, texts=texts)
    for row in kinds:
        table.add_row(
            f"{row['num_layers']} x {row['kind']}",
            f"{row['token_bytes']:,.0f}",
            f"{row['hit_needs']} of {row['block_size']}",
            f"{row['kept_tokens']:,.0f}",
            f"{row['kept_gib']:,.2f}",
        )
    return table


def _curve_cells(row: dict[str, Any], possible: float) -> list[str]:
    margin = f" ±{row['lru_margin']:.2%}" if row["lru_margin"] else ""
    bound = row["belady_hit_rate"]
    gib = [] if row["gib"] is None else [f"{row['gib']:,.3f}"]
    return [
        f"{row['num_blocks']:,.0f}",
        f"{row['num_tokens']:,.0f}",
        *gib,
        f"{row['lru_hit_rate']:.2%}{margin}",
        f"{row['lru_hit_rate'] / possible:.1%}",
        "" if bound is None else f"{bound:.2%}",
    ]


def print_description(title: str, description: Description) -> None:
    """Print everything that is known of a workload."""
    console = output_console()
    console.print(Text(title, style="bold"))
    console.print(facts_table(description_rows(description)))
    console.print(_lengths(description))


def description_rows(description: Description) -> list[tuple[str, str]]:
    """Return the facts of a workload as (name, text)."""
    arrivals = description.arrivals
    rows = [
        ("requests", f"{arrivals.num_requests:,} in {arrivals.span_s:,.1f} s"),
        ("rate", _rate(description)),
        ("burstiness", _burstiness(description)),
        ("rank correlation", _rho(description.rank_correlation)),
        *_sharing_rows(description),
        *_session_rows(description.sessions),
    ]
    for name, counts in description.sampling.items():
        shares = (f"{value}: {count:,}" for value, count in counts.items())
        rows.append((name, ", ".join(shares)))
    return rows


def _rate(description: Description) -> str:
    arrivals = description.arrivals
    if arrivals.mean_rate is None:
        return "all at once"
    text = f"{arrivals.mean_rate:.3f} requests/s"
    if arrivals.peak_rate is None:
        return text
    return f"{text}; busiest 60 s {arrivals.peak_rate:.2f} requests/s"


def _burstiness(description: Description) -> str:
    arrivals = description.arrivals
    if arrivals.gap_cv is None:
        return "-"
    parts = [f"CV of gaps {arrivals.gap_cv:.3g}"]
    parts += [
        f"{value:.3g} in {window} s" for window, value in arrivals.dispersion.items()
    ]
    meaning = " (variance / mean of counts; Poisson: 1)" if len(parts) > 1 else ""
    return ", ".join(parts) + meaning


def _rho(rho: float | None) -> str:
    return "-" if rho is None else f"{rho:+.3f} between prompt and output lengths"


def _sharing_rows(description: Description) -> list[tuple[str, str]]:
    if not description.sharing:
        none = "none is told, so each prompt is taken as text of its own"
        return [("prefix sharing", none)]
    rows = []
    for sharing in description.sharing:
        s = sharing.statistics
        rows += [
            (
                f"blocks of {s.block_size}",
                f"{s.num_blocks:,}, {s.num_distinct_blocks:,} distinct ({s.unit})",
            ),
            (
                "  ideal hits",
                f"{s.block_hit_rate:.2%} of blocks, {s.token_hit_rate:.2%} of tokens "
                f"({s.num_hit_tokens:,} of {s.num_prompt_tokens:,})",
            ),
            (
                "  requests hit",
                f"{s.num_requests_hit:,} of {s.num_requests:,} "
                f"({s.num_requests_hit / s.num_requests:.1%})",
            ),
        ]
    return rows


def _session_rows(shape: SessionShape | None) -> list[tuple[str, str]]:
    if shape is None:
        return []
    many = int((shape.turns > 1).sum())
    rows = [
        ("sessions", f"{shape.num_sessions:,}, {many:,} of several requests"),
        ("  turns", _spread(quantiles(shape.turns), "")),
    ]
    if shape.num_chained:
        quoted = f"{shape.quoted:,} quote the answer that they waited for; arrivals "
        quoted += "above are the earliest possible"
        rows += [
            ("  follow-ups", f"{shape.num_chained:,}, {quoted}"),
            ("  think or tool time", _spread(quantiles(shape.delays_s), " s")),
            ("  context growth", _spread(quantiles(shape.growth_tokens), " tokens")),
        ]
    return rows


def _spread(found: dict[str, float] | None, unit: str) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{name} {value:,.5g}{unit}" for name, value in found.items())


def _lengths(description: Description) -> Table:
    names = ("total", "mean", "p50", "p90", "p95", "p99", "max")
    table = number_table("tokens", *names, texts=["tokens"])
    table.columns[0].style = "dim"
    for name, lengths in (
        ("prompts", description.prompts),
        ("outputs", description.outputs),
    ):
        table.add_row(
            name,
            f"{lengths.total:,}",
            f"{lengths.mean:,.1f}",
            *(f"{value:,.10g}" for value in _percentiles(lengths)),
        )
    return table


def _percentiles(lengths: Any) -> list[float]:
    found = lengths.p50, lengths.p90, lengths.p95, lengths.p99
    return [*(round(x, 1) for x in found), lengths.max]
