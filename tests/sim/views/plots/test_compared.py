"""Figures of several runs and of sweeps: true numbers, and nothing overlaps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from sim import Results
from sim.errors import ConfigError, ResultsError
from sim.results.summary.compared import differing
from sim.views.plots import FIGURES
from sim.views.plots.catalogue import SWEEP_FIGURES, HeatMap
from sim.views.plots.compared.over_load import load_of, series_of
from sim.views.plots.compared.overlays import OVERLAYS
from sim.views.plots.compared.runs import Run, in_common, labels_of, looks_of
from sim.views.plots.compared.sweep_runs import (
    PREEMPTION_RATE,
    SweepRuns,
    read_sweep,
    runs_of_plan,
)
from sim.views.plots.output import NotShownError
from sim.views.plots.run.tables import Tables
from sim.views.plots.style import to_png
from tests.sim.views.plots.directories import (
    BLOCKS,
    MODE,
    RATE,
    said,
    write_sweep_results,
)

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def runs(two_runs: list[Path]) -> list[Run]:
    found = [Results.load(path) for path in two_runs]
    labels = labels_of(
        ["a", "b"],
        [each.config.to_data() for each in found],
        [each.summary for each in found],
    )
    return [Run(n, Tables.of(each)) for n, each in zip(labels, found, strict=True)]


@pytest.fixture(scope="module")
def sweep(pressed_sweep: Path) -> SweepRuns:
    return read_sweep(pressed_sweep)


def boxes_inside(figure: Figure) -> None:
    """Legends stand below the titles and above the panels, inside of the picture."""
    to_png(figure)
    top = min(text.get_window_extent().y0 for text in figure.texts)
    width, height = figure.bbox.width, figure.bbox.height
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width
        assert box.y1 <= top
        for axes in figure.axes:
            panel = axes.get_tightbbox()
            assert panel is not None
            assert panel.y1 <= box.y0 + 1.0
            assert panel.y0 >= 0
            assert panel.x1 <= width
            assert panel.y1 <= height


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_run_has_its_row_with_the_numbers_of_its_summary(
    name: str, runs: list[Run]
) -> None:
    figure = OVERLAYS[name](runs)
    boxes_inside(figure)
    rows = said(figure).splitlines()[2:]
    assert [row.partition(":")[0] for row in rows] == [
        "num_gpu_blocks_override=20",
        "num_gpu_blocks_override=40",
    ]
    for row, run in zip(rows, runs, strict=True):
        s = run.tables.summary
        expected = {
            "kv_cache_usage": f"mean {100 * s['kv_cache_usage_mean']:.1f} %, max "
            f"{100 * s['kv_cache_usage_max']:.1f} %, {s['num_preemptions']:,} preempt",
            "queues": f"completed {s['completed']:,} requests, "
            f"{s['num_running_mean']:,.1f} running",
            "preemptions": f"{s['num_preemptions']:,} in all, "
            f"{s['recomputed_tokens']:,} tokens computed again",
            "steps": f"{s['num_steps']:,} steps, {s['mean_step_ms']:,.1f} ms",
            "latency_cdfs": f"TTFT median {s['median_ttft_ms']:,.0f} ms, p95 "
            f"{s['p95_ttft_ms']:,.0f} ms, p99 {s['p99_ttft_ms']:,.0f} ms",
            "fragmentation": " % of the slots",
        }[name]
        assert expected in row
    assert runs[0].tables.summary["num_preemptions"] > 0


def test_curves_are_those_of_the_tables(runs: list[Run]) -> None:
    figure = OVERLAYS["preemptions"](runs)
    for line, run in zip(figure.axes[0].get_lines(), runs, strict=True):
        drawn = np.asarray(line.get_ydata())
        assert drawn[-1] == run.tables.summary["num_preemptions"]
    figure = OVERLAYS["latency_cdfs"](runs)
    for line, run in zip(figure.axes[0].get_lines(), runs, strict=True):
        ttft_s = np.asarray(run.tables.requests["ttft_s"])
        scale = 1e3 if "(ms)" in figure.axes[0].get_xlabel() else 1.0
        assert np.max(line.get_xdata()) == pytest.approx(scale * ttft_s.max())


def test_labels_fall_back_to_names() -> None:
    none: list[dict[str, object]] = [{}, {}]
    one, two = {"engine": {"a": 1, "b": None}}, {"engine": {"a": 2, "b": 0.5}}
    assert labels_of(["x", "y"], [one, two], [{"b": 7}, {}]) == [
        "a=1, b=7",
        "a=2, b=0.5",
    ]
    assert labels_of(["x", "y"], [one, one], none) == ["x", "y"]
    long = [{"key": "v" * 60}, {"key": "w" * 60}]
    assert labels_of(["x", "y"], long, none) == ["x", "y"]
    assert differing([one, {}]) == {"engine.a": [1, None], "engine.b": [None, None]}
    assert in_common(["a on b, v1, x", "a on b, v1, y"]) == "a on b, v1"


def test_too_many_runs_are_refused(runs: list[Run]) -> None:
    assert len({json.dumps(look) for look in looks_of(8)}) == 8
    with pytest.raises(ConfigError, match="holds 8 runs at most, got 9"):
        OVERLAYS["queues"]([runs[0]] * 9)


@pytest.mark.parametrize("name", SWEEP_FIGURES)
def test_figures_of_a_sweep_say_what_they_are_of(name: str, sweep: SweepRuns) -> None:
    figure = SWEEP_FIGURES[name](sweep)
    boxes_inside(figure)
    assert "2 seeds" in said(figure)
    frame = sweep.frame
    totals = frame.groupby(MODE)["num_preemptions"].sum()
    expected = {
        "preemption_rate": f"up to {frame[PREEMPTION_RATE].max():,.3g} per 100",
        "kv_usage": f"mean up to {100 * frame['kv_cache_usage_mean'].max():.1f} %",
        "swap_or_recompute": f"{totals['swap']:,} preemptions by swap, "
        f"{totals['recompute']:,} by recompute",
        "goodput": f"up to {frame['request_goodput'].max():,.4g} requests/s within "
        "TTFT 40 ms, TPOT 12 ms",
        "heat_map": "p95_ttft_ms: ",
    }[name]
    assert expected in said(figure)


def test_lines_are_means_over_seeds_and_bands_all_of_them(sweep: SweepRuns) -> None:
    assert sweep.keys == (RATE, BLOCKS, MODE)
    assert (sweep.load, sweep.size, sweep.num_missing) == (RATE, BLOCKS, 0)
    lines = series_of(sweep)
    assert [each.label for each in lines] == [
        "20 blocks, recompute",
        "20 blocks, swap",
        "30 blocks, recompute",
        "30 blocks, swap",
    ]
    assert lines[0].look["color"] == lines[1].look["color"] != lines[2].look["color"]
    assert lines[0].look["linestyle"] == lines[2].look["linestyle"]
    x, mean, low, high = lines[0].values("mean_ttft_ms")
    rows = sweep.frame.query(f"`{BLOCKS}` == 20 and `{MODE}` == 'recompute'")
    by_rate = rows.groupby(RATE)["mean_ttft_ms"]
    assert mean.tolist() == by_rate.mean().tolist()
    assert low.tolist() == by_rate.min().tolist()
    assert high.tolist() == by_rate.max().tolist()
    assert (high > low).any()
    offered = sweep.frame.groupby(RATE)["request_rate"].mean()
    assert x == pytest.approx(offered.to_numpy())
    assert load_of(sweep)[1] == "offered load (requests/s)"


def test_policies_are_named_in_few_words_in_a_heat_map() -> None:
    own = json.dumps({"kind": "/home/me/my.py:InTurn", "most_times": 2})
    rows = [(e, v, 1.0) for e in ('"lru"', "null") for v in ('"most_blocks"', own)]
    keys = ("engine.evictor", "engine.preemption_victim")
    frame = pd.DataFrame(rows, columns=[*keys, "mean_ttft_ms"])
    runs = SweepRuns("chats", frame, keys)
    figure = HeatMap("evictor", "preemption_victim", "mean_ttft_ms")(runs)
    axes = figure.axes[0]
    assert [each.get_text() for each in axes.get_xticklabels()] == ["lru", "null"]
    names = axes.get_yticklabels()
    assert {each.get_text() for each in names} == {
        "most_blocks",
        "my.py:InTurn\nmost_times=2",
    }
    figure.canvas.draw()
    drawn = [*names, axes.yaxis.label]
    assert all(each.get_window_extent().x0 >= 0.0 for each in drawn)


def test_cells_of_a_heat_map_are_means_over_seeds(sweep: SweepRuns) -> None:
    figure = HeatMap("rate_scale", "preemption_mode", "num_preemptions")(sweep)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in panels] == [
        "num_gpu_blocks_override 20",
        "num_gpu_blocks_override 30",
    ]
    cells = np.asarray(panels[0].images[0].get_array())
    rows = sweep.frame[sweep.frame[BLOCKS] == 20]
    table = rows.pivot_table("num_preemptions", MODE, RATE)
    assert cells.tolist() == table.to_numpy().tolist()
    numbers = sweep.frame.groupby([RATE, BLOCKS, MODE])["num_preemptions"].mean()
    title = f"num_preemptions: {numbers.min():,.6g} to {numbers.max():,.6g}"
    assert title in said(figure)


def test_pools_of_a_heat_map_are_said_in_words() -> None:
    """Links that only go with some pools are no key of their own."""
    pool = {"replicas": 2, "role": "serve", "engine": {}}
    apart = [{**pool, "name": name, "role": name} for name in ("prefill", "decode")]
    pools = [json.dumps([{**pool, "name": "main"}]), json.dumps(apart)]
    frame = pd.DataFrame(
        {
            "fleet.pools": pools * 2,
            "fleet.links": [None, '{"interconnect": "pcie5"}'] * 2,
            RATE: [1.0, 1.0, 2.0, 2.0],
            "seed": 0,
            "p95_ttft_ms": [10.0, 20.0, 30.0, 40.0],
        }
    )
    runs = SweepRuns("a fleet", frame, ("fleet.pools", "fleet.links", RATE))
    figure = HeatMap()(runs)
    (axes,) = (each for each in figure.axes if each.images)
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "2\nprefill,\n2\ndecode",
        "2\nmain",
    ]
    with pytest.raises(NotShownError, match="needs two keys"):
        HeatMap()(SweepRuns("a fleet", frame, ("fleet.pools", "fleet.links")))


def test_refused_runs_are_left_out_and_counted(tmp_path: Path) -> None:
    grid = {RATE: [0.1, 1.0], "engine.tensor_parallel_size": [1, 3]}
    sweep = read_sweep(write_sweep_results(tmp_path / "s", grid=grid))
    assert sweep.num_missing == 2
    assert sweep.keys == (RATE,)
    figure = SWEEP_FIGURES["preemption_rate"](sweep)
    assert "2 runs are missing" in said(figure)
    with pytest.raises(NotShownError, match="needs two keys"):
        SWEEP_FIGURES["heat_map"](sweep)


def test_a_sweep_that_was_stopped_before_its_first_run_is_refused(
    tmp_path: Path,
) -> None:
    directory = write_sweep_results(tmp_path / "s", grid={RATE: [0.1, 1.0]})
    for path in (directory / "runs").iterdir():
        path.unlink()
    with pytest.raises(ResultsError, match="has finished; go on with 'kvsim sweep'"):
        read_sweep(directory)


def test_curves_of_a_plan_are_drawn_over_their_rates() -> None:
    point = {"load": 1.0, "rate": 5.0, "is_overloaded": False}
    values = {"preemptions_per_request": 0.25, "goodput": 0.9, "p95_ttft_ms": 80.0}
    curve = [
        point | {"values": values},
        point | {"load": 0.5, "rate": 2.5, "values": values | {"goodput": 1.0}},
        point | {"load": 0.0, "values": values},
        point | {"is_overloaded": True, "values": values},
    ]
    each = {"num_gpu_blocks": 10, "curve": curve}
    plan = {
        "traffic": {"title": "traffic"},
        "objectives": [{"limits_ms": {"ttft_ms": 2000.0}}, {}],
        "candidates": [
            each | {"name": "one"},
            each | {"name": "two"},
            {"name": "none"},
        ],
    }
    runs = runs_of_plan(plan)
    assert len(runs.frame) == 4
    assert runs.frame[PREEMPTION_RATE].eq(25.0).all()
    figure = SWEEP_FIGURES["goodput"](runs)
    assert "up to 4.5 requests/s within TTFT 2,000 ms" in said(figure)
    x, mean, *_ = series_of(runs)[0].values("request_goodput")
    assert (x.tolist(), mean.tolist()) == ([2.5, 5.0], [2.5, 4.5])


def test_a_sweep_over_users_is_drawn_over_users() -> None:
    key = "workload.max_concurrent_users"
    frame = pd.DataFrame({"run": [0, 1], key: [10, 20], "request_rate": [None, None]})
    x, label = load_of(SweepRuns("", frame, (key,)))
    assert (x.tolist(), label) == ([10.0, 20.0], "max concurrent users")


def test_titles_of_one_run_are_the_numbers_of_its_summary(runs: list[Run]) -> None:
    tables = runs[0].tables
    s = tables.summary
    expected = {
        "kv_cache_usage": "KV cache usage: mean "
        f"{100 * s['kv_cache_usage_mean']:.1f} %, max "
        f"{100 * s['kv_cache_usage_max']:.1f} %, {s['num_preemptions']:,} preemptions",
        "queues": f"Queues: completed {s['completed']:,} requests, rejected "
        f"{s['rejected']:,}, {s['duration']:,.1f} s",
        "preemptions": f"Preemptions: {s['num_preemptions']:,} in all, "
        f"{s['num_preemptions_recompute']:,} by recompute, "
        f"{s['num_preemptions_swap']:,} by swap, {s['recomputed_tokens']:,} tokens "
        "computed again",
        "steps": f"Engine: {s['num_steps']:,} steps, {s['duration']:,.1f} s, "
        f"{s['total_output_tokens']:,} output tokens",
        "latency_cdfs": f"Latency: {s['completed']:,} completed requests, "
        f"{s['request_throughput']:,.4g} requests/s, "
        f"{s['output_throughput']:,.0f} output tokens/s",
        "fragmentation": "Fragmentation: ",
    }
    assert list(expected) == list(FIGURES)
    for name, draw in FIGURES.items():
        assert draw(tables).texts[0].get_text().startswith(expected[name])
    steps, requests = tables.step_table, tables.requests
    assert s["num_steps"] == steps.num_steps
    assert s["completed"] == len(requests["request_id"])
