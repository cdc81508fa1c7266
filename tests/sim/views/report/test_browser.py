"""Pages as readers see them: in a browser, by mouse, in light, dark and on paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.views.report import build_page
from sim.views.report.looks import DARK, LIGHT
from tests.sim.views.report.browser import Browser, chromium

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USAGE = "plot-kv-cache-usage"
PLACE = """
const gd = document.getElementById(arguments[0]);
const {left, top} = gd.getBoundingClientRect();
const {xaxis: x, yaxis: y} = gd._fullLayout;
return [left + x._offset + x.d2p(arguments[1]), top + y._offset + y.d2p(arguments[2])];
"""
RANGE = (
    "return document.getElementById(arguments[0])._fullLayout.xaxis.range.map(Number)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def interactive(swapping_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("plotly")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(build_page([swapping_run]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def static(
    crowded_run: Path, plain_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("page") / "static.html"
    text = build_page([crowded_run, plain_run], is_static=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Browser, interactive: Path) -> Browser:
    browser.emulate(prefers_color_scheme="light")
    browser.resize(1200)
    browser.open(interactive)
    return browser


def test_no_complaint_and_nothing_asked_of_anyone(page: Browser) -> None:
    page.show_all()
    assert page.run("return document.documentElement.dataset.drawn") == page.run(
        "return document.documentElement.dataset.figures"
    )
    assert page.complaints() == []
    assert {url.partition(":")[0] for url in page.requests()} <= {"file", "data"}


def test_the_policy_would_stop_a_request(page: Browser) -> None:
    page.run("fetch('https://localhost:1/x').catch(() => {window.stopped = true})")
    page.wait("return window.stopped")
    assert any("Content Security Policy" in e["message"] for e in page.complaints())


def test_dragging_zooms_and_a_double_click_goes_back(page: Browser) -> None:
    page.show(USAGE)
    whole = page.run(RANGE, USAGE)
    middle = (whole[0] + whole[1]) / 2
    begin, end = (page.run(PLACE, USAGE, x, 50) for x in (middle, 1.2 * middle))
    page.drag(begin, end)
    page.wait(
        "const r = document.getElementById(arguments[0])._fullLayout.xaxis.range;"
        "return r[1] - r[0] < arguments[1] / 5",
        USAGE,
        whole[1] - whole[0],
    )
    zoomed = page.run(RANGE, USAGE)
    assert zoomed == pytest.approx([middle, 1.2 * middle], rel=0.02)
    other = page.run(
        "return document.getElementById(arguments[0])._fullLayout.xaxis2.range", USAGE
    )
    assert other == pytest.approx(zoomed)  # one time axis
    for clicks in (1, 2):
        page.mouse("mousePressed", *begin, clicks=clicks)
        page.mouse("mouseReleased", *begin, clicks=clicks)
    page.wait(
        "const r = document.getElementById(arguments[0])._fullLayout.xaxis.range;"
        "return r[1] - r[0] > 0.99 * arguments[1]",
        USAGE,
        whole[1] - whole[0],
    )


def test_hovering_over_a_mark_tells_who_why_how_and_what_was_lost(
    page: Browser,
) -> None:
    page.show(USAGE)
    mark = page.run(
        "const t = document.getElementById(arguments[0]).data.find("
        "  (each) => each.mode === 'markers' && each.name.includes('swap'));"
        "return [t.x[0], t.y[0], t.customdata[0]]",
        USAGE,
    )
    x, y = page.run(PLACE, USAGE, mark[0], mark[1])
    page.mouse("mouseMoved", x - 3, y)
    page.mouse("mouseMoved", x, y)
    told = page.wait(
        "return [...document.querySelectorAll(`#${arguments[0]} .hovertext`)]"
        ".map((e) => e.textContent).join('')",
        USAGE,
    )
    for part in ("request ", "preempted", "for request ", "mode swap", "tokens lost"):
        assert part in told
    assert told == mark[2].replace("<br>", "")


def test_colours_follow_the_system_and_the_button(page: Browser) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    line = (
        "return document.getElementById(arguments[0])._fullData"
        ".find((t) => t.mode === 'lines' && t.hoverinfo !== 'skip').line.color"
    )
    page.show(USAGE)
    assert page.run(ground) == _rgb(LIGHT["ground"])
    assert page.run(line, USAGE).lower() == LIGHT["run-1"]
    page.emulate(prefers_color_scheme="dark")
    page.wait("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert page.run(ground) == _rgb(DARK["ground"])
    page.wait(
        f"return ({line[7:]}).toLowerCase() === arguments[1]", USAGE, DARK["run-1"]
    )
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == _rgb(LIGHT["ground"])
    assert page.run(line, USAGE).lower() == LIGHT["run-1"]
    assert page.complaints() == []


def _rgb(colour: str) -> str:
    parts = (str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))
    return f"rgb({', '.join(parts)})"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_drawn_is_not_blank(page: Browser, scheme: str) -> None:
    page.emulate(prefers_color_scheme=scheme)
    page.show_all()
    page.run("scrollTo(0, 0)")
    picture = page.pixels()
    boxes = page.run(
        "return [...document.querySelectorAll('.plot')].map((e) => {"
        "const b = e.getBoundingClientRect();"
        "return [e.id, b.left, b.top + scrollY, b.right, b.bottom + scrollY]})"
    )
    assert len(boxes) >= 8
    ground = picture[2, 2]
    for name, *box in boxes:
        left, top, right, bottom = (round(each) for each in box)
        part = picture[top:bottom, left:right]
        inked = (np.abs(part.astype(int) - ground).max(axis=2) > 40).mean()
        assert 0.005 < inked < 0.95, name


def test_nothing_is_wider_than_a_narrow_window(page: Browser) -> None:
    page.resize(400)
    page.show_all()
    assert page.run("return document.documentElement.scrollWidth") <= 400
    domains = page.run(
        "const gd = document.getElementById('plot-latency-cdfs');"
        "return gd._fullLayout.xaxis.domain.concat(gd._fullLayout.xaxis3.domain)"
    )
    assert domains == [0, 1, 0, 1]  # panels stand below each other


def test_paper_holds_every_figure_in_light(page: Browser) -> None:
    page.emulate(prefers_color_scheme="dark")
    page.run(
        "addEventListener('beforeprint', () => { const {drawn, theme} ="
        " document.documentElement.dataset; window.held = [drawn, theme,"
        " document.querySelectorAll('details:not([open])').length]})"
    )
    paper = page.paper()
    assert paper.startswith(b"%PDF")
    assert paper.count(b"/Type /Page\n") + paper.count(b"/Type /Page ") >= 5
    drawn, theme, folded = page.run("return window.held")
    assert drawn == page.run("return document.documentElement.dataset.figures")
    assert (theme, folded) == ("light", 0)
    assert page.run("return document.documentElement.dataset.theme") is None


def test_the_static_page_needs_no_script_for_its_figures(
    browser: Browser, static: Path
) -> None:
    browser.emulate(prefers_color_scheme="dark")
    browser.resize(1200)
    browser.open(static)
    assert browser.complaints() == []
    assert {url.partition(":")[0] for url in browser.requests()} <= {"file"}
    assert browser.run("return document.querySelectorAll('.still svg').length") >= 8
    colours = browser.run(
        "return [...document.querySelectorAll('#plot-kv-cache-usage text')]"
        ".map((e) => getComputedStyle(e).fill)"
    )
    assert set(colours) <= {_rgb(DARK[name]) for name in ("ink", "muted")}
    browser.run("document.getElementById('theme').click()")
    light = browser.run(
        "return getComputedStyle(document.querySelector('.still text')).fill"
    )
    assert light in {_rgb(LIGHT[name]) for name in ("ink", "muted")}
