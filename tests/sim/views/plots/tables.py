"""Tables of a run for the figures to draw, and ways to read what was drawn."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.patches import StepPatch
from PIL import Image

from sim.results import schema
from sim.views.plots import FIGURES, Tables, to_png

if TYPE_CHECKING:
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
