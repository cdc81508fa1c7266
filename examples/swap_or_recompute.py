"""Swap or recompute: the same beams, the same cache, two generations, both modes.

    .venv/bin/python examples/swap_or_recompute.py [FIGURE.png]

runs examples/beams_under_pressure.yaml four times (about a minute) and draws, side by
side, what the preempted requests cost: blocks swapped, blocks copied on write, and
tokens computed again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from kvsim import load_config, simulate
from sim.views.plots.style import BLUE, ORANGE, house_style, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvsim import Results

CONFIG = Path(__file__).with_name("beams_under_pressure.yaml")
GENERATIONS = {"cacheflow": "cacheflow (vLLM 0.1.0)", "v0": "v0 (vLLM 0.7.3)"}
MODES = {"swap": BLUE, "recompute": ORANGE}
PANELS = {
    "kv_cache_usage": "KV blocks in use (%)",
    "swapped": "blocks swapped\nin and out",
    "num_copied_blocks": "blocks copied\non write",
    "num_recomputed_tokens": "tokens\ncomputed again",
}
BIN_S = 2.0
X_MAX_S = 345.0
"""Room for the totals behind the last step."""


def run(scheduler: str, mode: str) -> Results:
    """Simulate one of the four cases."""
    overrides = [f"engine.scheduler={scheduler}", f"engine.preemption_mode={mode}"]
    return simulate(load_config(CONFIG, overrides))


def draw_case(column: list[Axes], results: Results, mode: str) -> None:
    """Add the curves of one case to a column of panels."""
    steps = results.steps
    time_s = steps["start_s"].to_numpy()
    swapped = steps["num_swapped_in_blocks"] + steps["num_swapped_out_blocks"]
    values = {name: steps.get(name, swapped).to_numpy() for name in PANELS}
    usage = 100.0 * values.pop("kv_cache_usage")
    bins = (time_s / BIN_S).astype(int)
    mean = np.bincount(bins, usage) / np.maximum(np.bincount(bins), 1)
    times_s = np.arange(len(mean)) * BIN_S
    label = f"{mode}: {results.summary['num_preemptions']:,} preemptions"
    column[0].plot(times_s, mean, color=MODES[mode], label=label)
    for axes, counts in zip(column[1:], values.values(), strict=True):
        axes.plot(time_s, np.cumsum(counts), color=MODES[mode])
        axes.annotate(
            f"{counts.sum():,}",
            (time_s[-1], counts.sum()),
            xytext=(4, 1 if mode == "swap" else -1),
            textcoords="offset points",
            color=MODES[mode],
            va="bottom" if mode == "swap" else "top",
            annotation_clip=False,
        )


@house_style
def draw(cases: dict[tuple[str, str], Results]) -> Figure:
    """Draw all cases, a generation a column."""
    figure = Figure(figsize=(11, 8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Swap or recompute: one request in ten searches with four beams",
        fontweight="bold",
    )
    grid = figure.subplots(len(PANELS), len(GENERATIONS), sharex=True, sharey="row")
    for column, (scheduler, title) in zip(grid.T, GENERATIONS.items(), strict=True):
        for mode in MODES:
            draw_case(list(column), cases[scheduler, mode], mode)
        column[0].set_title(title)
        column[0].legend(loc="lower left", ncols=2)
        column[-1].set_xlabel("simulated time (s)")
    for axes, label in zip(grid[:, 0], PANELS.values(), strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, X_MAX_S)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.align_ylabels()
    return figure


def main(path: Path) -> None:
    """Run all cases, print a line for each, and write the figure."""
    cases = {}
    for scheduler in GENERATIONS:
        for mode in MODES:
            results = cases[scheduler, mode] = run(scheduler, mode)
            numbers = results.summary
            print(
                f"{scheduler:9} {mode:9} {numbers['num_preemptions']:4,} preemptions, "
                f"{numbers['swapped_out_blocks']:6,} blocks swapped out, "
                f"{numbers['copied_blocks']:6,} copied, "
                f"{numbers['recomputed_tokens']:7,} tokens recomputed; "
                f"TTFT mean {numbers['mean_ttft_ms']:5,.0f} ms, "
                f"p99 {numbers['p99_ttft_ms']:6,.0f} ms"
            )
    path.write_bytes(to_png(draw(cases)))
    print(f"figure in {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "figure", nargs="?", type=Path, default=Path("swap_or_recompute.png")
    )
    main(parser.parse_args().figure)
