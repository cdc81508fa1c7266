"""A fit refuses a term beyond reason, and warns of one that explains little."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.studies.validation.fit import fit_terms, parse_term
from sim.studies.validation.observed import (
    MeasuredError,
    Observed,
    ObservedRequests,
    column,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HOST = "cost.step_overhead_s"


def steps_of(tpot_s: float) -> Observed:
    """Twenty requests of eleven tokens, one a second."""
    numbers = np.arange(20)
    return Observed(
        source="",
        requests=ObservedRequests(
            num_prompt_tokens=np.full(20, 100),
            num_output_tokens=np.full(20, 11),
            ttft_s=np.full(20, 0.1),
            e2el_s=np.full(20, 0.1 + 10 * tpot_s),
            arrival_s=numbers.astype(float),
        ),
    )


def hidden(values: Mapping[str, float]) -> Observed:
    """A host beside a GPU that takes 12 ms: it shows where it is longer."""
    return steps_of(max(0.012, values.get(HOST, 0.001)))


def shown(values: Mapping[str, float]) -> Observed:
    return steps_of(values.get("cost.other_s", 0.001))


def test_a_host_that_stands_for_a_link_is_refused_where_it_is_hidden() -> None:
    measured = steps_of(0.0185)
    with pytest.raises(MeasuredError, match=r"asks for 18\.5 ms .*\(--fit links"):
        fit_terms([parse_term("host")], measured, hidden, 30.0)


def test_totals_alone_fit_nothing() -> None:
    totals = Observed("bench.json", numbers={"mean_tpot_ms": 20.0})
    with pytest.raises(MeasuredError, match=r"bench\.json has totals only: give req"):
        fit_terms([parse_term("host")], totals, hidden, 30.0)


def test_a_term_that_explains_nothing_is_told() -> None:
    term = parse_term("cost.request_overhead_s=0:1e-3")
    assert fit_terms([term], steps_of(0.03), hidden, 30.0).explains_little
    link = parse_term("cost.other_s=0.001:0.02")
    right = fit_terms([link], steps_of(0.015), shown, 30.0)
    assert not right.explains_little
    assert right.values[link.key] == pytest.approx(0.015, rel=1e-2)
    # what is right without it needs no explanation
    assert not fit_terms([term], steps_of(0.012), hidden, 30.0).explains_little


def test_latencies_in_place_of_times_are_answered_by_how_times_follow(
    tmp_path: Path,
) -> None:
    rows = {"arrival_s": ["0"], "ttft_ms": ["120"], "tpot_ms": ["9"]}
    with pytest.raises(MeasuredError, match=r"arrival_s \+ TTFT"):
        column(rows, "first_token_s", tmp_path)
    with pytest.raises(MeasuredError, match=r"TPOT x \(output_tokens - 1\)"):
        column(rows, "last_token_s", tmp_path)
