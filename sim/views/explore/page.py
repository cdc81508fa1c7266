"""The document of the page: where things stand, before the script fills them."""

from __future__ import annotations

from typing import Final

from sim.views.report.html import Markup, element

SECTIONS: Final = {
    "cache": "KV cache and preemptions",
    "queues": "Queues and batches",
    "latency": "Latency",
    "capacity": "Capacity explained",
    "numbers": "Numbers",
    "take": "Take it along",
}
"""Parts of the page by their anchor, in its order."""

_SCRIPTS: Final = ("plotly.js", "drawing.js", "theme.js", "explore.js")


def document(name: str) -> str:
    """Return the page of a configuration called `name`; its data comes later."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{name} - kvsim explore"),
        element("link", rel="icon", href="data:,"),
        element("link", rel="stylesheet", href="looks.css"),
        *(element("script", src=each, defer=True) for each in _SCRIPTS),
    )
    body = element("body", _header(name), element("div", _aside(), _main(), id="both"))
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'


def _header(name: str) -> Markup:
    title = element("h1", element("span", "kvsim explore "), name)
    state = element("p", "Starting...", id="state", role="status", aria_live="polite")
    bar = element("div", element("div", id="done"), id="bar", aria_hidden="true")
    theme = element("button", "Dark", id="theme", type="button", hidden=True)
    pin = _button("pin", "Pin", "Keep this run behind the next ones (p)")
    unpin = _button("unpin", "Unpin", "Show the run alone again (u)")
    reset = _button("reset", "Reset", "Back to the configuration as it was given (r)")
    return element(
        "header", element("div", title, state), pin, unpin, reset, theme, bar, id="top"
    )


def _button(id_: str, text: str, title: str) -> Markup:
    return element("button", text, id=id_, type="button", title=title, disabled=True)


def _aside() -> Markup:
    find = element(
        "input",
        id="find",
        type="search",
        placeholder="Find a setting (/)",
        aria_label="Find a setting",
        autocomplete="off",
        spellcheck="false",
    )
    form = element("form", id="controls", autocomplete="off")
    folded = element(
        "details",
        element("summary", "Settings"),
        find,
        form,
        open=True,
        id="settings",
    )
    return element("aside", folded, aria_label="Settings")


def _main() -> Markup:
    return element(
        "main",
        element("p", id="trouble", role="alert", hidden=True),
        element("div", id="tiles"),
        element("div", id="said", class_="lead"),
        _tried(),
        *(_section(key, title) for key, title in SECTIONS.items()),
        id="found",
    )


def _tried() -> Markup:
    """Return where the runs of this page are listed, to go back to and to compare."""
    return element(
        "section",
        element("h2", "Tried so far", id="tried-title"),
        element("div", id="in-tried"),
        id="tried",
        aria_labelledby="tried-title",
        hidden=True,
    )


def _section(key: str, title: str) -> Markup:
    inside = _take() if key == "take" else Markup()
    return element(
        "section",
        element("h2", title, id=f"{key}-title"),
        element("div", inside, id=f"in-{key}"),
        id=key,
        aria_labelledby=f"{key}-title",
    )


def _take() -> Markup:
    """Return the part with a file and two commands to take along."""
    return element(
        "div",
        element("h3", "The same run in a terminal"),
        _copied("command"),
        element("h3", "The engine with these settings"),
        _copied("serve"),
        element("p", id="unserved", class_="note"),
        element("h3", "The complete configuration"),
        element(
            "p",
            _button("download", "Download YAML", "Runs to the same bytes"),
            " ",
            _button("report", "Download report", "A page to send, with intervals"),
            " ",
            _button("results", "Download results", "The folder of kvsim run, packed"),
        ),
        element(
            "details",
            element("summary", "Show it"),
            element("pre", id="yaml", tabindex="0"),
        ),
    )


def _copied(id_: str) -> Markup:
    copy = element("button", "Copy", type="button", class_="copy", data_from=id_)
    return element("div", element("pre", id=id_, tabindex="0"), copy, class_="copied")
