from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.markers import CARETDOWN
from matplotlib.patches import StepPatch
from PIL import Image

from sim import schema
from sim.metrics import SERVED
from sim.plots import FIGURES, Tables, draw_all, to_png
from sim.plots.binning import StepColumns, cdf_points, extremes_per_column
from sim.plots.latency import finished_requests
from sim.plots.preemption import MAX_BARS, bar_width_s
from sim.plots.style import plain_number, short_number, time_unit
from sim.request import RequestStatus

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

NUM_GPU_BLOCKS = 27_431
BLOCK_SIZE = 16
PARTS = ("gemm_s", "prefill_attention_s", "decode_attention_s", "head_s", "host_s")


def steps_table(num_steps: int, rng: np.random.Generator) -> pd.DataFrame:
    """An hour at 100k steps: the cache fills up, stays full, then drains."""
    table = {name: np.zeros(num_steps) for name in schema.STEPS}
    phase = np.linspace(0.0, 1.0, num_steps)
    is_prefill = rng.random(num_steps) < 0.1
    prefill = np.where(is_prefill, rng.integers(64, 8000, num_steps), 0)
    wave = np.sin(phase * 12.0) + rng.normal(0.0, 0.3, num_steps)
    running = np.clip(240.0 * np.minimum(phase * 4.0, 1.0) + 12.0 * wave, 1, 256)
    running = np.floor(running * np.where(phase > 0.95, (1.0 - phase) * 20.0, 1.0)) + 1
    usage = np.clip(running / 240.0 + 0.01 * wave, 0.001, 1.0)
    parts = {
        "gemm_s": 0.012 + prefill * 2e-5,
        "prefill_attention_s": prefill * 4e-6,
        "decode_attention_s": running * 6e-5,
        "head_s": np.full(num_steps, 0.0012),
        "host_s": 0.002 + rng.exponential(0.0008, num_steps),
    }
    latency = np.sum(list(parts.values()), axis=0)
    idle = np.where(rng.random(num_steps) < 2e-4, 5.0, 0.0)
    physical = np.ceil(usage * NUM_GPU_BLOCKS)
    stored = physical * BLOCK_SIZE - np.floor(running * rng.uniform(6, 9, num_steps))
    table |= parts | {
        "step": np.arange(num_steps),
        "start_s": np.concatenate([[0.0], np.cumsum(latency + idle)[:-1]]),
        "latency_s": latency,
        "num_running": running,
        "num_waiting": np.floor(np.clip(phase - 0.25, 0, 0.45) * 900 + 4 * abs(wave)),
        "num_batched_tokens": prefill + running,
        "num_decodes": running,
        "num_prefills": is_prefill,
        "num_prefill_tokens": prefill,
        "kv_cache_usage": usage,
        "num_physical_blocks": physical,
        "num_logical_blocks": np.ceil(physical * 1.2),
        "num_physical_tokens": np.maximum(stored, 0),
        "num_logical_tokens": np.floor(np.maximum(stored, 0) * 1.2),
        "num_preempted": usage >= 1.0,
    }
    return pd.DataFrame(
        {n: np.asarray(table[n]).astype(t) for n, t in schema.STEPS.items()}
    )


def requests_table(num_requests: int, rng: np.random.Generator) -> pd.DataFrame:
    ttft = rng.lognormal(-1.0, 1.4, num_requests)
    tpot = rng.gamma(9.0, 0.004, num_requests)
    output = rng.integers(1, 600, num_requests)
    tpot[output < 2] = np.nan
    status = np.full(num_requests, "finished_stopped", dtype=object)
    status[: num_requests // 50] = "finished_rejected"
    lost = status == "finished_rejected"
    ttft[lost] = np.nan
    tpot[lost] = np.nan
    table: dict[str, Any] = {name: np.zeros(num_requests) for name in schema.REQUESTS}
    table |= {
        "request_id": np.arange(num_requests),
        "num_output_tokens": output,
        "status": status,
        "reason": np.full(num_requests, ""),
        "ttft_s": ttft,
        "tpot_s": tpot,
        "e2el_s": ttft + np.nan_to_num(tpot) * output,
    }
    return pd.DataFrame(table)


def preemptions_table(
    steps: pd.DataFrame, rng: np.random.Generator, modes: tuple[str, ...]
) -> pd.DataFrame:
    hit = steps[steps["num_preempted"] > 0]
    burst = np.sin(hit["start_s"].to_numpy() / 90.0) > 0.6
    hit = hit[burst & (rng.random(len(hit)) < 0.1)]
    num = len(hit)
    table: dict[str, Any] = {name: np.zeros(num) for name in schema.PREEMPTIONS}
    table |= {
        "time_s": hit["start_s"].to_numpy(),
        "step": hit["step"].to_numpy(),
        "reason": np.full(num, "no free blocks"),
        "mode": rng.choice(np.array(modes), num),
        "kv_cache_usage_before": rng.uniform(0.985, 1.0, num),
        "kv_cache_usage_after": rng.uniform(0.97, 0.985, num),
    }
    return pd.DataFrame(table)


def summary_of(
    steps: pd.DataFrame, requests: pd.DataFrame, preemptions: pd.DataFrame
) -> dict[str, Any]:
    done = requests[requests["status"] == "finished_stopped"]
    swaps = int((preemptions["mode"] == "swap").sum())
    quantiles = {
        f"p{p}_{metric}_ms": 1e3 * float(np.nanquantile(done[f"{metric}_s"], p / 100))
        for p in (50, 90, 99)
        for metric in ("ttft", "tpot", "e2el")
    }
    return quantiles | {
        "title": "Llama-3.1-8B on h200_sxm, v1 0.11, 14.2 req/s",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks": NUM_GPU_BLOCKS,
        "num_steps": len(steps),
        "num_preemptions": len(preemptions),
        "num_preemptions_swap": swaps,
        "num_preemptions_recompute": len(preemptions) - swaps,
        "recomputed_tokens": 812 * len(preemptions),
        "duration": 3312.25,
        "completed": len(done),
        "rejected": len(requests) - len(done),
        "request_throughput": 14.1987,
        "output_throughput": 4210.4,
        "total_output_tokens": int(done["num_output_tokens"].sum()),
        "kv_cache_usage_mean": 0.83125,
        "kv_cache_usage_max": float(steps["kv_cache_usage"].max()),
    }


def a_run(num_steps: int, *, modes: tuple[str, ...] = ("recompute",)) -> Tables:
    rng = np.random.default_rng(7)
    steps = steps_table(num_steps, rng)
    requests = requests_table(max(num_steps // 2, 100), rng)
    preemptions = preemptions_table(steps, rng, modes)
    if "swap" in modes:
        full = steps["kv_cache_usage"] >= 1.0
        steps["num_swapped"] = np.where(full, 20, 0)
        steps["cpu_cache_usage"] = np.where(full, 0.4, 0.0)
        for part in ("swap_s", "copy_s", "allreduce_s"):
            steps[part] = 0.05 * steps["host_s"]
    summary = summary_of(steps, requests, preemptions)
    return Tables(steps, requests, preemptions, summary)


@pytest.fixture(scope="module")
def full_run() -> Tables:
    return a_run(20_000, modes=("recompute", "swap"))


@pytest.fixture(scope="module")
def written(full_run: Tables, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    t = full_run
    out = tmp_path_factory.mktemp("plots") / "new" / "figures"
    return draw_all(t.steps, t.requests, t.preemptions, t.summary, out)


def empty_run() -> Tables:
    steps = pd.DataFrame(columns=list(schema.STEPS))
    requests = pd.DataFrame(columns=list(schema.REQUESTS))
    return Tables(steps, requests, pd.DataFrame(columns=list(schema.PREEMPTIONS)), {})


def pixels_of(png: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=np.float64)


def texts_of(figure: Figure) -> list[str]:
    inside = [text.get_text() for axes in figure.axes for text in axes.texts]
    return [text.get_text() for text in figure.texts] + inside


def legend_of(figure: Figure) -> list[str]:
    legends = [axes.get_legend() for axes in figure.axes]
    return [t.get_text() for legend in legends if legend for t in legend.get_texts()]


def drawn_span(figure: Figure, panel: int, label: str) -> tuple[float, float]:
    """Lowest and highest value of the band of this label."""
    handles, labels = figure.axes[panel].get_legend_handles_labels()
    (band,) = (h for h, name in zip(handles, labels, strict=True) if label in name)
    assert isinstance(band, StepPatch)
    values, _, baseline = band.get_data()
    return float(np.nanmin(baseline)), float(np.nanmax(values))


def assert_draws(tables: Tables) -> dict[str, Figure]:
    figures = {name: draw(tables) for name, draw in FIGURES.items()}
    for figure in figures.values():
        assert pixels_of(to_png(figure)).std() > 1.0
    return figures


# --- files ---------------------------------------------------------------------


def test_every_figure_is_written_and_shows_something(written: list[Path]) -> None:
    assert [path.name for path in written] == [
        "kv_cache_usage.png",
        "queues.png",
        "preemptions.png",
        "steps.png",
        "latency_cdfs.png",
        "fragmentation.png",
    ]
    for path in written:
        grey = pixels_of(path.read_bytes())
        assert grey.shape == (900, 1600)
        assert grey.std() > 5.0
        edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        assert (edge == 255.0).all(), f"{path.name} is cut off at its edge"


def test_same_tables_give_the_same_bytes(
    full_run: Tables, written: list[Path], tmp_path: Path
) -> None:
    t = full_run
    again = draw_all(t.steps, t.requests, t.preemptions, t.summary, tmp_path)
    for one, other in zip(written, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_png_names_no_software_and_no_date(full_run: Tables) -> None:
    png = to_png(FIGURES["queues"](full_run))
    assert set(Image.open(io.BytesIO(png)).info) <= {"dpi"}


def test_style_of_the_user_does_not_show(full_run: Tables) -> None:
    plain = to_png(FIGURES["queues"](full_run))
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 9, "savefig.dpi": 50}):
        assert to_png(FIGURES["queues"](full_run)) == plain


# --- words ---------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_states_its_unit(full_run: Tables, name: str) -> None:
    figure = FIGURES[name](full_run)
    bottom = [axes for axes in figure.axes if axes.get_xlabel()]
    assert bottom
    units = ("(s)", "(ms)", "(min)", "(h)", "(%)", "(requests)", "(tokens)")
    more = (*units, "(number)", "tokens per step", "per minute (in bins of")
    for axes in bottom:
        assert axes.get_xlabel().endswith(units)
    shown = [axes.get_ylabel() for axes in figure.axes]
    if name == "latency_cdfs":
        shown = shown[:1]
    for label in shown:
        assert any(unit in label for unit in more), label


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("kv_cache_usage", {"num_preemptions": "{:,} preemptions"}),
        ("kv_cache_usage", {"kv_cache_usage_mean": "mean {:.1%}"}),
        ("queues", {"completed": "{:,} requests", "rejected": "rejected {:,}"}),
        ("preemptions", {"num_preemptions": "{:,} in all"}),
        ("preemptions", {"num_preemptions_swap": "{:,} by swap"}),
        ("steps", {"num_steps": "{:,} steps", "duration": "{:,.1f} s"}),
        ("latency_cdfs", {"completed": "{:,} completed requests"}),
    ],
)
def test_title_gives_the_numbers_of_the_summary(
    full_run: Tables, name: str, keys: dict[str, str]
) -> None:
    headline, run, *_ = texts_of(FIGURES[name](full_run))
    assert run == full_run.summary["title"]
    for key, text in keys.items():
        assert text.format(full_run.summary[key]).replace("%", " %") in headline


def test_a_single_preemption_is_not_plural(full_run: Tables) -> None:
    summary = dict(full_run.summary) | {"num_preemptions": 1, "duration": 1.0}
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, summary)
    assert texts_of(FIGURES["kv_cache_usage"](tables))[0].endswith("1 preemption")
    assert "1.0 s," in texts_of(FIGURES["steps"](tables))[0]


@pytest.mark.parametrize("name", FIGURES)
def test_all_words_are_inside_and_apart(full_run: Tables, name: str) -> None:
    t = full_run
    big = dict(t.summary) | {"num_gpu_blocks": 9_999_999, "title": "x" * 300}
    steps = t.steps.assign(
        num_running=9_999_999, num_waiting=9_999_999, num_physical_blocks=9_999_999
    )
    many = pd.concat([t.preemptions] * 500, ignore_index=True)
    figure = FIGURES[name](Tables(steps, t.requests, many, big))
    grey = pixels_of(to_png(figure))
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    assert (edge == 255.0).all()
    subtitle = figure.texts[1].get_window_extent()
    for axes in figure.axes:
        if legend := axes.get_legend():
            box = legend.get_window_extent()
            assert 0.0 < box.x0 < box.x1 < 1600.0
            assert box.y1 < subtitle.y0


def test_long_or_dollared_titles_stay_inside(full_run: Tables) -> None:
    summary = dict(full_run.summary) | {"title": "cost $1 $2 " * 40}
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, summary)
    grey = pixels_of(to_png(FIGURES["queues"](tables)))
    assert (grey[:, -8:] == 255.0).all()


# --- what is drawn -------------------------------------------------------------


def test_extremes_survive_on_the_screen(full_run: Tables) -> None:
    steps = full_run.steps.copy()
    steps.loc[777, "kv_cache_usage"] = 0.0
    steps.loc[9_999, "num_running"] = 9_876
    steps.loc[15_001, "num_waiting"] = 54_321
    steps.loc[4_242, "num_physical_tokens"] = 0
    tables = Tables(steps, full_run.requests, full_run.preemptions, full_run.summary)
    spans = {
        "kv_cache_usage": (0, "GPU blocks", 100.0 * steps["kv_cache_usage"]),
        "queues": (0, "running, min", steps["num_running"]),
        "steps": (0, "min to max", 1e3 * steps["latency_s"]),
        "fragmentation": (0, "room", 16.0 * steps["num_physical_blocks"]),
    }
    for name, (panel, label, raw) in spans.items():
        span = drawn_span(FIGURES[name](tables), panel, label)
        low = raw.min() if name == "steps" else 0.0  # the engine pauses now and then
        assert span == pytest.approx((low, raw.max()), rel=1e-12), name
    waiting = drawn_span(FIGURES["queues"](tables), 1, "waiting, min")
    assert waiting[1] == 54_321
    assert drawn_span(FIGURES["fragmentation"](tables), 1, "empty")[1] == 100.0


def test_preemptions_are_marked_where_they_were(full_run: Tables) -> None:
    figure = FIGURES["kv_cache_usage"](full_run)
    (marks,) = (line for line in figure.axes[0].lines if line.get_marker() == CARETDOWN)
    x, y = (np.asarray(values, dtype=np.float64) for values in marks.get_data())
    seconds, _ = time_unit(full_run.stop_s)
    table = full_run.preemptions
    assert x.size <= 800
    assert set(np.round(x * seconds, 6)) <= set(np.round(table["time_s"], 6))
    assert y.max() == pytest.approx(100.0 * table["kv_cache_usage_before"].max())
    assert y.min() == pytest.approx(100.0 * table["kv_cache_usage_before"].min())
    assert any(f"{len(table):,} preemptions" in text for text in legend_of(figure))


def test_bars_and_lines_count_every_preemption(full_run: Tables) -> None:
    figure = FIGURES["preemptions"](full_run)
    rate, total = figure.axes
    width_min = bar_width_s(full_run.stop_s) / 60.0
    bars = [patch.get_data() for patch in rate.patches if isinstance(patch, StepPatch)]
    counted = sum((data[0] - data[2]).sum() * width_min for data in bars)
    assert counted == pytest.approx(len(full_run.preemptions))
    ends = [np.asarray(line.get_ydata())[-1] for line in total.lines]
    modes = full_run.preemptions["mode"].value_counts()
    assert ends == [modes.sum(), modes["recompute"], modes["swap"]]


def test_cpu_usage_is_drawn_only_if_blocks_were_swapped(full_run: Tables) -> None:
    without = a_run(2_000)
    assert "CPU blocks, mean" in legend_of(FIGURES["kv_cache_usage"](full_run))
    assert "CPU blocks, mean" not in legend_of(FIGURES["kv_cache_usage"](without))
    assert len(FIGURES["queues"](full_run).axes[0].patches) == 4
    assert len(FIGURES["queues"](without).axes[0].patches) == 2


def test_percentiles_are_those_of_the_summary(full_run: Tables) -> None:
    summary = dict(full_run.summary) | {"p90_tpot_ms": 123.0, "p99_e2el_ms": 45_678.0}
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, summary)
    legend = legend_of(FIGURES["latency_cdfs"](tables))
    assert legend[4] == "p90 123 ms"
    assert legend[8] == "p99 45.7 s"


def test_percentiles_are_computed_where_the_summary_is_silent(full_run: Tables) -> None:
    tables = Tables(full_run.steps, full_run.requests, full_run.preemptions, {})
    known = legend_of(FIGURES["latency_cdfs"](full_run))
    assert legend_of(FIGURES["latency_cdfs"](tables)) == known


def test_only_finished_requests_count() -> None:
    served = [status.value in SERVED for status in RequestStatus]
    requests = pd.DataFrame({"status": [status.value for status in RequestStatus]})
    tables = Tables(pd.DataFrame(), requests, pd.DataFrame(), {})
    assert sum(served) == 2
    assert finished_requests(tables).tolist() == served


def test_wide_ranges_are_logarithmic(full_run: Tables) -> None:
    ttft, tpot, _ = FIGURES["latency_cdfs"](full_run).axes
    assert (ttft.get_xscale(), tpot.get_xscale()) == ("log", "linear")
    assert FIGURES["steps"](full_run).axes[0].get_yscale() == "linear"
    steps = full_run.steps.copy()
    steps.loc[500, "latency_s"] = 60.0
    steps["start_s"] += np.where(steps.index > 500, 60.0, 0.0)
    slow = Tables(steps, full_run.requests, full_run.preemptions, full_run.summary)
    assert FIGURES["steps"](slow).axes[0].get_yscale() == "log"


# --- edge cases ----------------------------------------------------------------


def test_empty_tables_say_so() -> None:
    figures = assert_draws(empty_run())
    assert "No preemptions in this run" in texts_of(figures["preemptions"])
    assert "No engine step in this run" in texts_of(figures["kv_cache_usage"])
    assert_draws(Tables(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), {}))


def test_preemptions_counted_but_not_recorded_are_named() -> None:
    t = empty_run()
    tables = Tables(t.steps, t.requests, t.preemptions, {"num_preemptions": 12})
    texts = texts_of(FIGURES["preemptions"](tables))
    assert "12 preemptions, none of them in the table" in texts


def test_numbers_of_the_summary_may_be_missing_or_nan(full_run: Tables) -> None:
    t = full_run
    silly = {
        "kv_cache_usage_mean": float("nan"),
        "num_preemptions": None,
        "title": None,
    }
    figures = assert_draws(Tables(t.steps, t.requests, t.preemptions, silly))
    assert texts_of(figures["kv_cache_usage"])[:2] == ["KV cache usage", ""]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_few_steps(num_steps: int) -> None:
    t = a_run(200)
    one = Tables(t.steps[:num_steps], t.requests, t.preemptions[:0], t.summary)
    figures = assert_draws(one)
    assert drawn_span(figures["queues"], 0, "running, min")[1] == (
        t.steps["num_running"][:num_steps].max()
    )


def test_one_request() -> None:
    t = a_run(200)
    done = t.requests[t.requests["status"] == "finished_stopped"]
    assert_draws(Tables(t.steps, done[:1], t.preemptions, {}))


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


def test_all_preemptions_at_one_time() -> None:
    t = a_run(5_000)
    now = t.preemptions.assign(time_s=t.stop_s, kv_cache_usage_before=1.0)
    tables = Tables(t.steps, t.requests, now, {})
    figures = assert_draws(tables)
    (marks,) = (
        x
        for x in figures["kv_cache_usage"].axes[0].lines
        if x.get_marker() == CARETDOWN
    )
    assert np.size(marks.get_xdata()) <= 2
    (bars,) = figures["preemptions"].axes[0].patches
    assert isinstance(bars, StepPatch)
    assert bars.get_data()[0][-1] * bar_width_s(tables.stop_s) / 60.0 == pytest.approx(
        len(now)
    )


def test_a_cost_model_without_parts() -> None:
    t = a_run(500)
    nothing = dict.fromkeys(schema.STEPS.keys() & set(PARTS), 0.0)
    tables = Tables(t.steps.assign(**nothing), t.requests, t.preemptions, t.summary)
    assert "The cost model gives no parts" in texts_of(FIGURES["steps"](tables))


# --- binning -------------------------------------------------------------------


def columns_of(*spans: tuple[float, float], stop_s: float, num: int) -> StepColumns:
    start, latency = (np.array(values) for values in zip(*spans, strict=True))
    return StepColumns(start, latency, stop_s, num)


def test_columns_weight_by_time_and_leave_gaps() -> None:
    columns = columns_of((0.0, 3.0), (3.0, 1.0), (8.0, 4.0), stop_s=12.0, num=6)
    values = np.array([10.0, 20.0, 5.0])
    nan = float("nan")
    expected = {
        "low": [10.0, 10.0, nan, nan, 5.0, 5.0],
        "high": [10.0, 20.0, nan, nan, 5.0, 5.0],
        "mean": [10.0, 15.0, nan, nan, 5.0, 5.0],
        "median": [10.0, 15.0, nan, nan, 5.0, 5.0],
    }
    for name, heights in expected.items():
        np.testing.assert_allclose(getattr(columns, name)(values), heights)


def test_an_idle_engine_is_empty() -> None:
    start, latency = np.array([0.0, 3.0, 8.0]), np.array([3.0, 1.0, 3.0])
    columns = StepColumns(start, latency, 12.0, 6, idle_is_zero=True)
    values = np.array([10.0, 20.0, 5.0])
    assert columns.low(values).tolist() == [10.0, 10.0, 0.0, 0.0, 5.0, 0.0]
    assert columns.high(values).tolist() == [10.0, 20.0, 0.0, 0.0, 5.0, 5.0]
    assert columns.mean(values).tolist() == [10.0, 15.0, 0.0, 0.0, 5.0, 2.5]
    nothing = StepColumns(np.zeros(0), np.zeros(0), 1.0, 2, idle_is_zero=True)
    assert nothing.mean(np.zeros(0)).tolist() == [0.0, 0.0]


def test_mean_of_the_curve_is_the_mean_of_the_summary(full_run: Tables) -> None:
    """`sim.metrics` counts idle time as an empty cache; so does the figure."""
    usage, latency_s = full_run.step("kv_cache_usage"), full_run.step("latency_s")
    drawn = full_run.state.mean(usage).mean()
    assert drawn == pytest.approx(usage @ latency_s / full_run.stop_s, rel=1e-9)


def test_columns_agree_with_a_plain_loop() -> None:
    rng = np.random.default_rng(3)
    latency = rng.exponential(1.0, 300)
    start = np.cumsum(latency + np.where(rng.random(300) < 0.1, 4.0, 0.0)) - latency
    values = rng.normal(size=300)
    stop_s = float(start[-1] + latency[-1])
    columns = StepColumns(start, latency, stop_s, 70)
    low, high, mean = (f(values) for f in (columns.low, columns.high, columns.mean))
    edges = columns.edges_s
    for i, (left, right) in enumerate(itertools.pairwise(edges)):
        inside = np.clip(
            np.minimum(start + latency, right) - np.maximum(start, left), 0, None
        )
        held = values[inside > 0]
        if not held.size:
            assert np.isnan([low[i], high[i], mean[i]]).all()
            continue
        assert (low[i], high[i]) == (held.min(), held.max())
        assert mean[i] == pytest.approx((values @ inside) / inside.sum(), abs=1e-9)


def test_a_step_ends_at_the_latest_when_the_next_one_starts() -> None:
    columns = columns_of((0.0, 9.0), (1.0, 1.0), stop_s=2.0, num=2)
    assert columns.high(np.array([7.0, 3.0])).tolist() == [7.0, 3.0]


def test_thinning_keeps_extremes_of_each_column() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.uniform(0, 10, 5_000), rng.normal(size=5_000)
    edges = np.linspace(0, 10, 11)
    kept = extremes_per_column(x, y, edges)
    assert kept.size == 20
    for left in range(10):
        inside = (x >= left) & (x < left + 1)
        chosen = y[kept][(x[kept] >= left) & (x[kept] < left + 1)]
        assert sorted(chosen) == [y[inside].min(), y[inside].max()]


@pytest.mark.parametrize("size", [1, 2, 10, 5_000])
def test_cdf_keeps_both_ends(size: int) -> None:
    values = np.random.default_rng(size).lognormal(size=size)
    x, share = cdf_points(values, 100)
    assert x.size <= 100
    assert (x[0], x[-1], share[-1]) == (values.min(), values.max(), 1.0)
    for at, below in zip(x, share, strict=True):
        assert below == pytest.approx((values <= at).mean())


@pytest.mark.parametrize("stop_s", [0.003, 1.0, 59.0, 3600.0, 86_400.0, 3e7, 3e9])
def test_bars_are_few_and_round(stop_s: float) -> None:
    assert stop_s / bar_width_s(stop_s) <= MAX_BARS * (1 + 1e-9)


def test_units_of_time() -> None:
    names = [time_unit(s)[1] for s in (1, 600, 601, 10_800, 10_801)]
    assert names == ["s", "s", "min", "min", "h"]


def test_numbers_are_written_plainly() -> None:
    written = [plain_number(value) for value in (0.1 + 0.2, 1234567.0, 20.0)]
    assert written == ["0.3", "1,234,567", "20"]
    short = [short_number(value) for value in (0.0, 9_999.0, 12_500.0, 3.2e6)]
    assert short == ["0", "9,999", "12.5k", "3.2M"]
