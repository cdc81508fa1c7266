"""The figure of swapping against computing again, by the length of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from sim.costs.crossover import shown
from sim.views.plots import style

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from sim.costs.crossover import Band, Crossover, Swap
    from sim.views.plots.binning import Floats

    Counts = NDArray[np.int64]

_PANEL: Final = {"left": 0.085, "right": 0.965, "bottom": 0.09, "top": 0.845}
_LOOKS: Final = {
    "loop": (style.ORANGE, "-"),
    "batch": (style.BLUE, "--"),
    "kernel": (style.GREEN, "-."),
}
_NUM_POINTS: Final = 400


@style.house_style
def swap_or_recompute(found: Crossover, below: str) -> Figure:
    """Draw milliseconds over tokens, both logarithmic."""
    figure = style.titled_figure(_title(found), below)
    (axes,) = figure.subplots(squeeze=False, gridspec_kw=_PANEL).flat
    places = shown(found.num_tokens, _NUM_POINTS)
    tokens = found.num_tokens[places]
    label = "compute again" + (" (in part extrapolated)" if found.extrapolated else "")
    _draw(axes, tokens, found.recompute, places, style.BLACK, "-", label)
    for name, swap in found.swaps.items():
        colour, line = _LOOKS[name]
        label = f"swap by {name}" + (" (estimate)" if swap.extrapolated else "")
        _draw(axes, tokens, swap.band, places, colour, line, label)
        for length, seconds in crossings(found, swap):
            _mark(axes, length, 1e3 * seconds, colour)
    _scale(axes, found)
    style.legend_above(axes)
    return figure


def _draw(  # noqa: PLR0917 - one call a line
    axes: Axes,
    tokens: Counts,
    band: Band,
    places: Counts,
    colour: str,
    line: str,
    label: str,
) -> None:
    mid, low, high = (1e3 * part[places] for part in band)
    if (high > low).any():
        axes.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0.0)
    axes.plot(tokens, mid, line, color=colour, linewidth=1.8, label=label)


def crossings(found: Crossover, swap: Swap) -> Iterator[tuple[int, float]]:
    """Yield the lengths where one overtakes the other, with its seconds."""
    ends = int(found.num_tokens[0]), int(found.num_tokens[-1])
    seconds: Floats = found.recompute.seconds
    for part in swap.cheaper:
        for length in part:
            if length not in ends:
                place = int(found.num_tokens.searchsorted(length))
                yield length, float(seconds[place])


def _title(found: Crossover) -> str:
    """Return where swapping is cheaper, variants that agree named together."""
    alike: dict[str, list[str]] = {}
    for name, swap in found.swaps.items():
        where = found.where(swap.cheaper).replace(" tokens", "")
        where = "everywhere" if where.startswith("at every") else where
        alike.setdefault(where, []).append(name)
    parts = [f"by {' and '.join(names)} {where}" for where, names in alike.items()]
    return f"Swapping is cheaper: {'; '.join(parts)}"


def _mark(axes: Axes, length: int, milliseconds: float, colour: str) -> None:
    axes.plot(
        [length],
        [milliseconds],
        linestyle="none",
        marker="o",
        markersize=6.5,
        markerfacecolor=colour,
        markeredgecolor=style.BLACK,
        zorder=4,
    )
    axes.annotate(
        f"{length:,}",
        (length, milliseconds),
        xytext=(-4, 7),
        textcoords="offset points",
        ha="right",
        fontsize=9.0,
    )


def _scale(axes: Axes, found: Crossover) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(float(found.num_tokens[0]), float(found.num_tokens[-1]))
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=16))
    axes.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
    axes.yaxis.set_major_formatter(FuncFormatter(style.plain_number))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("out and in again, or computed again (ms)")
