"""Summary numbers against numpy on data spelled out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.results.metrics import distribution_ms
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
