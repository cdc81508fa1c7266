"""Each section of a report on runs of known kinds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.hardware.capacity import format_capacity
from sim.results.folder import RunFolder
from sim.views.report.charts import Chart
from sim.views.report.sections.cache import show_cache
from sim.views.report.sections.capacity import estimate_of
from sim.views.report.sections.latency import windows_of
from sim.views.report.sections.provenance import differences
from sim.views.report.sections.summary import bound_by
from sim.views.report.sections.tiers import medians
from sim.views.report.source import load_runs
from tests.identity.measured_profile import measured_profile
from tests.sim.views.report.pages import crowded, page_of, results

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "meta-llama/Llama-3.1-8B"


def roomy(rate: float, **engine: Any) -> dict[str, Any]:
    """A run with as many blocks as it likes."""
    data = crowded(num_gpu_blocks_override=4000, **engine)
    data["workload"]["synthetic"]["arrivals"] = {"kind": "poisson", "rate": rate}
    return data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (crowded(), "Bound by KV capacity: "),
        (roomy(50.0, max_num_seqs=2), "Bound by admission: "),
        (roomy(0.2), "Bound by nothing: the engine is idle for "),
        (roomy(8.0), "Bound by the time of steps: steps spend 100 % of their time on "),
        (
            roomy(2000.0, max_num_batched_tokens=64, max_num_seqs=64),
            "Bound by the time of steps: prompts wait for the 64 tokens of a step",
        ),
    ],
)
def test_what_binds(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    directory = results(tmp_path / "run", data)
    (run,) = load_runs([directory])
    assert bound_by(run).startswith(said)
    assert bound_by(run) in page_of(directory).visible


def test_only_what_differs_is_listed(crowded_run: Path, plain_run: Path) -> None:
    found = differences(load_runs([crowded_run, plain_run]))
    assert found == [("engine.num_gpu_blocks_override", [40, 60])]
    page = page_of(crowded_run, plain_run)
    assert "engine.num_gpu_blocks_override" in page.visible


def test_titles_of_axes_have_room_beside_their_panels(swapping_run: Path) -> None:
    """Seven pixels a letter."""
    found = show_cache(load_runs([swapping_run]))
    chart = next(each for each in found if isinstance(each, Chart))
    assert len(chart.panels) == 3
    whole = sum(panel.weight for panel in chart.panels)
    for panel in chart.panels:
        room_px = chart.height_px * panel.weight / whole
        assert room_px > 7 * len(panel.y.title), panel.y.title


def test_the_same_configuration_twice(plain_run: Path, tmp_path: Path) -> None:
    again = results(tmp_path / "again", crowded(num_gpu_blocks_override=60))
    page = page_of(plain_run, again)
    assert "The configurations are the same." in page.visible
    assert "the same in all" in page.visible
    assert page.data(1) != []
    assert [value for _, value in page.data(1)][:4] == [
        value for _, value in page.data(2)
    ][:4]


def test_capacity_is_what_the_command_prints(plain_run: Path) -> None:
    (run,) = load_runs([plain_run])
    printed = " ".join(format_capacity(estimate_of(run)).split())
    assert printed in page_of(plain_run).visible


def test_histograms_are_those_of_blocks_json(swapping_run: Path) -> None:
    blocks = json.loads((swapping_run / "blocks.json").read_text())
    residency = blocks["tiers"]["gpu"]["residency"]
    page = page_of(swapping_run)
    (line,) = page.figures["block-times"]["data"]
    inside = np.array(residency["counts"][1:-1])
    assert sum(line["y"]) == pytest.approx(100 * inside.sum() / residency["count"])
    kept = np.flatnonzero(inside)
    assert line["x"][0] == pytest.approx(blocks["bin_edges_s"][kept[0]])
    assert line["x"][-1] == pytest.approx(blocks["bin_edges_s"][kept[-1] + 1])
    assert "no reuse gap" in page.visible
    assert f"{residency['count']:,}" in page.visible


def test_windows_hold_every_request(plain_run: Path) -> None:
    (run,) = load_runs([plain_run])
    windows = windows_of(run)
    assert windows.edges_s.size == 11  # of 150 requests: no fewer than ten windows
    numbers = windows.rate * np.diff(windows.edges_s)
    assert numbers.sum() == pytest.approx(len(run.requests["arrival_s"]))
    first = run.requests["arrival_s"] < windows.edges_s[1]
    assert windows.latency["ttft"]["median"][0] == pytest.approx(
        np.median(run.requests["ttft_s"][first])
    )


def test_intervals_profile_and_extrapolation_of_a_measured_run(tmp_path: Path) -> None:
    data = crowded()
    data["cost"] = {"kind": "measured", "profile": measured_profile(MODEL)}
    directory = results(tmp_path / "measured", data)
    summary = json.loads((directory / "summary.json").read_text())
    page = page_of(directory)
    assert f"from the profile {summary['profile']}" in page.visible
    assert "the run was repeated with every step at its bounds" in page.visible
    assert ("extrapolated_share", summary["extrapolated_share"]) in page.data()
    rows = [i for i, word in enumerate(page.words) if word == "p99 TTFT"]
    low, high = summary["p99_ttft_ms_interval"]
    told = page.words[rows[-1] + 1 : rows[-1] + 4]
    assert [float(each.split()[0]) for each in told] == pytest.approx(
        [
            value if value < 999.5 else value / 1e3
            for value in (summary["p99_ttft_ms"], low, high)
        ],
        rel=5e-3,
    )


def test_warnings_of_a_run_are_told(crowded_run: Path) -> None:
    summary = json.loads((crowded_run / "summary.json").read_text())
    (warning,) = summary["warnings"]
    page = page_of(crowded_run)
    assert f"Warning: {warning}" in page.visible.replace("Warning:  ", "Warning: ")
    # Named twice: in the list of sections, and above its own, which begins with it.
    _, _, section = page.visible.split("What matters first", 2)
    assert warning[1:40] in section[:200]  # it says overloaded


def test_a_run_with_drafts_has_a_section_of_them(
    plain_run: Path, tmp_path: Path
) -> None:
    data = crowded(speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    data["workload"]["synthetic"]["num_requests"] = 20
    data["workload"]["acceptance"] = {"kind": "constant", "rate": 0.5}
    data["cost"]["draft_step_s"] = 0.0
    directory = results(tmp_path / "drafts", data)
    summary = json.loads((directory / "summary.json").read_text())
    page = page_of(directory, plain_run)
    assert "Speculative decoding" in page.visible
    assert f"{plain_run.name}: no drafts are verified" in page.visible
    numbers = dict(page.data(1))
    for key in ("num_drafts", "draft_tokens", "acceptance_rate", "acceptance_length"):
        assert numbers[f"spec_decode_{key}"] == summary[f"spec_decode_{key}"]
    steps = RunFolder(directory).step_table
    verifying = [batch["num_drafts"] for batch in steps.batches(["num_drafts"])]
    (line,) = page.figures["drafts"]["data"][:1]
    assert max(line["x"]) <= np.concatenate(verifying).max()
    assert all(1.0 <= length <= 3.0 for length in line["y"])
    assert "Speculative decoding" not in page_of(plain_run).visible


def test_what_tiers_hold_and_spare_is_shown(tmp_path: Path, plain_run: Path) -> None:
    tier = {
        "type": "fs",
        "capacity_bytes": 1e10,
        "read_bytes_per_s": 5e9,
        "write_bytes_per_s": 5e9,
    }
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    data = crowded(
        kv_offloading_size=0.05,
        kv_offloading_link={"load_bytes_per_s": 2e10, "store_bytes_per_s": 2e10},
        kv_transfer_config={"kv_connector_extra_config": extra},
        async_scheduling=False,
    )
    chat = {
        "kind": "chat",
        "num_sessions": 6,
        "think_s": {"kind": "fixed", "value_s": 1},
    }
    chat |= {
        "arrivals": {"kind": "burst", "burst_size": 6, "interval_s": 1.0},
        "turns": {"kind": "fixed", "number": 4},
        "first_prompt_tokens": {"kind": "fixed", "tokens": 200},
        "prompt_tokens": {"kind": "fixed", "tokens": 40},
        "output_tokens": {"kind": "fixed", "tokens": 20},
        "max_context_tokens": 1000,
    }
    data["workload"] = {"sessions": chat, "max_concurrent_users": 6}
    directory = results(tmp_path / "tiers", data)
    told = json.loads((directory / "summary.json").read_text())
    page = page_of(directory)
    assert "No log of a release proves what tiers behind the host keep" in page.visible
    shown = dict(page.data(1))
    key = "secondary_tiers.fs.num_loaded_tokens"
    assert float(shown[key]) == told["secondary_tiers"]["fs"]["num_loaded_tokens"] > 0
    assert "nothing behind the pool" in page_of(directory, plain_run).visible
    assert "Behind the pool" not in page_of(plain_run).visible


def test_medians_by_length_leave_rare_lengths_out() -> None:
    tokens = np.array([16.0] * 5 + [64.0] * 4)
    lengths, middles = medians(tokens, np.arange(1.0, 10.0))
    assert (lengths.tolist(), middles.tolist()) == ([16.0], [3.0])
