from __future__ import annotations

import numpy as np
import pytest
from matplotlib.markers import CARETDOWN

from sim.views.plots import FIGURES, Tables
from sim.views.plots.style import time_unit
from tests.sim.views.plots.tables import (
    legend_of,
)


def test_preemptions_are_marked_where_they_were(full_run: Tables) -> None:
    figure = FIGURES["kv_cache_usage"](full_run)
    (marks,) = (line for line in figure.axes[0].lines if line.get_marker() == CARETDOWN)
    x, y = (np.asarray(values, dtype=np.float64) for values in marks.get_data())
    seconds, _ = time_unit(full_run.stop_s)
    table = full_run.preemptions
    assert x.size <= 800
    assert set(np.round(x * seconds, 6)) <= set(np.round(table["time_s"], 6))
    assert y.max() == pytest.approx(100.0 * table["kv_cache_usage_before"].max())
    assert y.min() == pytest.approx(100.0 * table["kv_cache_usage_before"].min())
    assert any(f"{len(table):,} preemptions" in text for text in legend_of(figure))
