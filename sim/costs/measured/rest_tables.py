"""Tables of a profile besides attention and products, read with their widths."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.costs.measured.geometry import expert_geometry
from sim.costs.measured.tables import Curve, read_table
from sim.costs.rates.widths import Width, Widths, read_widths
from sim.costs.transfers import Moved
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from sim.costs.roofline import RooflineCost
    from sim.costs.transfers import Pages

    Seconds = NDArray[np.float64]


class Part(NamedTuple):
    """Seconds of an operation, and what is known of them."""

    seconds: float
    extrapolated: bool
    """Whether they lie beyond what was measured; not where nothing was."""
    width: Width


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """A table over one amount, with the widths of its regions."""

    curve: Curve
    widths: Widths

    def at(self, amount: int) -> Part:
        seconds, beyond = self.curve.at(amount)
        return Part(seconds, beyond, self.widths[beyond])


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """Moving blocks one way, at the page size of a model.

    A loop's time holds its calls, those of the others begin when all is submitted.
    """

    pages: Pages
    device: MeasuredCurve
    host: Curve | None
    """Seconds of the host over descriptors; None: none were timed."""
    is_loop: bool

    def at(self, num_blocks: int) -> Moved:
        num_descriptors = self.pages.per_block * num_blocks
        device_s, beyond, width = self.device.at(num_descriptors)
        host_s = self.host.at(num_descriptors)[0] if self.host else 0.0
        total_s = max(device_s, host_s) if self.is_loop else host_s + device_s
        return Moved(total_s, host_s, beyond, width, host_s if self.is_loop else 0.0)


def read_curve(entry: Mapping[str, Any], name: str, axis: str) -> MeasuredCurve | None:
    """Return a table over `axis`, None where the entry has none."""
    table = entry.get(name)
    if table is None:
        return None
    nodes, (seconds,), (beyond,) = _rows(table, axis, name, "time_s", flat=True)
    return MeasuredCurve(Curve(nodes, seconds, beyond), _widths(table, name))


def read_experts(entry: Mapping[str, Any], rest: RooflineCost) -> MeasuredCurve | None:
    """Return the routed experts of all layers; None where none of this shape are."""
    wanted = expert_geometry(rest.model, rest.tensor_parallel_size)
    if (entry.get("experts") or {}).get("geometry") != wanted:
        return None
    return read_curve(entry, "experts", "tokens")


def _widths(table: Mapping[str, Any], name: str) -> Widths:
    return read_widths({"intervals": {name: table.get("interval")}}, name)


def _rows(
    table: Any, axis: str, name: str, key: str = "time_s", *, flat: bool = False
) -> tuple[list[int], Seconds, NDArray[np.bool_]]:
    where = f"profile: {name}"
    (nodes,), seconds, beyond = read_table(table, [axis], where, key)
    if flat:
        seconds, beyond = np.atleast_2d(seconds), np.atleast_2d(beyond)
    if seconds.ndim != 2 or seconds.shape != beyond.shape or (
        seconds.shape[1] != len(nodes)
    ):  # fmt: skip
        raise ConfigError(
            f"{where} must have a time and a flag for each of {len(nodes)} nodes; got "
            f"{seconds.shape} and {beyond.shape}: fit the profile again"
        )
    if len(nodes) < 2 or nodes[0] < 1 or min(np.diff(nodes)) < 1:
        raise ConfigError(
            f"{where}: {axis} must be two or more, above zero, and ascend; got "
            f"{str(nodes)[:40]}: fit the profile again"
        )
    least = 0.0 if key == "host_s" else np.nextafter(0.0, 1.0)
    if not (np.isfinite(seconds).all() and (seconds >= least).all()):
        raise ConfigError(f"{where} must hold finite seconds > 0; fit it again")
    return nodes, seconds, beyond


def read_transfer(
    table: Mapping[str, Any], pages: Pages, name: str, *, is_loop: bool
) -> MeasuredTransfer:
    """Return the row of a page size, between the rows of those that were measured."""
    sizes = _sizes(table, "page_bytes", name)
    nodes, seconds, beyond = _rows(table, "num_descriptors", name)
    _check_rows(seconds, sizes, name)
    outside = not sizes[0] <= pages.page_bytes <= sizes[-1]
    low, high, share = _between(sizes, pages.page_bytes)
    flags = beyond[low] | beyond[high] | outside
    device = Curve(nodes, _mixed(seconds, low, high, share), flags.tolist())
    host = None
    if "host_s" in table:
        _, host_s, _ = _rows(table, "num_descriptors", name, "host_s")
        host = Curve(nodes, _mixed(host_s, low, high, share), flags.tolist())
    timed = MeasuredCurve(device, _widths(table, name))
    return MeasuredTransfer(pages, timed, host, is_loop)


def read_copies(table: Any, block_bytes: float) -> MeasuredCurve | None:
    """Return seconds of copies over blocks of `block_bytes`, None without a table."""
    if table is None:
        return None
    sizes = _sizes(table, "block_bytes", "copy")
    nodes, seconds, beyond = _rows(table, "num_blocks", "copy")
    _check_rows(seconds, sizes, "copy")
    outside = not sizes[0] <= block_bytes <= sizes[-1]
    low, high, share = _between(sizes, block_bytes)
    flags = beyond[low] | beyond[high] | outside
    curve = Curve(nodes, _mixed(seconds, low, high, share), flags.tolist())
    return MeasuredCurve(curve, _widths(table, "copy"))


def _sizes(table: Any, axis: str, name: str) -> list[float]:
    try:
        sizes = [float(value) for value in table[axis]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"profile: {name} is no table ({error}); fit the profile again"
        ) from error
    if not sizes or sizes[0] <= 0 or any(b <= a for a, b in pairwise(sizes)):
        raise ConfigError(
            f"profile: {name}: {axis} must be above zero and ascend; got "
            f"{str(sizes)[:40]}: fit the profile again"
        )
    return sizes


def _check_rows(seconds: Seconds, sizes: Sequence[float], name: str) -> None:
    if len(seconds) != len(sizes):
        raise ConfigError(
            f"profile: {name} has {len(seconds)} rows for {len(sizes)} sizes; fit the "
            "profile again"
        )


def _between(sizes: Sequence[float], size: float) -> tuple[int, int, float]:
    """Return the rows beside a size, and the share of the upper one.

    Larger than the last, a page takes longer in proportion to its bytes; smaller than
    the first, it takes as long as that.
    """
    place = int(np.searchsorted(sizes, size, side="right")) - 1
    if place < 0:
        return 0, 0, 0.0
    if place == len(sizes) - 1:
        return place, place, size / sizes[place] - 1.0
    return place, place + 1, (size - sizes[place]) / (sizes[place + 1] - sizes[place])


def _mixed(rows: Seconds, low: int, high: int, share: float) -> list[float]:
    # the last size alone is scaled: its share is of itself
    change = rows[low] if low == high else rows[high] - rows[low]
    mixed: list[float] = (rows[low] + change * share).tolist()
    return mixed


def read_seconds(table: Mapping[str, Any], key: str, name: str) -> float:
    """Return finite seconds >= 0, or 0 where the table has none."""
    value = table.get(key)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not isfinite(value) or value < 0.0:
        raise ConfigError(
            f"profile: {name}.{key} must be finite seconds >= 0; got {value!r}: fit "
            "the profile again"
        )
    return float(value)


def read_factor(table: Mapping[str, Any], key: str, default: float) -> float:
    """Return a factor >= 1, or the default where the table has none."""
    value = table.get(key, default)
    if not isinstance(value, int | float) or not isfinite(value) or value < 1.0:
        raise ConfigError(
            f"profile: interference.{key} must be >= 1; got {value!r}: fit it again"
        )
    return float(value)
