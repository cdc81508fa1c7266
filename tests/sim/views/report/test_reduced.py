"""The steps, reduced: nothing that a reader would miss is lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from sim.costs.base import STEP_PARTS
from sim.results.tables.steps import FrameSteps, ParquetSteps
from sim.views.report.reduced import (
    AVERAGES,
    COLUMNS,
    FULL,
    NUM_COARSE,
    NUM_FINE,
    STATES,
    Limits,
    Reduced,
    reduce_steps,
)

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = Limits(max_num_seqs=20, max_num_batched_tokens=100)


def steps_of(number: int, seed: int = 1) -> pd.DataFrame:
    """Steps with pauses between some of them."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {name: random.integers(0, 30, number).astype(float) for name in COLUMNS}
    )
    for name in STEP_PARTS:
        frame[name] = random.uniform(0.001, 0.01, number)
    frame["latency_s"] = frame[list(STEP_PARTS)].sum(axis=1)
    pauses_s = np.where(random.random(number) < 0.1, 0.3, 0.0)
    frame["start_s"] = (frame["latency_s"] + pauses_s).cumsum() - frame["latency_s"]
    frame["kv_cache_usage"] = random.random(number)
    frame["num_batched_tokens"] = random.integers(50, 120, number).astype(float)
    frame["num_prefill_tokens"] = random.integers(0, 50, number).astype(float)
    return frame


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return steps_of(70_000)  # more than a batch


@pytest.fixture(scope="module")
def reduced(frame: pd.DataFrame) -> Reduced:
    return reduce_steps(FrameSteps(frame), LIMITS)


def test_highest_and_lowest_values_are_kept(
    frame: pd.DataFrame, reduced: Reduced
) -> None:
    for name in STATES:
        state = reduced.states[name]
        assert state.mean.size == NUM_FINE
        assert state.high.max() == frame[name].max()
        assert (state.low <= state.mean).all()
        assert (state.mean <= state.high).all()


def test_a_single_step_at_the_top_is_seen() -> None:
    frame = steps_of(200_000)
    frame["kv_cache_usage"] = 0.5
    frame.loc[123_456, "kv_cache_usage"] = 1.0
    reduced = reduce_steps(FrameSteps(frame), LIMITS)
    high = reduced.states["kv_cache_usage"].high
    at = int(frame.loc[123_456, "start_s"] / reduced.fine_s)
    assert high[at] == 1.0
    assert np.count_nonzero(high == 1.0) <= 2


def test_means_over_time_are_those_of_the_steps(
    frame: pd.DataFrame, reduced: Reduced
) -> None:
    for name in STATES:
        found = reduced.states[name].mean.mean() * reduced.stop_s
        whole = (frame[name] * frame["latency_s"]).sum()
        assert found == pytest.approx(whole, rel=1e-9)


def test_means_over_steps_weighed_by_their_number(
    frame: pd.DataFrame, reduced: Reduced
) -> None:
    borders = np.linspace(0.0, reduced.stop_s, NUM_COARSE + 1)
    column = np.searchsorted(borders, frame["start_s"], "right") - 1
    for name in AVERAGES:
        expected = frame[name].groupby(column).mean()
        found = reduced.averages[name].mean[expected.index]
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_waiting_is_shared_out_completely(
    frame: pd.DataFrame, reduced: Reduced
) -> None:
    f, waits = frame, reduced.waits
    waited_s = f["num_waiting"] * f["latency_s"]
    at_seqs = f["num_running"] >= LIMITS.max_num_seqs
    at_tokens = (f["num_batched_tokens"] >= 99) & ~at_seqs
    assert waits.for_seqs_s == pytest.approx(waited_s[at_seqs].sum())
    assert waits.for_tokens_s == pytest.approx(waited_s[at_tokens].sum())
    assert waits.total_s == pytest.approx(waited_s.sum())
    full = f["kv_cache_usage"] >= FULL
    assert waits.full_s == pytest.approx(f["latency_s"][full].sum())


def test_parts_add_up_to_the_steps(reduced: Reduced) -> None:
    parts = sum(reduced.seconds[name] for name in STEP_PARTS)
    assert parts == pytest.approx(reduced.seconds["latency_s"], rel=1e-9)
    stacked = sum(reduced.averages[name].mean for name in STEP_PARTS)
    np.testing.assert_allclose(stacked, reduced.averages["latency_s"].mean, rtol=1e-9)


def test_no_steps_at_all() -> None:
    reduced = reduce_steps(FrameSteps(steps_of(0)), LIMITS, after_s=3.0)
    assert reduced.num_steps == 0
    assert reduced.stop_s == 3.0
    assert not reduced.states["num_running"].high.any()


def test_of_a_run_the_means_are_those_of_its_summary(crowded_run: Path) -> None:
    summary = json.loads((crowded_run / "summary.json").read_text())
    limits = Limits(summary["max_num_seqs"], summary["max_num_batched_tokens"])
    reduced = reduce_steps(ParquetSteps(crowded_run / "steps.parquet"), limits)
    for name in ("kv_cache_usage", "num_running", "num_waiting"):
        found = reduced.states[name].mean.mean() * reduced.stop_s
        told = summary[f"{name}_mean"] * summary["duration"]
        assert found == pytest.approx(told, rel=1e-9)
