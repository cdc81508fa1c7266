"""Summary numbers against numpy on data spelled out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.results.metrics import distribution_ms, in_words
from sim.results.schema import LATENCIES, SHOWN_STATISTICS
from sim.results.summary.rows import latency_rows
from sim.results.tables.percentiles import percentiles

pairs = st.lists(
    st.tuples(st.floats(0, 100, allow_nan=False), st.integers(0, 5)),
    min_size=1,
    max_size=20,
).filter(lambda rows: any(weight for _, weight in rows))


@given(pairs, st.floats(0, 100))
def test_weighted_percentiles_equal_numpys_on_repeated_values(
    rows: list[tuple[float, int]], percent: float
) -> None:
    values = np.array([value for value, _ in rows])
    weights = np.array([weight for _, weight in rows])
    expected = np.percentile(np.repeat(values, weights), percent)
    (found,) = percentiles(lambda: [(values, weights)], [percent])
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="percentile of nothing"):
        percentiles(lambda: [(np.array([1.0]), np.array([0]))], [50])


def test_a_distribution_leaves_out_what_was_not_measured() -> None:
    numbers = distribution_ms("ttft", np.array([0.001, np.nan, 0.003]))
    assert numbers["mean_ttft_ms"] == pytest.approx(2.0)
    assert numbers["p99_ttft_ms"] == pytest.approx(2.98)
    assert distribution_ms("tpot", np.array([np.nan]))["p50_tpot_ms"] is None


def test_long_times_are_told_in_seconds() -> None:
    assert in_words([12.3, 99_999.0], 0) == (["12", "99,999"], "ms")
    assert in_words([12.3, 100_000.0], 0) == (["0", "100"], "s")
    assert in_words([4.5e6, None], 1) == (["4,500.0", "-"], "s")
    assert in_words([None], 1) == (["-"], "ms")
    shown = [f"{each}_{of}_ms" for of in LATENCIES for each in SHOWN_STATISTICS]
    summary = dict.fromkeys(shown, 25.0) | {"p99_e2el_ms": 5.2e6}
    *others, last = latency_rows(summary)
    assert others[0] == ("TTFT", "25.0", "25.0", "25.0", "25.0", "25.0")
    assert last == ("E2E (s)", "0.0", "0.0", "0.0", "0.0", "5,200.0")
