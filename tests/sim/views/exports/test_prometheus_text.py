"""The text of a scrape, read by Prometheus' own parser and by our reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sim.results.schema import one_two_five
from sim.studies.validation.readers import read
from sim.views.exports.formats import export
from sim.views.exports.prometheus import histogram
from tests.sim.views.exports.runs import run, summary_of

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client.metrics_core import Metric

TTFT = "vllm:time_to_first_token_seconds"


def scraped(results: Path, directory: Path) -> tuple[dict[str, Metric], list[str]]:
    path, lines = export(results, "prometheus", directory / "metrics.prom")
    text = path.read_text()
    return {each.name: each for each in text_string_to_metric_families(text)}, lines


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    (found,) = (
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix
        and labels.items() <= sample.labels.items()
    )
    return float(found)


def test_counters_are_those_of_the_summary(recorded: Path, tmp_path: Path) -> None:
    families, lines = scraped(recorded, tmp_path)
    assert lines == []
    summary = summary_of(recorded)
    for name, key in {
        "num_preemptions": "num_preemptions",
        "prompt_tokens": "total_input_tokens",
        "generation_tokens": "total_output_tokens",
        "prefix_cache_queries": "prefix_cache_queries",
        "prefix_cache_hits": "prefix_cache_hits",
    }.items():
        family = families[f"vllm:{name}"]
        assert family.type == "counter"
        assert value(family, "_total") == summary[key]
        (sample,) = family.samples
        assert sample.labels["model_name"] == "meta-llama/Llama-3.1-8B"
    success = families["vllm:request_success"]
    assert value(success, "_total", finished_reason="stop") == summary["completed"]
    info = families["vllm:cache_config_info"].samples[0].labels
    assert info["num_gpu_blocks"] == str(summary["num_gpu_blocks"])


def test_histograms_are_those_of_the_tables(recorded: Path, tmp_path: Path) -> None:
    families, _ = scraped(recorded, tmp_path)
    requests, summary = pd.read_parquet(recorded / "requests.parquet"), None
    summary = summary_of(recorded)
    for name, mean_ms in (
        ("time_to_first_token", summary["mean_ttft_ms"]),
        ("request_time_per_output_token", summary["mean_tpot_ms"]),
        ("inter_token_latency", summary["mean_itl_ms"]),
        ("e2e_request_latency", summary["mean_e2el_ms"]),
        ("request_queue_time", requests["queue_s"].mean() * 1e3),
    ):
        family = families[f"vllm:{name}_seconds"]
        assert family.type == "histogram"
        counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
        assert counts == sorted(counts)
        assert counts[-1] == value(family, "_count")
        mean_s = value(family, "_sum") / value(family, "_count")
        assert mean_s * 1e3 == pytest.approx(mean_ms)
    assert value(families[TTFT], "_count") == summary["completed"]
    below = value(families[TTFT], "_bucket", le="0.06")
    assert below == (requests["ttft_s"] <= 0.06).sum()
    # The bounds are vLLM's, as its labels spell them.
    edges = [s.labels["le"] for s in families[TTFT].samples if "le" in s.labels]
    assert edges[:3] == ["0.001", "0.005", "0.01"]
    assert edges[-2:] == ["2560.0", "+Inf"]
    prompts = families["vllm:request_prompt_tokens"]
    assert value(prompts, "_sum") == summary["total_input_tokens"]


def test_our_reader_reads_it(recorded: Path, tmp_path: Path) -> None:
    path, _ = export(recorded, "prometheus", tmp_path / "metrics.prom")
    numbers, summary = read(path).numbers, summary_of(recorded)
    for name in ("completed", "num_preemptions", "total_output_tokens"):
        assert numbers[name] == summary[name]
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"):
        assert numbers[name] == pytest.approx(summary[name])


def test_rejected_requests_are_aborts_and_no_successes(tmp_path: Path) -> None:
    engine = {"num_gpu_blocks_override": 8, "max_model_len": 90}
    results = run(tmp_path, num_requests=30, **engine)
    families, lines = scraped(results, tmp_path)
    summary = summary_of(results)
    assert "--itl exact" in lines[0]
    assert "vllm:inter_token_latency_seconds" not in families
    success = families["vllm:request_success"]
    assert value(success, "_total", finished_reason="abort") == summary["rejected"] > 0
    assert value(families[TTFT], "_count") == summary["completed"]
    assert read(tmp_path / "metrics.prom").numbers["completed"] == summary["completed"]


def test_bounds_are_included_and_nan_is_nothing() -> None:
    parts = [np.array([0.5, 1.0, np.nan]), np.array([1.5, 2.0, 9.0])]
    assert histogram(parts, (1.0, 2.0)) == ([2, 4, 5], 14.0)
    assert histogram([], (1.0,)) == ([0, 0], 0.0)
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(99) == [1, 2, 5, 10, 20, 50]
