"""Where the words of figures stand: none is cut, none beyond the edge or on another."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from matplotlib.legend import Legend
from matplotlib.text import Text

from sim import Results
from sim.hardware.models.bundled import bundled_models
from sim.views.plots import FIGURES
from sim.views.plots.compared.overlays import OVERLAYS
from sim.views.plots.compared.runs import Run
from sim.views.plots.run.tables import Tables
from sim.views.plots.style import to_png

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

LONGEST = max(bundled_models(), key=len)
TITLE = (
    f"{LONGEST}, 8 x rtx_pro_6000_server (tensor parallel), v1 of vLLM 0.33.0, "
    "12,345 of 12,345 requests at 123.4 requests/s"
)


def words_of(figure: Figure) -> list[Text]:
    """Return the words of a figure that are drawn, those of its legends included."""
    to_png(figure)
    undrawn = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    undrawn |= {id(tick.label1), id(tick.label2)}
    return [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text)
        and text.get_visible()
        and text.get_text().strip()
        and id(text) not in undrawn
    ]


def check(figure: Figure) -> None:
    """Words are whole and inside; titles and legends stand on no other words."""
    words = words_of(figure)
    width, height = figure.bbox.width, figure.bbox.height
    for text in words:
        box = text.get_window_extent()
        assert "…" not in text.get_text()
        assert box.x0 >= -1 and box.x1 <= width + 1, text.get_text()  # noqa: PT018
        assert box.y0 >= -1 and box.y1 <= height + 1, text.get_text()  # noqa: PT018
    framed = [*figure.texts]
    for axes in figure.axes:  # titles of panels, which are no texts of theirs
        beside = {id(text) for text in axes.texts}
        framed += [
            each
            for each in axes.get_children()
            if isinstance(each, Text) and id(each) not in beside
        ]
    for legend in figure.findobj(Legend):
        assert isinstance(legend, Legend)
        framed += legend.get_texts()
    for one, other in combinations(framed, 2):
        if one.get_text().strip() and other.get_text().strip():
            shared = one.get_window_extent().padded(-1.5)
            apart = not shared.overlaps(other.get_window_extent().padded(-1.5))
            assert apart, (one.get_text(), other.get_text())


@pytest.fixture(scope="module")
def runs(two_runs: list[Path]) -> list[Run]:
    """Two runs of the longest names that there are."""
    loaded = [Tables.of(Results.load(path)) for path in two_runs]
    found = [
        Tables(t.steps, t.requests, t.preemptions, {**t.summary, "title": TITLE})
        for t in loaded
    ]
    differs = "they differ in gpu, tensor_parallel_size, max_num_batched_tokens"
    return [
        Run(f"num_gpu_blocks_override={n}, max_num_batched_tokens=8192", each, differs)
        for n, each in zip((1_000_020, 1_000_040), found, strict=True)
    ]


@pytest.mark.parametrize("name", OVERLAYS)
def test_words_of_compared_runs(name: str, runs: list[Run]) -> None:
    check(OVERLAYS[name](runs))


@pytest.mark.parametrize("name", FIGURES)
def test_words_of_a_run(name: str, runs: list[Run]) -> None:
    check(FIGURES[name](runs[0].tables))
