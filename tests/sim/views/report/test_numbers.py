"""Numbers on a page are those of summary.json, and of a line of pandas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from sim.results import schema
from sim.results.folder import RunFolder
from sim.views.report.html import decimal, listed, milliseconds, percent, plural
from sim.views.report.source import load_runs
from tests.sim.views.report.pages import page_of

if TYPE_CHECKING:
    from pathlib import Path

OF_THE_STEPS = {"full_share"}
"""Numbers of a page that no summary holds."""


def test_each_number_is_that_of_the_summary(
    crowded_run: Path, plain_run: Path, swapping_run: Path
) -> None:
    runs = (crowded_run, plain_run, swapping_run)
    page = page_of(*runs)
    for number, directory in enumerate(runs, 1):
        summary = json.loads((directory / "summary.json").read_text())
        told = [(k, v) for k, v in page.data(number) if k not in OF_THE_STEPS]
        assert len({key for key, _ in told}) > 25
        assert [(key, summary[key]) for key, _ in told] == told


def test_each_number_is_that_of_pandas(swapping_run: Path) -> None:
    numbers = dict(page_of(swapping_run).data())
    requests = pd.read_parquet(swapping_run / "requests.parquet")
    steps = pd.read_parquet(swapping_run / "steps.parquet")
    preemptions = pd.read_parquet(swapping_run / "preemptions.parquet")
    served = requests.query("status.str.startswith('finished_')")
    assert numbers["num_preemptions"] == len(preemptions)
    assert numbers["num_requests_preempted"] == preemptions.request_id.nunique()
    assert numbers["swapped_out_blocks"] == steps.num_swapped_out_blocks.sum()
    assert numbers["recomputed_tokens"] == steps.num_recomputed_tokens.sum()
    assert numbers["num_steps"] == len(steps)
    assert numbers["kv_cache_usage_max"] == steps.kv_cache_usage.max()
    exact = {"rel": 1e-12}
    for percentile in (50, 90, 99):
        expected = 1e3 * served.ttft_s.quantile(percentile / 100)
        assert numbers[f"p{percentile}_ttft_ms"] == pytest.approx(expected, **exact)
    mean = (steps.kv_cache_usage * steps.latency_s).sum() / numbers["duration"]
    assert numbers["kv_cache_usage_mean"] == pytest.approx(mean, **exact)
    full = steps.latency_s[steps.kv_cache_usage >= 0.95].sum() / numbers["duration"]
    assert numbers["full_share"] == pytest.approx(full, **exact)


def test_preemptions_are_named_with_all_that_happened(swapping_run: Path) -> None:
    page = page_of(swapping_run)
    told = {
        text
        for trace in page.figures["kv-cache-usage"]["data"]
        if trace.get("mode") == "markers"
        for text in trace["customdata"]
    }
    table = pd.read_parquet(swapping_run / "preemptions.parquet")
    assert len(told) == len(table)
    assert set(table["mode"]) == {"swap", "recompute"}
    for row in table.itertuples():
        begin = f"request {row.request_id} preempted"
        step = f"step {row.step:,}<br>"
        (found,) = (t for t in told if t.startswith(begin) and step in t)
        assert f"for request {row.for_request_id}: {row.reason}" in found
        assert f"mode {row.mode}: {plural(row.num_tokens_lost, 'token')} lost" in found


def test_bars_of_preemptions_count_all_of_them(swapping_run: Path) -> None:
    spec = page_of(swapping_run).figures["kv-cache-usage"]
    unit_s = 1.0 if "(s)" in spec["layout"]["xaxis"]["title"]["text"] else 60.0
    total = 0.0
    for trace in spec["data"]:
        if trace["type"] == "bar":
            width_min = np.array(trace["width"]) * unit_s / 60.0
            total += float((np.array(trace["y"]) * width_min).sum())
    assert total == pytest.approx(len(load_runs([swapping_run])[0].preemptions["mode"]))


def test_percentiles_on_the_curves_are_those_of_the_summary(crowded_run: Path) -> None:
    summary = json.loads((crowded_run / "summary.json").read_text())
    spec = page_of(crowded_run).figures["latency-cdfs"]
    marks = [t for t in spec["data"] if t["name"] in ("p50", "p95", "p99")]
    assert len(marks) == 9
    for mark, (metric, percentile) in zip(
        marks,
        [(m, p) for m in ("ttft", "tpot", "e2el") for p in (50, 95, 99)],
        strict=True,
    ):
        value = summary[f"p{percentile}_{metric}_ms"] / 1e3
        assert mark["x"] == [pytest.approx(value, rel=1e-5)]
        assert mark["y"] == [percentile]


def test_numbers_in_words() -> None:
    assert [percent(share) for share in (0.0, 1.0, 0.1684, 0.00012, 0.5)] == [
        "0 %",
        "100 %",
        "16.8 %",
        "0.012 %",
        "50 %",
    ]
    assert [milliseconds(value) for value in (None, 0.5, 999.7, 12_345.0, 2e6)] == [
        "-",
        "0.5 ms",
        "1 s",
        "12.3 s",
        "2,000 s",
    ]
    assert [decimal(value) for value in (None, 0.01178, 5.99, 12_345.6)] == [
        "-",
        "0.0118",
        "5.99",
        "12,346",
    ]
    assert plural(1, "step"), plural(2, "step") == ("1 step", "2 steps")
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"


def test_tables_that_pandas_has_written_are_read_alike(
    crowded_run: Path, tmp_path: Path
) -> None:
    """Its texts are wider than ours."""
    for path in crowded_run.iterdir():
        if path.suffix == ".parquet":
            pd.read_parquet(path).to_parquet(tmp_path / path.name)
        elif path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    names = [*schema.PREEMPTIONS]
    ours, theirs = (
        RunFolder(each).columns("preemptions", names)
        for each in (crowded_run, tmp_path)
    )
    for name in names:
        assert ours[name].tolist() == theirs[name].tolist()
