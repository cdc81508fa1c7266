"""One number of the runs over two keys that were varied."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter

from sim.config.plug import did_you_mean
from sim.results.summary.compared import short_names, short_value
from sim.views.plots.output import NotShownError
from sim.views.plots.style import house_style, margins, short_number, titled_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.compared.sweep_runs import SweepRuns

METRICS = ("p95_ttft_ms", "p99_ttft_ms")
"""Numbers of the cells unless one is named: the first that the runs have."""
MAX_PANELS = 4
_COLOURS = "cividis"
_MAX_ACROSS = 8
"""Characters of a row's name that fit beside the panel."""
_LOG_FROM = 30.0
"""Values that differ by more are coloured by their logarithms."""


@dataclass(frozen=True)
class HeatMap:
    """Draw a number over two keys that were varied, the mean of seeds in each cell."""

    # keys of the sweep; load and size of the cache unless given, or else the first
    # ones
    x: str | None = None
    y: str | None = None
    metric: str | None = None  # a number of ``summary.json``; else the first of METRICS

    @house_style
    def __call__(self, runs: SweepRuns) -> Figure:
        keys = _telling(runs)
        x, y = self._axes(runs, keys)
        known = (each for each in METRICS if each in runs.frame)
        metric = runs.column(self.metric or next(known, METRICS[0]))
        others = [key for key in keys if key not in (x, y)]
        groups = _groups(runs.frame, others)
        if len(groups) > MAX_PANELS:
            raise NotShownError(
                f"a heat map of {x} and {y} would need {len(groups)} panels for "
                f"{', '.join(others)}, and holds {MAX_PANELS}; sweep over fewer keys"
            )
        values = runs.frame.groupby(list(runs.keys), dropna=False)[metric].mean()
        low, high = values.min(), values.max()
        figure = titled_figure(
            f"{metric}: {low:,.6g} to {high:,.6g}",
            runs.about("means of {}, and half of their range"),
        )
        self._draw(figure, groups, (x, y, metric), (low, high))
        return figure

    def _axes(self, runs: SweepRuns, keys: Sequence[str]) -> tuple[str, str]:
        if len(keys) < 2:
            raise NotShownError(
                f"a heat map needs two keys that were varied, got "
                f"{', '.join(keys) or 'none'}; vary another"
            )
        x = _named(runs, "--x", self.x)
        y = _named(runs, "--y", self.y)
        if x is not None and x == y:
            raise NotShownError(f"--x and --y are both {x}; give another key for one")
        left = [key for key in _preferred(runs, keys) if key not in (x, y)]
        x = x or left.pop(0)
        return x, y or left.pop(0)

    def _draw(
        self,
        figure: Figure,
        groups: list[tuple[str, pd.DataFrame]],
        drawn: tuple[str, str, str],
        limits: tuple[float, float],
    ) -> None:
        (x, y, metric), (low, high) = drawn, limits
        norm = LogNorm(low, high) if 0.0 < low * _LOG_FROM < high else None
        looks: dict[str, Any] = {"cmap": _COLOURS}
        looks |= {"norm": norm} if norm else {"vmin": low, "vmax": high}
        figure.subplots(
            ncols=len(groups),
            sharey=True,
            gridspec_kw=margins(0.1, 0.9, 0.11, 0.84, wspace=0.06),
        )
        image = None
        for axes, (label, rows) in zip(list(figure.axes), groups, strict=True):
            image = _draw_cells(axes, rows, (x, y), (metric, looks))
            axes.set_title(label, loc="left", fontsize="medium")
        figure.axes[0].set_ylabel(y)
        assert image is not None
        bar = figure.colorbar(image, cax=figure.add_axes((0.92, 0.11, 0.016, 0.73)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(short_number))
        bar.ax.minorticks_off()


def _named(runs: SweepRuns, option: str, key: str | None) -> str | None:
    """Return the key that a user means, whole or by its end."""
    if key is None:
        return None
    found = [each for each in runs.keys if f".{each}".endswith(f".{key}")]
    if len(found) == 1:
        return found[0]
    hint = did_you_mean(key, runs.keys)
    raise NotShownError(
        f"{option} '{key}' is no key that was varied{hint} (there are: "
        f"{', '.join(runs.keys)})"
    )


def _telling(runs: SweepRuns) -> list[str]:
    """Return the varied keys but those whose texts follow from another key's."""
    texts = {
        key: runs.frame[key].map(_text)
        for key in runs.keys
        if runs.frame[key].dtype.kind not in "iufb"
    }
    kept: list[str] = []
    for key in sorted(texts, key=lambda key: -texts[key].nunique()):
        if all((texts[key].groupby(texts[k]).nunique() > 1).any() for k in kept):
            kept.append(key)
    return [key for key in runs.keys if key not in texts or key in kept]


def _preferred(runs: SweepRuns, keys: Sequence[str]) -> list[str]:
    try:
        first = [runs.load]
    except NotShownError:
        first = []
    return list(dict.fromkeys([*first, *filter(None, [runs.size]), *keys]))


def _groups(frame: pd.DataFrame, others: list[str]) -> list[tuple[str, pd.DataFrame]]:
    if not others:
        return [("", frame)]
    names = short_names(others)
    return [
        (
            ", ".join(
                f"{names[k]} {_text(v)}" for k, v in zip(others, values, strict=True)
            ),
            rows,
        )
        for values, rows in frame.groupby(others, dropna=False)
    ]


def _draw_cells(
    axes: Axes,
    rows: pd.DataFrame,
    keys: tuple[str, str],
    metric_and_looks: tuple[str, dict[str, Any]],
) -> Any:
    """Colour a cell for each pair of values, and write the number into it."""
    x, y = keys
    metric, looks = metric_and_looks
    cells = rows.pivot_table(
        metric, y, x, aggfunc=["mean", "min", "max"], dropna=False, sort=True
    )
    mean = cells["mean"].to_numpy(np.float64)
    half = (cells["max"] - cells["min"]).to_numpy(np.float64) / 2.0
    image = axes.imshow(mean, aspect="auto", origin="lower", **looks)
    names = cells["mean"].columns, cells["mean"].index
    axes.set_xticks(range(len(names[0])), [_text(value) for value in names[0]])
    rows_said = [_text(value) for value in names[1]]
    axes.set_yticks(
        range(len(rows_said)), [each.replace(" ", "\n") for each in rows_said]
    )
    if max(map(len, rows_said)) > _MAX_ACROSS:  # the margin holds no more
        axes.tick_params(axis="y", labelrotation=90.0)
        for label in axes.get_yticklabels():
            label.set_verticalalignment("center")
    axes.set_xlabel(x)
    axes.grid(visible=False)
    for (row, column), value in np.ndenumerate(mean):
        if np.isfinite(value):
            number = float(value), float(half[row, column])
            _write(axes, (column, row), number, image)
    return image


def _text(value: Any) -> str:
    if pd.isna(value):
        return "null"
    if isinstance(value, int | float):
        return f"{value:,g}"
    try:
        # Texts, tables and nothing under one key are JSON in a sweep's dataset.
        return short_value(json.loads(str(value)))
    except ValueError:
        return str(value)


def _write(
    axes: Axes, at: tuple[int, int], number: tuple[float, float], image: Any
) -> None:
    """Write a number and half of its range, light on dark and dark on light."""
    value, half = number
    red, green, blue, _ = image.cmap(image.norm(value))
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
    text = short_number(float(f"{value:.3g}"))
    if half > 0.0:
        text += f"\n± {short_number(float(f'{half:.2g}'))}"
    colour = "white" if is_dark else "black"
    axes.text(*at, text, ha="center", va="center", color=colour, fontsize="small")
