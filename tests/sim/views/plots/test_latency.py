from __future__ import annotations

import numpy as np
import pytest

from sim.results.metrics import SERVED, is_served
from sim.scheduler.request import RequestStatus
from sim.views.plots import FIGURES, Tables
from tests.sim.views.plots.tables import (
    a_run,
    assert_draws,
    legend_of,
    texts_of,
)


def test_percentiles_are_those_of_the_summary(full_run: Tables) -> None:
    summary = dict(full_run.summary) | {"p95_tpot_ms": 123.0, "p99_e2el_ms": 45_678.0}
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, summary)
    legend = legend_of(FIGURES["latency_cdfs"](tables))
    assert legend[4] == "p95 123 ms"
    assert legend[8] == "p99 45.7 s"


def test_percentiles_are_computed_where_the_summary_is_silent(full_run: Tables) -> None:
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, {})
    known = legend_of(FIGURES["latency_cdfs"](full_run))
    assert legend_of(FIGURES["latency_cdfs"](tables)) == known


def test_only_finished_requests_count() -> None:
    statuses = np.array([status.value for status in RequestStatus], np.object_)
    assert is_served(statuses).tolist() == [each in SERVED for each in statuses]
    assert is_served(statuses).sum() == 2


def test_one_request() -> None:
    t = a_run(200)
    done = t.requests[t.requests["status"] == "finished_stopped"]
    assert_draws(Tables(t.steps, done[:1], t.preemptions, {}))


@pytest.mark.slow
def test_nobody_finished_or_all_tpot_are_nan() -> None:
    t = a_run(200)
    no_tpot = t.requests.assign(tpot_s=np.nan)
    figures = assert_draws(Tables(t.steps, no_tpot, t.preemptions, {}))
    texts = texts_of(figures["latency_cdfs"])
    assert sum("No finished request" in text for text in texts) == 1
    nobody = t.requests.assign(status="finished_rejected")
    assert_draws(Tables(t.steps, nobody, t.preemptions, {}))


def test_latencies_may_be_equal_or_zero() -> None:
    t = a_run(200)
    same = t.requests.assign(
        status="finished_length_capped", ttft_s=0.0, tpot_s=0.02, e2el_s=3.0
    )
    assert_draws(Tables(t.steps, same, t.preemptions, {}))
