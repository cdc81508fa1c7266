"""Inter-token latencies without a value a token, against a value a token."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.results import schema
from sim.results.recording.requests import RequestRows
from sim.results.recording.tokens import InterTokenLatencies, Streaks, token_times
from sim.results.schema import PERCENTILES
from sim.results.tables.percentiles import percentiles
from sim.results.tables.steps import FrameSteps
from sim.scheduler.request import RequestStatus
from tests.sim.build import request_from_spec, spec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

NUM_STEPS = 40
PERCENTS = (0, 12.5, *PERCENTILES, 100)

requests = st.lists(
    st.lists(st.integers(0, NUM_STEPS - 1), min_size=1, max_size=30, unique=True),
    max_size=10,
)
"""The steps that gave a token to each request."""


def streaks_of(steps: list[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive steps."""
    found: list[tuple[int, int]] = []
    for step in sorted(steps):
        if found and found[-1][1] == step - 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


@given(requests, st.randoms(use_true_random=False), st.integers(1, 9))
def test_latencies_and_times_of_tokens(
    tokens: list[list[int]], random: Random, batch_rows: int
) -> None:
    latency_s = np.array([random.choice([0.5, 0.1, 0.123, 7.0]) for _ in range(40)])
    end_s = np.cumsum(latency_s + 0.25)
    start_s = end_s - latency_s
    steps = FrameSteps(pd.DataFrame({"start_s": start_s, "latency_s": latency_s}))
    end_s = start_s + latency_s  # as every reader of the table takes it
    ids = list(range(len(tokens)))
    random.shuffle(ids)
    streaks = Streaks()
    half = len(ids) // 2
    for some in (slice(0, half), slice(half, None)):
        rows = [
            (owner, *streak)
            for owner, each in zip(ids[some], tokens[some], strict=True)
            for streak in streaks_of(each)
        ]
        streaks.add(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr("sim.results.tables.steps.BATCH_ROWS", batch_rows)
        patch.setattr("sim.results.recording.tokens.BATCH_ROWS", batch_rows)
        patch.setattr("workloads.requests.long_arrays.SPILLED_BYTES", batch_rows * 16)
        itl = InterTokenLatencies(steps, streaks)
        expected = [np.diff(end_s[sorted(each)]) for each in tokens]
        every = np.sort(np.concatenate([np.zeros(0), *expected]))
        for _ in range(2):  # the second time from what was kept
            spread = np.repeat(itl.values_s, itl.weights)
            assert np.sort(spread).tolist() == every.tolist()
        batches = list(token_times(steps, streaks, Path(name), batch_rows))
        number, mean, std = itl.moments
        assert number == len(every)
        if number:
            assert mean == pytest.approx(every.mean(), rel=1e-12)
            assert std == pytest.approx(every.std(), rel=1e-9, abs=1e-12)
            assert itl.percentiles(PERCENTS) == pytest.approx(
                np.percentile(every, PERCENTS), rel=1e-12
            )
    assert {len(batch["time_s"]) for batch in batches[:-1]} <= {batch_rows}
    columns = {
        name: np.concatenate([np.zeros(0), *(batch[name] for batch in batches)])
        for name in schema.ITL
    }
    by_id = sorted(zip(ids, tokens, strict=True))
    assert columns["time_s"].tolist() == [
        time_s for _, each in by_id for time_s in end_s[sorted(each)].tolist()
    ]
    assert columns["request_id"].tolist() == [i for i, each in by_id for _ in each]
    assert columns["token_index"].tolist() == [
        k + 1 for _, each in by_id for k in range(len(each))
    ]


values = st.one_of(
    st.floats(0, 1e300, allow_nan=False),
    st.sampled_from([0.0, 1.0, 1.0 + 2**-52, 1.0 + 2**-40, 5e-324]),
)


@given(
    st.lists(
        st.lists(st.tuples(values, st.integers(0, 4)), max_size=12),
        min_size=1,
        max_size=4,
    ).filter(lambda batches: any(w for rows in batches for _, w in rows)),
    st.integers(0, 6),
)
def test_percentiles_of_many_values_are_narrowed_down_to_the_exact_ones(
    raw: list[list[tuple[float, int]]], max_num_sorted: int
) -> None:
    batches = [
        (
            np.array([value for value, _ in rows], dtype=np.float64),
            np.array([weight for _, weight in rows], dtype=np.int64),
        )
        for rows in raw
    ]
    num_reads = 0

    def read() -> Iterable[tuple[np.ndarray, np.ndarray]]:
        nonlocal num_reads
        num_reads += 1
        return iter(batches)

    narrowed = percentiles(read, PERCENTS, max_num_sorted)
    assert num_reads <= 6
    whole = percentiles(lambda: batches, PERCENTS)
    assert narrowed == whole
    repeated = np.concatenate([np.repeat(*batch) for batch in batches])
    exact = np.percentile(repeated, PERCENTS)
    assert whole == pytest.approx(exact, rel=1e-9, abs=1e-300)


def test_a_run_goes_on_over_a_call_that_made_no_step() -> None:
    """A hosted engine may pass a request over in a call that schedules nothing."""
    rows = RequestRows()
    for request_id, streaks in enumerate(([(3, 4), (5, 5), (8, 9)], [(2, 6)])):
        request = request_from_spec(spec(request_id, 0.0, 5, 9), 100)
        request.status = RequestStatus.FINISHED_STOPPED
        request.streaks = streaks
        rows.add([request])
    rows.table()
    found = rows.streaks
    assert found.owner.tolist() == [0, 0, 1]
    assert found.begin.tolist() == [3, 8, 2]
    assert found.end.tolist() == [5, 9, 6]
