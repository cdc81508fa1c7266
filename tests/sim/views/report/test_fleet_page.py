"""Pages of fleets: engines, pools and replicas, with the numbers of the summary."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from sim.results.folder import RunFolder
from sim.views.plots.run.fleets import mean_usage
from sim.views.report.sections.waterfall import NUM_SLOWEST
from tests.sim.views.report.pages import crowded, page_of, results

if TYPE_CHECKING:
    from pathlib import Path


def fleet(**more: Any) -> dict[str, Any]:
    pools = [{"name": "main", "replicas": 2}, {"name": "other", "replicas": 1}]
    return {"pools": pools, "router": {"kind": "round_robin"}} | more


@pytest.fixture(scope="module")
def fleet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three engines in two pools, one of which dies and comes back."""
    events = [
        {"time_s": 0.5, "kind": "die", "engine": 1},
        {"time_s": 2.0, "kind": "start", "engine": 1},
    ]
    prices = {"per_gpu_hour": {"h100_sxm": 3.0}}
    data = crowded(gpu="h100_sxm")
    data |= {"fleet": fleet(events=events, prices=prices)}
    data["fleet"]["pools"][1]["engine"] = {"tensor_parallel_size": 2}
    return results(tmp_path_factory.mktemp("runs") / "fleet", data)


@pytest.fixture(scope="module")
def pairs_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefiller and a decoder."""
    pools = [
        {"name": "prefill", "replicas": 1, "role": "prefill"},
        {"name": "decode", "replicas": 1, "role": "decode"},
    ]
    data = crowded() | {"fleet": fleet(pools=pools, links={"bytes_per_s": 1e10})}
    return results(tmp_path_factory.mktemp("runs") / "pairs", data)


def test_a_page_of_a_fleet_shows_engines_pools_and_replicas(fleet_run: Path) -> None:
    page = page_of(fleet_run)
    summary = json.loads((fleet_run / "summary.json").read_text())
    assert not page.unclosed
    keys = {"engines-1", "engine-loads-1", "pools-1", "replicas-1", "latency-cdfs"}
    assert keys <= {*page.figures}
    for key, value in page.data():
        found: Any = summary
        for part in key.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        assert value == found, key
    assert "pools.1.cost" in dict(page.data())
    assert "2 on 1 x h100_sxm each, serve" in page.visible
    assert "1 on 2 x h100_sxm each, serve" in page.visible
    assert "1 died" in page.visible


def test_a_page_of_a_fleet_begins_with_its_warnings(tmp_path: Path) -> None:
    data = crowded(max_num_seqs=1) | {"fleet": fleet()}
    path = results(tmp_path / "fleet", data)
    warnings = json.loads((path / "summary.json").read_text())["warnings"]
    (overloaded,) = (each for each in warnings if each.startswith("overloaded: "))
    assert f"O{overloaded[1:]}" in page_of(path).visible


def test_a_page_of_a_fleet_shows_what_stands_behind_its_pools(
    fleet_run: Path, tmp_path: Path
) -> None:
    data = crowded(
        enable_prefix_caching=True,
        kv_offloading_size=1.0,
        kv_offloading_link={"load_bytes_per_s": 1e10, "store_bytes_per_s": 1e10},
    )
    path = results(tmp_path / "tiers", data | {"fleet": fleet()})
    page = page_of(path)
    assert not page.unclosed
    assert "tiers" in page.figures
    summary = json.loads((path / "summary.json").read_text())
    assert summary["stored_bytes"] > 0
    assert dict(page.data())["stored_bytes"] == summary["stored_bytes"]
    assert "tiers" not in page_of(fleet_run).figures


def test_the_map_is_the_usage_and_names_preemptions(fleet_run: Path) -> None:
    traces = {
        each["type"]: each for each in page_of(fleet_run).figures["engines-1"]["data"]
    }
    heat, marks, gone = traces["heatmap"], traces["scatter"], traces["bar"]
    folder = RunFolder(fleet_run)
    edges_s = np.linspace(0.0, folder.summary["duration"], len(heat["x"]) + 1)
    usage = 100.0 * mean_usage(folder.step_table, 3, edges_s)
    assert np.array(heat["z"]) == pytest.approx(usage, rel=1e-4, abs=1e-4)
    assert len(marks["x"]) == folder.summary["num_preemptions"] > 0
    assert gone["y"] == [1]


@pytest.mark.parametrize("is_static", [False, True])
def test_pools_that_prefill_show_transfers_and_the_parts_of_ttft(
    pairs_run: Path, *, is_static: bool
) -> None:
    page = page_of(pairs_run, is_static=is_static)
    assert "prefill" in page.visible
    if is_static:
        assert page.text.count("<svg") >= 5
    else:
        names = [each["name"] for each in page.figures["pools-1"]["data"]]
        parts = {f"TTFT: {part}" for part in ("queue", "prefill", "transfer", "decode")}
        assert {"prefill", "decode", "transfers under way"} | parts == {*names}
        shown = page.figures["slowest-requests"]["data"]
        bars = {each["name"]: each for each in shown if each["type"] == "bar"}
        assert [*bars] == ["waiting", "prefill", "transfer", "decode"]
        requests = pd.read_parquet(pairs_run / "requests.parquet")
        slowest = requests.sort_values("e2el_s", ascending=False)[:NUM_SLOWEST]
        long_s = bars["prefill"]["x"]
        np.testing.assert_allclose(long_s, slowest["ttft_prefill_s"], rtol=1e-3)
        total_s = sum(np.array(each["x"]) for each in bars.values())
        np.testing.assert_allclose(total_s, slowest["e2el_s"], rtol=1e-3)


def test_a_fleet_and_an_engine_are_compared(fleet_run: Path, plain_run: Path) -> None:
    page = page_of(fleet_run, plain_run)
    assert "One engine, without a router." in page.visible
    assert {"engines-1", "latency-cdfs"} <= {*page.figures}
    assert "engines-2" not in page.figures
