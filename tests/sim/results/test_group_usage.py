"""Blocks by kind of KV cache group: rows, means, a whole run and its files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from matplotlib.text import Text

from sim.config.tables import parse_config
from sim.results.recording.usage import GroupUsage, mean_between
from sim.results.run import Results
from sim.results.summary.rows import summary_rows
from sim.simulation.simulate import simulate
from sim.views.plots import FIGURES, Tables

if TYPE_CHECKING:
    from pathlib import Path

GPT_OSS = {
    "workload": {"preset": {"name": "azure_conv_2023", "duration_s": 60}},
    "engine": {
        "model": "openai/gpt-oss-120b",
        "gpu": "h200_sxm",
        "num_gpu_blocks_override": 1_500,
        "max_model_len": 8_192,
        "enable_prefix_caching": False,
    },
    "cost": {"kind": "roofline"},
}


def test_a_row_stands_for_each_change_of_a_kind() -> None:
    usage = GroupUsage([2, 1])
    usage.note(1.0, [3, 2, 4])
    usage.note(2.0, [3, 2, 4])
    usage.note(3.0, [2, 3, 6])
    usage.note(5.0, [0, 0, 6])
    rows = usage.table()
    assert rows["time_s"].tolist() == [1.0, 1.0, 3.0, 5.0]
    assert rows["kind"].tolist() == [0, 1, 1, 0]
    assert rows["num_blocks"].tolist() == [5, 4, 6, 0]
    edges_s = np.array([0.0, 2.0, 6.0, 8.0])
    assert mean_between(rows, "num_blocks", edges_s, kind=0).tolist() == [
        2.5,
        3.75,
        0.0,
    ]
    assert mean_between(rows, "num_blocks", edges_s, kind=1).tolist() == [2.0, 5.5, 6.0]


def test_without_rows_nothing_was_held() -> None:
    rows = GroupUsage([1, 1]).table()
    assert mean_between(rows, "num_blocks", np.array([0.0, 3.0]), kind=1).tolist() == [
        0.0
    ]


@pytest.fixture(scope="module")
def results() -> Results:
    return simulate(parse_config(GPT_OSS))


def test_kinds_add_up_to_the_blocks_of_each_step(results: Results) -> None:
    rows = results.recording.group_table
    assert rows is not None
    steps = results.steps
    held = np.zeros(len(steps))
    for kind in (0, 1):
        is_own = rows["kind"] == kind
        times_s = np.concatenate([[-1.0], rows["time_s"][is_own]])
        blocks = np.concatenate([[0], rows["num_blocks"][is_own]])
        held += blocks[np.searchsorted(times_s, steps["start_s"], side="right") - 1]
    assert held.tolist() == steps["num_physical_blocks"].tolist()


def test_at_the_end_nothing_is_held() -> None:
    """Of a run whose last step has tokens, so that none comes behind it."""
    short = {"preset": {"name": "azure_conv_2023", "duration_s": 5}}
    engine = GPT_OSS["engine"] | {"async_scheduling": False}
    results = simulate(parse_config(GPT_OSS | {"workload": short, "engine": engine}))
    rows = results.recording.group_table
    assert rows is not None
    last = dict(zip(rows["kind"].tolist(), rows["num_blocks"].tolist(), strict=True))
    assert last == {0: 0, 1: 0}


def test_summary_and_files_tell_of_kinds(results: Results, tmp_path: Path) -> None:
    window, full = results.summary["kv_cache_groups"]
    assert (window["kind"], full["kind"]) == ("sliding window of 128", "full attention")
    assert 0 < window["num_blocks_mean"] < full["num_blocks_mean"]
    total = window["num_blocks_mean"] + full["num_blocks_mean"]
    usable = results.summary["num_gpu_blocks"] - 1
    # Of a step that is computed in vain, the usage is that of its call.
    mean = results.summary["kv_cache_usage_mean"]
    assert total / usable == pytest.approx(mean, rel=1e-4)
    told = dict(summary_rows(results.summary))
    assert told["KV groups"].startswith("18 layers, sliding window of 128: mean ")
    results.write(tmp_path)
    loaded = Results.load(tmp_path)
    again = loaded.recording.group_table
    assert again is not None
    assert again["num_blocks"].tolist() == (
        results.recording.group_table["num_blocks"].tolist()  # type: ignore[index]
    )
    figure = FIGURES["kv_cache_usage"](Tables.of(loaded))
    most = 100.0 * results.summary["kv_cache_usage_max"]
    top = figure.axes[0].get_ylim()[1] / 1.04
    assert top == pytest.approx(most if most < 50.0 else 100.0)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert "18 layers, sliding window of 128" in labels
    assert "18 layers, full attention" in labels


def test_one_kind_of_cache_has_no_such_table(tmp_path: Path) -> None:
    engine = GPT_OSS["engine"] | {"model": "Qwen/Qwen3-8B"}
    found = simulate(parse_config(GPT_OSS | {"engine": engine}))
    assert found.recording.group_table is None
    assert "kv_cache_groups" not in found.summary
    found.write(tmp_path)
    assert not (tmp_path / "kv_cache_groups.parquet").exists()


@pytest.mark.parametrize(
    ("sizes", "block_size", "says"),
    [
        ((544, 544), 544.0, "Fragmentation: "),
        ((16, 64), None, "Fragmentation"),
    ],
)
def test_fragmentation_takes_blocks_as_large_as_the_groups_have_them(
    results: Results, sizes: tuple[int, int], block_size: float | None, says: str
) -> None:
    kinds = results.summary["kv_cache_groups"]
    told = [
        kind | {"block_size": size} for kind, size in zip(kinds, sizes, strict=True)
    ]
    tables = Tables.of(results)
    tables = replace(tables, summary={**tables.summary, "kv_cache_groups": told})
    assert tables.block_size == block_size
    figure = FIGURES["fragmentation"](tables)
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert any(text.startswith(says) for text in texts)
    is_refused = any("unlike groups differ in size" in text for text in texts)
    assert is_refused == (block_size is None)
