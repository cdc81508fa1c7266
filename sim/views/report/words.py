"""Numbers in words, and as marked-up data that can be checked against the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.views.report.html import Markup, element

if TYPE_CHECKING:
    from sim.views.report.source import Run


def datum(run: Run, key: str, shown: str, value: object = None) -> Markup:
    """Return a number as ``<data>``, with its full value (default: the summary's)."""
    return element(
        "data",
        shown,
        value=repr(run.summary[key] if value is None else value),
        data_run=run.number,
        data_key=key,
    )


def count(number: float) -> str:
    """Return a whole number with thousands separators."""
    return f"{number:,.0f}"


def plural(number: float, noun: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share as a percentage, small ones with more digits."""
    value = 100.0 * share
    if value == round(value):
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.1 else f"{value:.2g} %"


def milliseconds(value_ms: float | None) -> str:
    """Return a latency with three digits: ms, or seconds from one on."""
    if value_ms is None:
        return "-"
    if value_ms < 999.5:
        return f"{value_ms:.3g} ms"
    seconds = value_ms / 1e3
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def decimal(value: float | None, digits: int = 3) -> str:
    """Return a number with so many digits and separators; a dash for none."""
    if value is None:
        return "-"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def listed(items: list[str]) -> str:
    """Return ``a, b and c``."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
