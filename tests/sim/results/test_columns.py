"""Columns that grow, in memory and in files."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.results.recording import requests
from sim.results.tables import columns
from sim.results.tables.columns import Columns
from sim.simulation.simulate import simulate
from tests.sim.commands import files
from tests.sim.studies.sweeps.files import tiny
from workloads import workload
from workloads.arrivals import base as arrivals
from workloads.requests import long_arrays

if TYPE_CHECKING:
    from pathlib import Path

INTEGERS = st.integers(-5, 5) | st.integers(-(2**40), 2**40)


@given(
    chunks=st.lists(st.lists(INTEGERS, max_size=9), max_size=40),
    most_bytes=st.sampled_from([1, 64, 300, 1 << 23]),
)
def test_a_column_is_what_was_added(chunks: list[list[int]], most_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "SPILLED_BYTES", most_bytes)
        patch.setattr(columns, "_FIRST_ROWS", 4)
        grown = Columns({"number": "int64", "time_s": "float64"})
        expected: list[int] = []
        for chunk in chunks:
            numbers = np.array(chunk, np.int64)
            grown.add({"number": numbers, "time_s": numbers / 3})
            expected += chunk
            if len(expected) % 3 == 0:
                assert grown.values("number").tolist() == expected
        assert grown.pop("time_s").tolist() == [number / 3 for number in expected]
        assert grown.pop("number").tolist() == expected


def test_a_run_with_long_columns_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("in memory", "in files"):
        out = tmp_path / "not yet there" / name
        simulate(parse_config(tiny())).write(out)
        monkeypatch.setattr(columns, "SPILLED_BYTES", 16)
        monkeypatch.setattr(columns, "_FIRST_ROWS", 2)
        monkeypatch.setattr(long_arrays, "SPILLED_BYTES", 16)
        monkeypatch.setattr(long_arrays, "PART_ROWS", 3)
        monkeypatch.setattr(arrivals, "PART_ROWS", 3)
        monkeypatch.setattr(workload, "_DRAWN_ROWS", 4)
        monkeypatch.setattr(requests, "_CHUNK_ROWS", 2)
        monkeypatch.setattr(requests, "_LEAST_CHUNK_ROWS", 2)
    assert files(out) == files(out.parent / "in memory")


TIMES = st.lists(st.integers(0, 30), max_size=40).map(
    lambda numbers: np.sort(np.array(numbers, np.float64) / 7)
)


@given(came_s=TIMES, share=st.floats(0, 1), most=st.sampled_from([1, 2, 5, 100]))
def test_occupancy_is_the_integral_of_what_is_there(
    came_s: np.ndarray, share: float, most: int
) -> None:
    gone_s = np.sort(came_s[: int(share * len(came_s))] + 1.7)
    now_s = 9.5
    events = [(time_s, 1) for time_s in came_s] + [(time_s, -1) for time_s in gone_s]
    events = [*sorted(events, key=lambda event: event[0]), (now_s, 0)]
    occupancy_s, num_there = 0.0, 0
    for (time_s, change), (next_s, _) in pairwise(events):
        num_there += change
        occupancy_s += num_there * (next_s - time_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "_NUM_SORTED", most)
        found_s = requests._occupancy_s(came_s, gone_s, now_s)
    assert found_s == occupancy_s
