from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from matplotlib.markers import CARETDOWN
from matplotlib.patches import StepPatch

from sim.results import schema
from sim.views.plots import FIGURES, Tables
from sim.views.plots.run.preemption import MAX_BARS, bar_edges_s, bar_width_s
from sim.views.plots.style import time_unit
from tests.sim.views.plots.tables import (
    a_run,
    assert_draws,
    empty_run,
    texts_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def counted(figure: Figure, stop_s: float) -> float:
    """Preemptions that the bars stand for: height times width."""
    minutes = time_unit(stop_s)[0] / 60.0
    total = 0.0
    for bar in figure.axes[0].patches:
        assert isinstance(bar, StepPatch)
        values, edges, baseline = bar.get_data()
        total += float((values - baseline) @ np.diff(edges)) * minutes
    return total


def test_bars_and_lines_count_every_preemption(full_run: Tables) -> None:
    figure = FIGURES["preemptions"](full_run)
    total = figure.axes[1]
    assert counted(figure, full_run.stop_s) == pytest.approx(len(full_run.preemptions))
    ends = [np.asarray(line.get_ydata())[-1] for line in total.lines]
    modes = full_run.preemptions["mode"].value_counts()
    assert ends == [modes.sum(), modes["recompute"], modes["swap"]]


@pytest.mark.parametrize(
    ("stop_s", "last_edges_s"),
    [
        (90.0, [88.0, 89.0, 90.0]),
        (89.75, [88.0, 89.0, 89.75]),  # more than half of a bar is one
        (89.25, [87.0, 88.0, 89.25]),  # less goes to the bar before
        (89.0 + 1e-9, [87.0, 88.0, 89.0 + 1e-9]),
        (0.25, [0.0, 0.25]),
        (95.0, [92.0, 94.0, 95.0]),
    ],
)
def test_the_last_bar_ends_with_the_run(
    stop_s: float, last_edges_s: list[float]
) -> None:
    """A preemption every 50 ms is 1200 per minute, in the last bar too."""
    edges_s = bar_edges_s(stop_s)
    assert edges_s[-3:].tolist() == pytest.approx(last_edges_s)
    assert edges_s[-1] == stop_s
    time_s = np.arange(0.025, stop_s, 0.05)
    steps = pd.DataFrame({"start_s": [0.0], "latency_s": [stop_s]})
    steps = steps.reindex(columns=list(schema.STEPS), fill_value=0.0)
    preemptions = pd.DataFrame({"time_s": time_s, "mode": "recompute"})
    tables = Tables(steps, pd.DataFrame(), preemptions, {})
    (bar,) = FIGURES["preemptions"](tables).axes[0].patches
    assert isinstance(bar, StepPatch)
    assert bar.get_data()[0] == pytest.approx(1200.0, rel=1e-6)


def test_preemptions_counted_but_not_recorded_are_named() -> None:
    t = empty_run()
    tables = Tables(t.steps, t.requests, t.preemptions, {"num_preemptions": 12})
    texts = texts_of(FIGURES["preemptions"](tables))
    assert "12 preemptions, none of them in the table" in texts


def test_all_preemptions_at_one_time() -> None:
    t = a_run(5_000)
    now = t.preemptions.assign(time_s=t.stop_s, kv_cache_usage_before=1.0)
    tables = Tables(t.steps, t.requests, now, {})
    figures = assert_draws(tables)
    (marks,) = (
        x
        for x in figures["kv_cache_usage"].axes[0].lines
        if x.get_marker() == CARETDOWN
    )
    assert np.size(marks.get_xdata()) <= 2
    drawn = counted(figures["preemptions"], tables.stop_s)
    assert drawn == pytest.approx(len(now))


@pytest.mark.parametrize("stop_s", [0.003, 1.0, 59.0, 3600.0, 86_400.0, 3e7, 3e9])
def test_bars_are_few_and_round(stop_s: float) -> None:
    assert stop_s / bar_width_s(stop_s) <= MAX_BARS * (1 + 1e-9)
    assert len(bar_edges_s(stop_s)) <= MAX_BARS + 1
