from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import StepPatch

from sim.results import schema
from sim.views.plots import FIGURES, Tables
from sim.views.plots.run.curves import NUM_BINS
from tests.sim.views.plots.tables import (
    PARTS,
    a_run,
    assert_draws,
    empty_run,
    legend_of,
    texts_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def test_cpu_usage_is_drawn_only_if_blocks_were_swapped(full_run: Tables) -> None:
    without = a_run(2_000)
    assert "CPU blocks, mean" in legend_of(FIGURES["kv_cache_usage"](full_run))
    assert "CPU blocks, mean" not in legend_of(FIGURES["kv_cache_usage"](without))
    assert len(FIGURES["queues"](full_run).axes[0].patches) == 4
    assert len(FIGURES["queues"](without).axes[0].patches) == 2


def test_wide_ranges_are_logarithmic(full_run: Tables) -> None:
    ttft, tpot, _ = FIGURES["latency_cdfs"](full_run).axes
    assert (ttft.get_xscale(), tpot.get_xscale()) == ("log", "linear")
    assert FIGURES["steps"](full_run).axes[0].get_yscale() == "linear"
    steps = full_run.steps.copy()
    steps.loc[500, "latency_s"] = 60.0
    steps["start_s"] += np.where(steps.index > 500, 60.0, 0.0)
    slow = Tables(steps, full_run.requests, full_run.preemptions, full_run.summary)
    assert FIGURES["steps"](slow).axes[0].get_yscale() == "log"


def test_a_cost_model_without_parts() -> None:
    t = a_run(500)
    nothing = dict.fromkeys(schema.STEPS.keys() & set(PARTS), 0.0)
    tables = Tables(t.steps.assign(**nothing), t.requests, t.preemptions, t.summary)
    assert "The cost model gives no parts" in texts_of(FIGURES["steps"](tables))


def heights_of(axes: Axes, label: str) -> Any:
    (line,) = (
        patch for patch in axes.patches if str(patch.get_label()).startswith(label)
    )
    assert isinstance(line, StepPatch)
    return line.get_data()[0]


def test_tokens_per_step_are_tokens_over_steps(full_run: Tables) -> None:
    """Long prefill steps weigh no more than the short decode steps around them."""
    steps = full_run.steps
    edges_s = np.linspace(0.0, full_run.stop_s, NUM_BINS + 1)
    column = np.searchsorted(edges_s, steps["start_s"], "right") - 1
    table = pd.DataFrame(
        {
            "prefill": steps["num_prefill_tokens"],
            "decode": steps["num_batched_tokens"] - steps["num_prefill_tokens"],
        }
    )
    expected = table.groupby(column).mean()
    assert len(expected) > 0.95 * NUM_BINS  # the engine idles in the others
    figure = FIGURES["steps"](full_run)
    for name in table:
        drawn = heights_of(figure.axes[2], str(name))
        assert drawn.size == NUM_BINS
        np.testing.assert_allclose(drawn[expected.index], expected[name])
        (label,) = (t for t in legend_of(figure) if t.startswith(f"{name}, mean"))
        assert f"{table[name].mean():,.4g} over all" in label


def test_decodes_are_readable_beside_prefills(full_run: Tables) -> None:
    batch = FIGURES["steps"](full_run).axes[2]
    low, high = batch.transAxes.inverted().transform(
        batch.transData.transform([(0.0, 0.0), (0.0, 240.0)])
    )[:, 1]
    assert low == pytest.approx(0.0)
    assert 0.3 < high < 0.95
    ticks = [label.get_text() for label in batch.get_yticklabels()]
    assert ticks[0] == "0"
    assert {"100", "1,000"} <= set(ticks)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (8192, 0)])
def test_any_batch_has_an_axis(prefill: int, decode: int) -> None:
    t = a_run(300)
    steps = t.steps.assign(
        num_prefill_tokens=prefill, num_batched_tokens=prefill + decode
    )
    tables = Tables(steps, t.requests, t.preemptions, t.summary)
    batch = assert_draws(tables)["steps"].axes[2]
    assert batch.get_ylim()[0] == 0.0
    assert batch.get_ylim()[1] > max(prefill, decode)


def test_swapped_requests_are_named_even_where_there_were_none() -> None:
    assert "swapped: none" in legend_of(FIGURES["queues"](a_run(2_000)))
    swapped = FIGURES["queues"](a_run(2_000, modes=("swap",)))
    assert "swapped: none" not in legend_of(swapped)
    assert "swapped, mean" in legend_of(swapped)
    assert "swapped: none" not in legend_of(FIGURES["queues"](empty_run()))
