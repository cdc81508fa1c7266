"""The benchmark's JSON, as readers of the documented fields find it."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from sim.cli.main import run as kvsim
from sim.studies.validation.readers import read
from sim.views.exports.formats import export
from tests.sim.views.exports.runs import run, summary_of
from workloads.traces.vllm_bench import VllmBenchTraceReader

if TYPE_CHECKING:
    from pathlib import Path

LISTS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")


def bench_of(results: Path, directory: Path) -> tuple[dict[str, Any], list[str], Path]:
    path, lines = export(results, "bench", directory / "bench.json")
    return json.loads(path.read_text()), lines, path


def test_numbers_are_those_of_the_summary_and_of_the_lists(
    recorded: Path, tmp_path: Path
) -> None:
    found, lines, _ = bench_of(recorded, tmp_path)
    assert lines == []
    summary = summary_of(recorded)
    for name, value in found.items():
        if name in summary:
            assert value == summary[name], name
    for name in ("duration", "completed", "p99_ttft_ms", "mean_itl_ms", "std_e2el_ms"):
        assert found[name] == summary[name]
    assert found["model_id"] == "meta-llama/Llama-3.1-8B"
    assert (found["num_prompts"], found["failed"]) == (40, 0)
    assert {len(found[name]) for name in LISTS} == {40}
    assert sum(found["input_lens"]) == found["total_input_tokens"]
    assert sum(found["output_lens"]) == found["total_output_tokens"]
    lengths = [len(gaps) + 1 for gaps in found["itls"]]
    assert lengths == found["output_lens"]
    # As the benchmark itself makes its statistics.
    ttfts_ms = np.array(found["ttfts"]) * 1e3
    assert np.mean(ttfts_ms) == pytest.approx(found["mean_ttft_ms"])
    assert np.std(ttfts_ms) == pytest.approx(found["std_ttft_ms"])
    assert np.percentile(ttfts_ms, 99) == pytest.approx(found["p99_ttft_ms"])
    gaps_ms = np.fromiter(chain.from_iterable(found["itls"]), float) * 1e3
    assert np.mean(gaps_ms) == pytest.approx(found["mean_itl_ms"])
    assert np.percentile(gaps_ms, 95) == pytest.approx(found["p95_itl_ms"])
    e2el_ms = ttfts_ms + [sum(gaps) * 1e3 for gaps in found["itls"]]
    assert np.mean(e2el_ms) == pytest.approx(found["mean_e2el_ms"])


def test_our_readers_read_it(recorded: Path, tmp_path: Path) -> None:
    found, _, path = bench_of(recorded, tmp_path)
    observed = read(path)
    assert observed.requests is not None
    assert observed.requests.num_requests == 40
    assert observed.numbers["mean_ttft_ms"] == found["mean_ttft_ms"]
    specs = list(VllmBenchTraceReader(path).read())
    assert [spec.num_prompt_tokens for spec in specs] == found["input_lens"]
    first_s = min(found["start_times"])
    arrivals = [spec.arrival_s for spec in specs]
    assert arrivals == pytest.approx([t - first_s for t in found["start_times"]])


def test_a_run_validates_itself_without_error(recorded: Path, tmp_path: Path) -> None:
    _, _, path = bench_of(recorded, tmp_path)
    config, out = str(recorded / "config.yaml"), tmp_path / "validation"
    arguments = ["validate", config, "--measured", str(path), "--out", str(out)]
    assert kvsim([*arguments, "--no-figures", "--quiet"]) == 0
    report = pd.read_csv(out / "requests.csv")
    # Arrivals count from the first one: times differ by what rounding that takes.
    for name in ("ttft_s", "e2el_s"):
        error = report[f"predicted_{name}"] - report[f"measured_{name}"]
        assert error.abs().max() < 1e-9


def test_gaps_that_were_not_recorded_are_left_out(plain: Path, tmp_path: Path) -> None:
    found, lines, path = bench_of(plain, tmp_path)
    assert "itls" not in found
    assert lines == ["'itls' are left out; for them, run it with --itl exact"]
    assert len(found["ttfts"]) == 40
    assert read(path).numbers["p99_tpot_ms"] == summary_of(plain)["p99_tpot_ms"]


def test_requests_without_an_answer_are_failures(tmp_path: Path) -> None:
    """Prompts above 64 tokens do not fit in four blocks."""
    engine = {"num_gpu_blocks_override": 8, "max_model_len": 90}
    results = run(tmp_path, "--itl", "exact", num_requests=30, **engine)
    found, _, _ = bench_of(results, tmp_path)
    summary = summary_of(results)
    assert 0 < summary["rejected"] == found["failed"] < 30
    failed = [i for i, error in enumerate(found["errors"]) if error]
    assert len(failed) == found["failed"]
    for i in failed:
        assert "max_model_len" in found["errors"][i]
        assert (found["ttfts"][i], found["itls"][i]) == (0.0, [])
        assert found["output_lens"][i] == 0
    assert sum(found["output_lens"]) == summary["total_output_tokens"]
