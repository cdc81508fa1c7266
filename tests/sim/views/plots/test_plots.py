from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from sim.results.tables.steps import ParquetSteps
from sim.views.plots import FIGURES, Tables, to_png
from sim.views.plots.output import write_pngs
from tests.sim.views.plots.tables import (
    a_run,
    assert_draws,
    drawn_span,
    empty_run,
    pixels_of,
    texts_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@pytest.fixture(scope="module")
def written(full_run: Tables, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    t = full_run
    out = tmp_path_factory.mktemp("plots") / "new" / "figures"
    return write_pngs(FIGURES, t, out)


def test_every_figure_is_written_and_shows_something(written: list[Path]) -> None:
    assert [path.name for path in written] == [
        "kv_cache_usage.png",
        "queues.png",
        "preemptions.png",
        "steps.png",
        "latency_cdfs.png",
        "fragmentation.png",
    ]
    for path in written:
        grey = pixels_of(path.read_bytes())
        assert grey.shape == (900, 1600)
        assert grey.std() > 5.0
        edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        assert (edge == 255.0).all(), f"{path.name} is cut off at its edge"


def test_same_tables_give_the_same_bytes(
    full_run: Tables, written: list[Path], tmp_path: Path
) -> None:
    t = full_run
    again = write_pngs(FIGURES, t, tmp_path)
    for one, other in zip(written, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_tables_may_lie_on_disk_or_be_mere_arrays(
    full_run: Tables, written: list[Path], tmp_path: Path
) -> None:
    t = full_run
    t.steps.to_parquet(tmp_path / "steps.parquet", index=False)
    requests, preemptions = (
        {name: table[name].to_numpy() for name in table}
        for table in (t.requests, t.preemptions)
    )
    steps = ParquetSteps(tmp_path / "steps.parquet")
    again = write_pngs(
        FIGURES, Tables(steps, requests, preemptions, t.summary), tmp_path
    )
    for one, other in zip(written, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


class ShortBatches:
    """Steps in batches of a few hundred."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.kinds = dict.fromkeys(frame, "")
        self.num_steps = len(frame)
        self._frame = frame

    def batches(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        for begin in range(0, self.num_steps, 333):
            rows = self._frame[begin : begin + 333]
            yield {name: rows[name].to_numpy() for name in columns}


def test_batches_do_not_show(full_run: Tables) -> None:
    t = full_run
    short = ShortBatches(t.steps)
    cut = Tables(short, t.requests, t.preemptions, t.summary).curves
    for kind in ("state", "pixels", "bins"):
        for name, envelope in getattr(t.curves, kind).items():
            other = getattr(cut, kind)[name]
            np.testing.assert_array_equal(envelope.low, other.low)
            np.testing.assert_array_equal(envelope.high, other.high)
            np.testing.assert_allclose(envelope.mean, other.mean, rtol=1e-9)
    for name, means in t.curves.step_means.items():
        np.testing.assert_allclose(means.mean, cut.step_means[name].mean, rtol=1e-9)
    for name, medians in t.curves.medians.items():
        np.testing.assert_array_equal(medians.median, cut.medians[name].median)
    for name, total in t.curves.totals.items():
        assert dataclasses.astuple(cut.totals[name]) == pytest.approx(
            dataclasses.astuple(total), rel=1e-12
        )


def test_png_names_no_software_and_no_date(full_run: Tables) -> None:
    png = to_png(FIGURES["queues"](full_run))
    assert set(Image.open(io.BytesIO(png)).info) <= {"dpi"}


def test_style_of_the_user_does_not_show(full_run: Tables) -> None:
    plain = to_png(FIGURES["queues"](full_run))
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 9, "savefig.dpi": 50}):
        assert to_png(FIGURES["queues"](full_run)) == plain


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_states_its_unit(full_run: Tables, name: str) -> None:
    figure = FIGURES[name](full_run)
    bottom = [axes for axes in figure.axes if axes.get_xlabel()]
    assert bottom
    units = ("(s)", "(ms)", "(min)", "(h)", "(%)", "(requests)", "(tokens)")
    more = (*units, "(number)", "tokens per step", "per minute (in bins of")
    for axes in bottom:
        assert axes.get_xlabel().endswith(units)
    shown = [axes.get_ylabel() for axes in figure.axes]
    if name == "latency_cdfs":
        shown = shown[:1]
    for label in shown:
        assert any(unit in label for unit in more), label


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("kv_cache_usage", {"num_preemptions": "{:,} preemptions"}),
        ("kv_cache_usage", {"kv_cache_usage_mean": "mean {:.1%}"}),
        ("queues", {"completed": "{:,} requests", "rejected": "rejected {:,}"}),
        ("preemptions", {"num_preemptions": "{:,} in all"}),
        ("preemptions", {"num_preemptions_swap": "{:,} by swap"}),
        ("steps", {"num_steps": "{:,} steps", "duration": "{:,.1f} s"}),
        ("latency_cdfs", {"completed": "{:,} completed requests"}),
    ],
)
def test_title_gives_the_numbers_of_the_summary(
    full_run: Tables, name: str, keys: dict[str, str]
) -> None:
    headline, run, *_ = texts_of(FIGURES[name](full_run))
    assert run == full_run.summary["title"]
    for key, text in keys.items():
        assert text.format(full_run.summary[key]).replace("%", " %") in headline


def test_a_single_preemption_is_not_plural(full_run: Tables) -> None:
    summary = dict(full_run.summary) | {"num_preemptions": 1, "duration": 1.0}
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, summary)
    assert texts_of(FIGURES["kv_cache_usage"](tables))[0].endswith("1 preemption")
    assert "1.0 s," in texts_of(FIGURES["steps"](tables))[0]


@pytest.mark.parametrize("name", FIGURES)
def test_all_words_are_inside_and_apart(full_run: Tables, name: str) -> None:
    t = full_run
    big = dict(t.summary) | {"num_gpu_blocks": 9_999_999, "title": "x" * 300}
    steps = t.steps.assign(
        num_running=9_999_999, num_waiting=9_999_999, num_physical_blocks=9_999_999
    )
    many = pd.concat([t.preemptions] * 500, ignore_index=True)
    figure = FIGURES[name](Tables(steps, t.requests, many, big))
    grey = pixels_of(to_png(figure))
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    assert (edge == 255.0).all()
    subtitle = figure.texts[1].get_window_extent()
    for axes in figure.axes:
        if legend := axes.get_legend():
            box = legend.get_window_extent()
            assert 0.0 < box.x0 < box.x1 < 1600.0
            assert box.y1 < subtitle.y0


def test_long_or_dollared_titles_stay_inside(full_run: Tables) -> None:
    summary = dict(full_run.summary) | {"title": "cost $1 $2 " * 40}
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, summary)
    grey = pixels_of(to_png(FIGURES["queues"](tables)))
    assert (grey[:, -8:] == 255.0).all()


def test_extremes_survive_on_the_screen(full_run: Tables) -> None:
    steps = full_run.steps.copy()
    steps.loc[777, "kv_cache_usage"] = 0.0
    steps.loc[9_999, "num_running"] = 9_876
    steps.loc[15_001, "num_waiting"] = 54_321
    steps.loc[4_242, "num_physical_tokens"] = 0
    tables = Tables(steps, full_run.requests, full_run.preemptions, full_run.summary)
    spans = {
        "kv_cache_usage": (0, "GPU blocks", 100.0 * steps["kv_cache_usage"]),
        "queues": (0, "running, min", steps["num_running"]),
        "steps": (0, "min to max", 1e3 * steps["latency_s"]),
        "fragmentation": (0, "room", 16.0 * steps["num_physical_blocks"]),
    }
    for name, (panel, label, raw) in spans.items():
        span = drawn_span(FIGURES[name](tables), panel, label)
        low = raw.min() if name == "steps" else 0.0  # the engine pauses now and then
        assert span == pytest.approx((low, raw.max()), rel=1e-12), name
    waiting = drawn_span(FIGURES["queues"](tables), 1, "waiting, min")
    assert waiting[1] == 54_321
    assert drawn_span(FIGURES["fragmentation"](tables), 1, "empty")[1] == 100.0


def test_empty_tables_say_so() -> None:
    figures = assert_draws(empty_run())
    assert "No preemptions in this run" in texts_of(figures["preemptions"])
    assert "No engine step in this run" in texts_of(figures["kv_cache_usage"])
    assert_draws(Tables(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), {}))


def test_numbers_of_the_summary_may_be_missing_or_nan(full_run: Tables) -> None:
    t = full_run
    silly = {
        "kv_cache_usage_mean": float("nan"),
        "num_preemptions": None,
        "title": None,
    }
    figures = assert_draws(Tables(t.steps, t.requests, t.preemptions, silly))
    assert texts_of(figures["kv_cache_usage"])[:2] == ["KV cache usage", ""]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 2])
def test_few_steps(num_steps: int) -> None:
    t = a_run(200)
    one = Tables(t.steps[:num_steps], t.requests, t.preemptions[:0], t.summary)
    figures = assert_draws(one)
    assert drawn_span(figures["queues"], 0, "running, min")[1] == (
        t.steps["num_running"][:num_steps].max()
    )
