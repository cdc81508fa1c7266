"""The page: sections put into one file that needs no other and no network."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from sim.views.report.charts import Chart
from sim.views.report.html import Markup, element, join
from sim.views.report.looks import DARK, LIGHT, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Figures(Protocol):
    """Draws the figures of a page."""

    is_interactive: bool

    def figure(self, chart: Chart) -> Markup: ...

    def data(self) -> Markup:
        """Return the data that the scripts draw; asked for after all figures."""

    def script(self) -> str | None:
        """Return the library that the page's script draws with, None without one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A section as it stands in the page."""

    key: str  # its anchor
    title: str  # its heading
    blocks: tuple[Markup | Chart, ...]  # its contents in order: HTML and figures


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: its anchor, its heading, and the function of its contents."""

    key: str
    title: str
    blocks: Callable[[Any], Iterable[Markup | Chart]]
    is_needed: Callable[[Any], bool] | None = None
    """Whether the page has it; None for always."""

    def of(self, found: object) -> Part:
        return Part(self.key, self.title, tuple(self.blocks(found)))


def page(title: str, under: Markup, parts: Sequence[Part], figures: Figures) -> str:
    main = element("main", *(_section(part, figures) for part in parts))
    scripts = [asset("theme.js")]
    drawing = figures.script()
    if drawing is not None:
        scripts.append(asset("drawing.js") + asset("figures.js"))
    body = element(
        "body",
        _header(title, under),
        _contents(parts),
        main,
        _footer(),
        figures.data(),
        _held(drawing),
    )
    # Scripts last: the page can be read before they have been.
    inside = body.removesuffix("</body>") + "".join(map(_script, scripts)) + "</body>"
    allowed = scripts if drawing is None else [drawing, *scripts]
    document = f"{_head(title, allowed)}{inside}"
    return f'<!DOCTYPE html>\n<html lang="en">{document}</html>\n'


def _head(title: str, scripts: Sequence[str]) -> Markup:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content="kvsim report"),
        element("title", title),
        element("style", Markup(style())),
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return the content security policy: our scripts run, and nothing is fetched."""
    digests = (sha256(script.encode()).digest() for script in scripts)
    ours = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    return (
        f"default-src 'none'; script-src {ours}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def style() -> str:
    """Return the palette, light and dark, and the looks of a page."""
    light, dark = variables(LIGHT), variables(DARK)
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
        f':root[data-theme="light"]{{{light}}}\n'
        f':root[data-theme="dark"]{{{dark}}}\n'
        f"@media print{{:root,:root[data-theme]{{{light}}}}}\n{asset('page.css')}"
    )


def _held(script: str | None) -> Markup:
    """Return a large script as text, which ours runs when the page has been shown."""
    if script is None:
        return Markup()
    return element("script", Markup(script), type="text/plain", id="drawing")


def _script(text: str) -> str:
    return f"<script>{text}</script>\n"


def _header(title: str, under: Markup) -> Markup:
    toggle = element("button", "Dark", id="theme", type="button", hidden=True)
    return element("header", element("div", element("h1", title), under), toggle)


def _contents(parts: Sequence[Part]) -> Markup:
    links = (
        element("li", element("a", part.title, href=f"#{part.key}")) for part in parts
    )
    return element("nav", element("ul", *links), aria_label="Sections")


def _section(part: Part, figures: Figures) -> Markup:
    heading = element("h2", part.title, id=f"{part.key}-title")
    blocks = (
        _figure(block, figures) if isinstance(block, Chart) else block
        for block in part.blocks
    )
    return element(
        "section",
        heading,
        join(blocks),
        id=part.key,
        aria_labelledby=f"{part.key}-title",
    )


def _figure(chart: Chart, figures: Figures) -> Markup:
    hint = f" {chart.hint}" if chart.hint and figures.is_interactive else ""
    caption = element("figcaption", chart.caption, hint)
    return element("figure", caption, figures.figure(chart), id=chart.key)


def _footer() -> Markup:
    return element(
        "footer",
        "Written by kvsim report. Times are simulated; numbers carry their full value "
        "in the page's source.",
    )


@cache
def asset(name: str) -> str:
    """Return a style or script that pages are made of."""
    return (files("sim.views.report") / "assets" / name).read_text(encoding="utf-8")
