"""Swap or recompute by length: against plain sums, in words, as a picture."""

import io
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sim.costs import MeasuredCost, RooflineCost
from sim.costs.crossover import (
    LAYOUTS,
    Range,
    crossover,
    in_words,
    lengths,
    ranges,
    recompute,
)
from sim.scheduler.batch import BatchShape
from sim.views.plots.studies.crossover import crossings, swap_or_recompute
from sim.views.plots.style import to_png
from tests.sim.costs.test_costs import H200, LLAMA_8B
from tests.sim.costs.test_measured import entry, write

COST = RooflineCost(model=LLAMA_8B, gpu=H200)


def compared(cost=COST, **changes):
    keywords = {"block_size": 16, "max_num_batched_tokens": 8192, "max_tokens": 40_000}
    return crossover(cost, **keywords | changes)


def chunk_s(cost, past, query):
    pairs = query * past + query * (query + 1) // 2
    if query == 1:
        return cost.step(BatchShape(1, past + 1, 0, 0, 0, 0))
    return cost.step(BatchShape(0, 0, 1, query, past + query, pairs))


@pytest.mark.parametrize("budget", [1, 7, 512, 8192])
@pytest.mark.parametrize("num_tokens", [1, 16, 512, 513, 2000])
def test_a_recomputation_is_the_sum_of_its_chunks(budget, num_tokens):
    band, _ = recompute(COST, np.array([num_tokens]), budget)
    starts = range(0, num_tokens, budget)
    total_s = sum(
        chunk_s(COST, past, min(budget, num_tokens - past)).total_s for past in starts
    )
    assert band.seconds[0] == pytest.approx(total_s, rel=1e-12)
    assert band.lo_s[0] == band.seconds[0] == band.hi_s[0]  # no bounds are known


@pytest.mark.parametrize("variant", ["loop", "batch", "kernel"])
def test_a_swap_is_both_transfers_in_the_layout_of_its_engines(variant):
    found = compared()
    place = 99
    moved_s = sum(
        COST.transfer(variant, load=load, layout=LAYOUTS[variant]).at(100).total_s
        for load in (False, True)
    )
    assert found.num_tokens[place] == 1600
    assert found.swaps[variant].band.seconds[place] == pytest.approx(moved_s)
    assert found.swaps[variant].extrapolated


def test_ranges_tell_where_swapping_is_cheaper_and_nowhere_else():
    found = compared()
    for swap in found.swaps.values():
        told = np.zeros(len(found.num_tokens), dtype=bool)
        for part in swap.cheaper:
            told |= (found.num_tokens >= part.first) & (found.num_tokens <= part.last)
        assert (told == (swap.band.seconds < found.recompute.seconds)).all()
    loop = found.swaps["loop"]
    assert len(loop.cheaper) == 2  # short prompts read the weights, long ones square
    assert found.swaps["batch"].cheaper == (Range(16, 40_000),)


def test_slow_calls_make_swapping_dearer_until_the_end():
    slow = RooflineCost(model=LLAMA_8B, gpu=H200, swap_call_s=1e-3)
    found = compared(slow)
    assert found.swaps["loop"].cheaper == ()
    assert found.sentences()["loop"] == "recomputing is cheaper at every length"
    assert list(crossings(found, found.swaps["loop"])) == []


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_ranges_hold_the_true_lengths(cheaper):
    tokens = 16 * np.arange(1, len(cheaper) + 1)
    parts = ranges(np.array(cheaper), tokens)
    told = {n for part in parts for n in range(part.first, part.last + 1, 16)}
    assert told == {n for n, true in zip(tokens.tolist(), cheaper, strict=True) if true}
    assert all(a.last + 16 < b.first for a, b in pairwise(parts))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "nowhere"),
        ((Range(16, 800),), "at every length from 16 to 800 tokens"),
        ((Range(16, 160), Range(320, 800)), "up to 160 tokens and from 320 tokens on"),
        ((Range(32, 48),), "from 32 to 48 tokens"),
    ],
)
def test_words(parts, words):
    assert in_words(parts, 16, 800) == words


def test_many_blocks_are_thinned_out_and_keep_the_ends():
    few, many = lengths(8192), lengths(131_072)
    assert len(few) == 8192
    assert len(many) < 20_000
    assert (many[0], many[-1]) == (1, 131_072)
    assert compared(block_size=1, max_tokens=131_072).num_tokens[-1] == 131_072


@pytest.fixture
def measured(tmp_path):
    return MeasuredCost(
        write(tmp_path / "p.json", entry(LLAMA_8B)), model=LLAMA_8B, gpu=H200
    )


def test_bounds_widen_the_answer(measured):
    found = compared(measured)
    assert found.has_bounds
    for swap in found.swaps.values():
        assert (swap.band.lo_s < swap.band.seconds).all()
        assert (swap.band.hi_s > swap.band.seconds).all()
        inside = {n for part in swap.surely for n in range(part.first, part.last, 16)}
        around = {n for part in swap.possibly for n in range(part.first, part.last, 16)}
        middle = {n for part in swap.cheaper for n in range(part.first, part.last, 16)}
        assert inside <= middle <= around
    assert "within the bounds" in found.sentences()["loop"]
    content = found.to_json(20)
    assert content["has_bounds"] is True
    assert content["swap"]["loop"]["lo_s"][0] < content["swap"]["loop"]["seconds"][0]


@pytest.mark.parametrize("kind", ["roofline", "measured"])
def test_the_figure_names_lines_and_marks_crossings(kind, measured):
    found = compared({"roofline": COST, "measured": measured}[kind])
    figure = swap_or_recompute(found, "a model on a GPU")
    (axes,) = figure.axes
    labels = [line.get_label() for line in axes.get_lines()]
    assert sum(label.startswith("swap by") for label in labels) == 3
    assert "swap by loop (estimate)" in labels
    assert axes.get_xscale() == axes.get_yscale() == "log"
    marks = sum(len(list(crossings(found, swap))) for swap in found.swaps.values())
    assert len(axes.texts) == marks > 0
    assert len(axes.collections) == (4 if found.has_bounds else 0)
    title = figure.texts[0].get_text()
    assert title.startswith("Swapping is cheaper: by ")
    image = Image.open(io.BytesIO(to_png(figure)))
    assert image.size == (1600, 900)


def test_pictures_of_another_size_keep_it():
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(4, 3), dpi=150)
    FigureCanvasAgg(figure)
    assert Image.open(io.BytesIO(to_png(figure))).size == (600, 450)
