"""Lines over load: one for each value of a key, with what seeds do as a band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

from sim.errors import ConfigError
from sim.results.differences import short_names
from sim.views.plots.runs import looks_of
from sim.views.plots.style import margins, titled_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.views.plots.binning import Floats
    from sim.views.plots.sweeps.table import SweepRuns

MAX_SERIES = 16
_MARKERS = "osD^vPX*"
_LINES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


@dataclass(frozen=True)
class Series:
    """One line."""

    label: str  # what tells it apart
    look: Mapping[str, Any]  # colour, line and marker
    rows: pd.DataFrame  # its runs: of each load all seeds
    x: pd.Series[float]  # of each row, where it is drawn

    def values(self, name: str) -> tuple[Floats, Floats, Floats, Floats]:
        """Return loads, and of each the mean, the least and the most of a column."""
        found = self.rows[name].groupby(self.x).agg(["mean", "min", "max"]).dropna()
        x = found.index.to_numpy(dtype=np.float64)
        mean, low, high = (found[each].to_numpy(np.float64) for each in found)
        return x, mean, low, high


def load_of(runs: SweepRuns) -> tuple[pd.Series[float], str]:
    """Return the load of each run, and what its axis is called.

    Requests a second where the runs have that: the mean of the seeds of each load, so
    that they stand above each other.
    """
    key, frame = runs.load, runs.frame
    rate = frame.get("request_rate")
    if not key.endswith(("rate_scale", "arrivals.rate")) or rate is None:
        return frame[key].astype(np.float64), key.rpartition(".")[2].replace("_", " ")
    if "candidate" in frame:
        return rate.astype(np.float64), "offered load (requests/s)"
    means = rate.groupby(frame[key]).transform("mean")
    return means, "offered load (requests/s)"


def series_of(runs: SweepRuns, colour_by: str | None = None) -> list[Series]:
    """Return a line for each combination of the keys that are no load."""
    x, _ = load_of(runs)
    others = [key for key in runs.keys if key != runs.load]
    first = colour_by or runs.size or (others[0] if others else None)
    keys = [first, *(key for key in others if key != first)] if first else []
    if not keys:
        return [Series("", {**looks_of(1)[0], "marker": "o"}, runs.frame, x)]
    groups = list(runs.frame.groupby(keys, dropna=False, sort=True))
    if len(groups) > MAX_SERIES:
        raise ConfigError(
            f"a figure holds {MAX_SERIES} lines at most, got {len(groups)} from "
            f"{', '.join(keys)}; sweep over fewer values, or draw a heat map"
        )
    names = short_names(keys)
    return [
        Series(
            _label(names, dict(zip(keys, values, strict=True)), rows),
            look,
            rows,
            x[rows.index],
        )
        for (values, rows), look in zip(
            groups, _looks([v for v, _ in groups]), strict=True
        )
    ]


def _label(
    names: Mapping[str, str], values: Mapping[str, Any], rows: pd.DataFrame
) -> str:
    return ", ".join(_part(names, key, value, rows) for key, value in values.items())


def _part(names: Mapping[str, str], key: str, value: Any, rows: pd.DataFrame) -> str:
    """Return a value as a legend says it; of sizes, the blocks that came of them."""
    if key == "engine.num_gpu_blocks_override":
        return f"{int(rows['num_gpu_blocks'].iloc[0]):,} blocks"
    if key in ("candidate", "engine.preemption_mode") and isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return f"{names[key]} null"
    return (
        f"{names[key]} {value:g}"
        if isinstance(value, float)
        else f"{names[key]} {value}"
    )


def _looks(groups: Sequence[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield a colour and a marker for each first value, a line for each of the rest."""
    firsts = list(dict.fromkeys(map(_hashed, (each[0] for each in groups))))
    rests = list(dict.fromkeys(map(_hashed, (each[1:] for each in groups))))
    colours = [look["color"] for look in looks_of(len(firsts))]
    for first, *rest in groups:
        place = firsts.index(_hashed(first))
        yield {
            "color": colours[place],
            "marker": _MARKERS[place % len(_MARKERS)],
            "linestyle": _LINES[rests.index(_hashed(tuple(rest))) % len(_LINES)],
        }


def _hashed(value: Any) -> str:
    """Return a text by which values are told apart; NaN is not equal to itself."""
    return repr(value)


def panels_over_load(
    runs: SweepRuns,
    title: str,
    num_panels: int = 1,
    seeds: str = "lines: means of {}, bands: all of them",
) -> Figure:
    """Return a figure with panels side by side, all over load."""
    figure = titled_figure(title, runs.about(seeds))
    figure.subplots(
        ncols=num_panels,
        gridspec_kw=margins(0.07, 0.98, 0.09, 0.865, wspace=0.26),
    )
    _, label = load_of(runs)
    for axes in figure.axes:
        axes.set_xlabel(label)
    return figure


def draw_series(axes: Axes, each: Series, name: str) -> None:
    """Draw the means of a column over load, and a band from the least to the most."""
    x, mean, low, high = each.values(name)
    if (high > low).any():
        colour = each.look["color"]
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0.0)
    axes.plot(
        x,
        mean,
        label=each.label or None,
        markersize=4.5,
        linewidth=1.2 * mpl.rcParams["lines.linewidth"],
        **each.look,
    )


def legend_right_below(figure: Figure, num_rows: int = 1) -> None:
    """Put one legend for all panels under the title, in rows; make room for it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if not handles:
        return
    columns = -(-len(handles) // max(num_rows, 1))
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0165, 0.912),
        ncols=min(columns, 6),
        borderaxespad=0.0,
        handlelength=2.6,
        columnspacing=1.4,
    )
    rows = -(-len(handles) // min(columns, 6))
    make_room(figure, 0.885 - 0.031 * rows)


def make_room(figure: Figure, top: float) -> None:
    """Let all panels end at a share of the figure's height."""
    for axes in figure.axes:
        left, bottom, width, _ = axes.get_position().bounds
        axes.set_position((left, bottom, width, top - bottom))
