"""A little HTML: elements whose text is escaped unless it is markup already."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

VOID: Final = frozenset({"br", "hr", "img", "input", "link", "meta"})
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


def paragraph(*parts: object, **attributes: object) -> Markup:
    """Return a paragraph."""
    return element("p", *parts, **attributes)


def bullets(items: Iterable[object]) -> Markup:
    """Return a list without order."""
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
    """Return what is shown on request; print shows it always."""
    return element(
        "details", element("summary", summary), *children, open=is_open or None
    )
