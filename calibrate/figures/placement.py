"""Roofline: what every call does a byte, and how fast it does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from calibrate.device import DeviceFacts
from calibrate.figures.axes import title_of
from sim.views.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    house_style,
    legend_above,
    plain_number,
    say,
    titled_figure,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from calibrate.figures.subject import Subject
    from sim.costs.measured.profile import Profile

    Floats = NDArray[np.float64]

_PANEL: Final = {"left": 0.075, "right": 0.98, "top": 0.835, "bottom": 0.085}
_LOOKS: Final = {
    "decode_attention": (BLUE, "o"),
    "prefill_attention": (VERMILLION, "s"),
    "mixed_attention": (GREEN, "^"),
    "gemm": (PURPLE, "D"),
    "gemm8": (ORANGE, "v"),
    "gemm4": (SKY, "P"),
}
"""Colour and marker by operation, and by bits of the weights for products."""
_CELLS_AN_OCTAVE: Final = 8
"""Points closer than this are drawn once."""
_DEPTH: Final = 3e4
"""Peak over the smallest rate that is drawn."""


@dataclass(frozen=True, slots=True)
class Cloud:
    """Calls of one operation, in one precision."""

    label: str
    key: str
    """Of `_LOOKS`."""
    bits: int
    bytes: Floats
    """(n,) that must cross the memory bus once."""
    flops: Floats
    """(n,) of matrix units."""
    time_s: Floats

    @property
    def intensity(self) -> Floats:
        """FLOP a byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> Floats:
        """FLOP/s achieved."""
        return self.flops / self.time_s


@house_style
def roofline_placement(
    profile: Profile, subjects: Sequence[Subject], source: str
) -> Figure:
    """Draw achieved FLOP/s over FLOP a byte, below the datasheet and the best seen.

    Bytes are those that a call must move at least: keys and values, weights, inputs and
    outputs, once each. A call whose bytes fit the L2 cache may lie above the slope of
    the memory; it is drawn hollow, and does not count for the best seen.
    """
    device = DeviceFacts.from_json(profile.device)
    clouds = [cloud for subject in subjects for cloud in clouds_of(subject)]
    figure = titled_figure(_title(clouds, device), source)
    (axes,) = figure.subplots(squeeze=False, gridspec_kw=_PANEL).flat
    if not clouds:
        say(axes, "No table of attention or matrix products")
        axes.set_axis_off()
        return figure
    axes.set_xscale("log")
    axes.set_yscale("log")
    slowest = _slowest(clouds, device)
    for cloud in sorted(clouds, key=lambda cloud: -len(cloud.time_s)):
        _draw_cloud(axes, cloud, device, slowest)
    _limit(axes, clouds, device, slowest)
    _draw_ceilings(axes, clouds, device)
    _scale(axes)
    legend_above(axes)
    return figure


def clouds_of(subject: Subject) -> list[Cloud]:
    """Return the calls of an operation by precision; none for one without FLOPs."""
    operation, columns = subject.points.operation, subject.columns
    if operation not in _LOOKS:
        return []
    work = subject.estimator.work(columns)
    if operation != "gemm":
        flops = work.flops_s * subject.estimator.device.flops_per_s
        name = title_of(operation)
        return [Cloud(name, operation, 16, work.bytes, flops, subject.time_s)]
    m, n, k = (columns[key].astype(np.float64) for key in "mnk")
    found = []
    for bits in np.unique(columns["weight_bits"])[::-1].tolist():
        own = columns["weight_bits"] == bits
        found.append(
            Cloud(
                f"GEMM, {bits} bits",
                "gemm" if bits >= 16 else f"gemm{bits}",
                bits,
                work.bytes[own],
                (2.0 * m * n * k)[own],
                subject.time_s[own],
            )
        )
    return found


def best_bandwidth(clouds: Sequence[Cloud], device: DeviceFacts) -> float | None:
    """Return the most bytes/s that a call reached that does not fit the L2 cache."""
    rates = [
        cloud.bytes[~_cached(cloud, device)] / cloud.time_s[~_cached(cloud, device)]
        for cloud in clouds
    ]
    return max((float(rate.max()) for rate in rates if rate.size), default=None)


def best_flops(clouds: Sequence[Cloud], bits: int) -> float | None:
    rates = [float(cloud.rate.max()) for cloud in clouds if cloud.bits == bits]
    return max(rates, default=None)


def _cached(cloud: Cloud, device: DeviceFacts) -> NDArray[np.bool_]:
    fits: NDArray[np.bool_] = cloud.bytes <= device.l2_bytes
    return fits


def _title(clouds: Sequence[Cloud], device: DeviceFacts) -> str:
    said = []
    bandwidth, flops = best_bandwidth(clouds, device), best_flops(clouds, 16)
    if bandwidth:
        share = bandwidth / device.bandwidth_bytes_per_s
        said.append(f"{bandwidth / 1e12:.2f} TB/s ({share:.0%} of the datasheet)")
    if flops:
        share = flops / device.flops_per_s
        said.append(f"{flops / 1e12:,.0f} TFLOP/s in 16 bits ({share:.0%})")
    return "Roofline: at best " + (" and ".join(said) or "nothing to place")


def _slowest(clouds: Sequence[Cloud], device: DeviceFacts) -> float:
    peak = _peak(device, min(cloud.bits for cloud in clouds))
    return max(min(float(cloud.rate.min()) for cloud in clouds), peak / _DEPTH)


def _draw_cloud(axes: Axes, cloud: Cloud, device: DeviceFacts, slowest: float) -> None:
    colour, marker = _LOOKS.get(cloud.key, (GREY, "x"))
    looks: dict[str, Any] = {
        "color": colour,
        "marker": marker,
        "linestyle": "none",
        "markersize": 3.6,
    }
    cached, drawn = _cached(cloud, device), cloud.rate >= slowest
    for own, face, label in (
        (cached & drawn, "none", None),
        (~cached & drawn, colour, cloud.label),
    ):
        x, y = _thinned(cloud.intensity[own], cloud.rate[own] / 1e12)
        axes.plot(
            x, y, **looks, markerfacecolor=face, markeredgewidth=0.6, alpha=0.75,
            label=label,
        )  # fmt: skip


def _thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return one point of each cell, so that a table of 100,000 stays legible."""
    cells = np.rint(_CELLS_AN_OCTAVE * np.log2(np.stack([x, y], axis=1)))
    _, first = np.unique(cells, axis=0, return_index=True)
    return x[first], y[first]


def _limit(
    axes: Axes, clouds: Sequence[Cloud], device: DeviceFacts, slowest: float
) -> None:
    x = np.concatenate([cloud.intensity for cloud in clouds])
    y = np.concatenate([cloud.rate for cloud in clouds])
    peak = _peak(device, min(cloud.bits for cloud in clouds))
    drawn = x[y >= slowest]
    axes.set_xlim(float(drawn.min()) / 1.6, float(drawn.max()) * 1.6)
    axes.set_ylim(slowest / 1.6e12, max(float(y.max()), peak) * 1.9e-12)
    if left_out := len(x) - len(drawn):
        label = f"{left_out:,} slower calls not drawn"
        axes.plot([], [], linestyle="none", label=label)


def _peak(device: DeviceFacts, bits: int) -> float:
    peak = device.flops_per_s if bits >= 16 else device.flops_8bit_per_s
    return 2.0 * peak if bits < 8 else peak


def _draw_ceilings(axes: Axes, clouds: Sequence[Cloud], device: DeviceFacts) -> None:
    """Draw the datasheet's roof of each precision, and the best that was seen."""
    bandwidth = device.bandwidth_bytes_per_s
    seen = best_bandwidth(clouds, device)
    widths = sorted({cloud.bits for cloud in clouds}, reverse=True)
    for bits in widths:
        first = bits == widths[0]
        peak, reached = _peak(device, bits), best_flops(clouds, bits)
        _roof(axes, bandwidth, peak, label="datasheet" if first else None)
        axes.text(
            peak / bandwidth / 1.12, 1e-12 * peak,
            f"{bits} bits: {peak / 1e12:,.0f} TFLOP/s",
            ha="right", va="center", color=GREY,
        )  # fmt: skip
        if seen and reached:
            label = "best measured" if first else None
            _roof(axes, seen, reached, label=label, linestyle="--")
    _name_slope(axes, bandwidth)


def _roof(
    axes: Axes,
    bandwidth: float,
    peak: float,
    *,
    label: str | None,
    linestyle: str = "-",
) -> None:
    low, high = axes.get_xlim()
    x = np.array([low, peak / bandwidth, high])
    y = np.minimum(x * bandwidth, peak) / 1e12
    axes.plot(x, y, color=BLACK, linewidth=1.0, linestyle=linestyle, label=label)


def _name_slope(axes: Axes, bandwidth: float) -> None:
    low = 1.3 * axes.get_xlim()[0]
    text = f"{bandwidth / 1e12:.3g} TB/s"
    axes.text(low, 2.1e-12 * bandwidth * low, text, ha="left", va="bottom", color=GREY)


def _scale(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=12))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(plain_number))
    axes.set_xlabel(
        "FLOP a byte that must be moved (hollow: the bytes fit the L2 cache)"
    )
    axes.set_ylabel("achieved TFLOP/s")
