"""A little HTML: escaped elements, and numbers in words and as data to be checked."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sim.views.report.source import Run


VOID: Final = frozenset({"br", "hr", "img", "input", "link", "meta", "wbr"})
"""Elements that have no end."""


class Markup(str):
    """Text that is HTML: it stands in a page as it is."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return anything as HTML: markup as it is, all else escaped."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Return parts as one piece of HTML, each escaped unless it is markup."""
    return Markup(escape(between).join(text(part) for part in parts))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element; children that are no `Markup` are escaped.

    Of attributes a trailing underscore is dropped and others become hyphens; None and
    False leave one out, True leaves out its value.
    """
    told = "".join(
        f" {_attribute(key)}"
        if value is True
        else f' {_attribute(key)}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{join(children)}</{name}>")


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def breakable(key: str) -> Markup:
    """Return a dotted key that may be broken between its words."""
    parts = re.findall(r"[^._]*[._]|[^._]+", key)
    return Markup(element("wbr").join(text(part) for part in parts))


def paragraph(*parts: object, **attributes: object) -> Markup:
    return element("p", *parts, **attributes)


def bullets(items: Iterable[object]) -> Markup:
    return element("ul", *(element("li", item) for item in items))


def table(
    caption: str,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[int] = (),
    class_: str | None = None,
) -> Markup:
    """Return a table whose first column names its rows; `left` columns hold texts."""
    looks = ["left" if place in left else None for place in range(len(head))]
    body = (_row(row, looks) for row in rows)
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", _head(head, looks)),
            element("tbody", *body),
            class_=class_,
        ),
        class_="scroll",
        role="region",
        aria_label=caption,
        tabindex="0",
    )


def _head(cells: Sequence[object], looks: Sequence[str | None]) -> Markup:
    named = zip(cells, looks, strict=True)
    return element(
        "tr", *(element("th", cell, scope="col", class_=look) for cell, look in named)
    )


def _row(cells: Sequence[object], looks: Sequence[str | None]) -> Markup:
    first, *others = cells
    told = (
        element("td", cell, class_=look)
        for cell, look in zip(others, looks[1:], strict=True)
    )
    return element("tr", element("th", first, scope="row"), *told)


def details(summary: object, *children: object, is_open: bool = False) -> Markup:
    """Return a part that is shown on request; print shows it always."""
    return element(
        "details", element("summary", summary), *children, open=is_open or None
    )


def data(shown: str, value: object, key: str, run: object) -> Markup:
    """Return a number as ``<data>``, which carries its full value, key and run."""
    return element("data", shown, value=repr(value), data_run=run, data_key=key)


def datum(run: Run, key: str, shown: str, value: object = None) -> Markup:
    """Return a number of a run as `data`; by default the summary's."""
    return data(shown, run.summary[key] if value is None else value, key, run.number)


def count(number: float) -> str:
    return f"{number:,.0f}"


def plural(number: float, noun: str) -> str:
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
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
