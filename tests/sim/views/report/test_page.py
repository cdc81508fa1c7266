"""The page: one file, the same bytes, and nobody's words run in it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from sim.views.report import build_page, plotly_charts
from sim.views.report.charts import SYMBOLS
from sim.views.report.html import Markup
from sim.views.report.looks import DARK, LIGHT
from sim.views.report.page import Part, page
from sim.views.report.sections import RUN_SECTIONS
from sim.views.report.sections.cache import num_shown
from sim.views.report.svg_charts import SvgFigures
from tests.sim.views.report.pages import Page, page_of

if TYPE_CHECKING:
    from pathlib import Path

EVIL = "x\"'><script>alert(1)</script><img src=http://h/>$%{y}&amp;</title>"
NAMES_ADDRESSES = ("xmlns", "xmlns:xlink", "xlink:href", "content")
"""Attributes that name something without fetching it, or tell what may be fetched."""


@pytest.fixture(scope="module")
def compared(crowded_run: Path, plain_run: Path, swapping_run: Path) -> Page:
    return page_of(crowded_run, plain_run, swapping_run)


@pytest.fixture(scope="module")
def static(crowded_run: Path, plain_run: Path, swapping_run: Path) -> Page:
    return page_of(crowded_run, plain_run, swapping_run, is_static=True)


def test_all_that_a_page_needs_is_in_it(compared: Page, static: Page) -> None:
    for found in (compared, static):
        for name, each in found.elements:
            assert name not in {"iframe", "object", "embed", "base", "audio", "video"}
            assert "src" not in each or each["src"].startswith("data:")
            assert not any(key.startswith("on") for key in each)
            for key, value in each.items():
                if key not in NAMES_ADDRESSES:
                    assert "://" not in value, (name, key, value)
        assert "url(" not in _styles(found).replace("url(#", "")
        assert "@import" not in found.text[: found.text.index("</style>")]


def _styles(found: Page) -> str:
    return " ".join(each.get("style", "") for _, each in found.elements)


def test_the_policy_names_each_script_and_no_host(compared: Page) -> None:
    (policy,) = (
        each["content"]
        for name, each in compared.elements
        if each.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "://" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", compared.text, re.S)
    drawing = re.search(
        r'<script type="text/plain" id="drawing">(.*?)</script>', compared.text, re.S
    )
    assert drawing is not None
    for script in (*scripts, drawing[1]):
        digest = base64.b64encode(sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.count("sha256-") == len(scripts) + 1
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_markup_is_closed_and_ids_stand_once(compared: Page, static: Page) -> None:
    for found in (compared, static):
        assert not found.unclosed
        ids = found.ids()
        assert len(ids) == len(set(ids))
        anchors = {each["href"][1:] for n, each in found.elements if n == "a"}
        assert {each.key for each in RUN_SECTIONS if not each.is_needed} == anchors
        assert anchors <= set(ids)


def test_headings_tables_and_figures_say_what_they_are(compared: Page) -> None:
    names = [name for name, _ in compared.elements]
    assert names.count("h1") == 1
    assert names.count("h2") == sum(not each.is_needed for each in RUN_SECTIONS)
    assert names.count("caption") == names.count("table") > 8
    assert names.count("figcaption") == names.count("figure") >= 10
    for name, each in compared.elements:
        if name == "th":
            assert each["scope"] in {"col", "row"}
        if "plot" in each.get("class", "").split():
            assert each["aria-label"]
        if name == "section":
            assert each["aria-labelledby"] in compared.ids()
    assert ("html", {"lang": "en"}) in compared.elements


def test_static_pages_show_the_same(compared: Page, static: Page) -> None:
    for number in (1, 2, 3):
        assert static.data(number) == compared.data(number)
    drawn = [e["id"] for n, e in static.elements if "still" in e.get("class", "")]
    assert drawn == [f"plot-{key}" for key in compared.figures]
    static_words = static.visible
    for words in compared.words:
        said = words.replace("Drag to zoom", "").strip()
        if said and "double-click" not in said:
            assert " ".join(said.split()) in static_words
    assert "Drag" not in static_words


def test_static_figures_follow_the_palette(static: Page) -> None:
    begin = static.text.index("<main>")
    colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", static.text[begin:]))
    assert not colours
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", static.text[begin:]))
    assert used <= set(LIGHT)
    assert {"run-1", "run-2", "run-3", "ink", "muted", "rule"} <= used


def test_colours_of_light_and_dark_mean_the_same() -> None:
    assert set(LIGHT) == set(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT)
    for palette in (LIGHT, DARK):
        for name, colour in palette.items():
            least = {"ink": 7.0, "muted": 4.5, "link": 4.5}.get(name, 0.0)
            if name.startswith("run-"):
                least = 3.0  # WCAG 2.2, non-text contrast
            assert _contrast(colour, palette["ground"]) >= least, name


def _contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2.2."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_eight_runs_look_different() -> None:
    looks = {(LIGHT[f"run-{n + 1}"], SYMBOLS[n % 4]) for n in range(8)}
    assert len(looks) == 8


def test_words_of_users_are_only_shown(crowded_run: Path, tmp_path: Path) -> None:
    evil = tmp_path / EVIL.replace("/", "_")
    shutil.copytree(crowded_run, evil)
    other = tmp_path / "other"
    shutil.copytree(crowded_run, other)
    for directory in (evil, other):
        summary = json.loads((directory / "summary.json").read_text())
        summary["title"] = EVIL
        summary["warnings"] = [EVIL]
        summary["capacity"]["model"] = EVIL
        summary["capacity"]["gpu"] = EVIL
        summary["cost"]["kind"] = EVIL
        (directory / "summary.json").write_text(json.dumps(summary))
        config = directory / "config.yaml"
        config.write_text(config.read_text() + f"note: {json.dumps(EVIL)}\n")
    for is_static, directories in ((True, (evil,)), (False, (evil, other))):
        found = page_of(*directories, is_static=is_static)
        names = [name for name, _ in found.elements]
        assert names.count("script") == (1 if is_static else 4)
        assert "img" not in names
        assert EVIL in found.visible
    figures = json.dumps(page_of(evil, other).figures)
    assert "<script" not in figures
    assert "<img" not in figures


@pytest.mark.slow
@pytest.mark.parametrize("is_static", [False, True])
def test_the_same_results_give_the_same_bytes(
    swapping_run: Path, *, is_static: bool
) -> None:
    program = (
        "import sys; from pathlib import Path; from sim.views.report import build_page;"
        "sys.stdout.buffer.write(build_page([Path(sys.argv[1])],"
        f" is_static={is_static}).encode())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program, str(swapping_run)],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    ).stdout
    assert elsewhere == build_page([swapping_run], is_static=is_static).encode()


@pytest.mark.slow
def test_without_plotly_the_page_is_drawn_as_svg(
    plain_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert plotly_charts.plotly_script() is None
    assert build_page([plain_run]) == build_page([plain_run], is_static=True)


def test_plotly_is_not_imported_until_a_page_is_drawn() -> None:
    program = (
        "import sys, sim.views.report, sim.cli.report; print('plotly' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == "False"


def test_few_of_many_preemptions_are_named_and_all_are_counted(
    crowded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.views.report.sections.cache.MAX_SHOWN", 30)
    monkeypatch.setattr("sim.views.report.sections.cache._LEAST_SHOWN", 10)
    assert (num_shown(1), num_shown(2), num_shown(8)) == (30, 15, 10)
    found = page_of(crowded_run)
    marks = [
        trace
        for trace in found.figures["kv-cache-usage"]["data"]
        if trace.get("mode") == "markers"
    ]
    assert sum(len(trace["x"]) for trace in marks) == 30
    number = dict(found.data())["num_preemptions"]
    assert f"30 of {number} preemptions are marked" in found.visible
    lost = [
        int(re.search(r": ([\d,]+) tokens? lost", text)[1].replace(",", ""))  # type: ignore[index]
        for trace in marks
        for text in trace["customdata"]
    ]
    assert min(lost) > 0


def test_an_empty_page_is_a_page() -> None:
    found = Page(page("T<", Markup(), [Part("a", "A&B", ())], SvgFigures()))
    assert not found.unclosed
    assert found.visible.startswith("T<")
    assert "A&B" in found.visible
