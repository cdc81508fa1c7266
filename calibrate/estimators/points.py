"""Points of a kernel, as columns of shapes: in octaves, aggregated, interpolated."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from calibrate.estimators.rows import unique_rows
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Sides = list[tuple[NDArray[Any], Floats]]
    Columns = Mapping[str, NDArray[Any]]

_RATES = (1e-9, 1e5)
"""Seconds that a kernel may take; anything else is a wrong unit."""


def interpolated(
    columns: Columns,
    nodes: Mapping[str, NDArray[Any]],
    values_of: Callable[[Columns], Floats],
) -> Floats:
    """Return the weighted values of `values_of` at the nodes around each row.

    Trees are level between the points that they saw and jump halfway, so that times
    would fall where more is asked for; a line between two measured points does not. A
    row outside the nodes of a column keeps its own value.
    """
    sides = {name: _sides(columns[name], own) for name, own in nodes.items()}
    total = np.zeros(len(next(iter(columns.values()))))
    for corner in itertools.product((0, 1), repeat=len(sides)):
        weight = np.ones(len(total))
        moved = dict(columns)
        for side, (name, both) in zip(corner, sides.items(), strict=True):
            moved[name] = both[side][0]
            weight = weight * both[side][1]
        asked = np.flatnonzero(weight)
        if len(asked):
            part = {name: values[asked] for name, values in moved.items()}
            total[asked] += weight[asked] * values_of(part)
    return total


def _sides(values: NDArray[Any], nodes: NDArray[Any]) -> Sides:
    """Return the nodes below and above each value, with their weights."""
    inside = (values >= nodes[0]) & (values <= nodes[-1])
    place = np.searchsorted(nodes, values, side="right") - 1
    place = np.clip(place, 0, max(len(nodes) - 2, 0))
    low = np.where(inside, nodes[place], values)
    high = np.where(inside, nodes[np.minimum(place + 1, len(nodes) - 1)], values)
    octaves = np.log2((1.0 + high) / (1.0 + low))
    above = np.log2((1.0 + values) / (1.0 + low))
    share = np.divide(above, octaves, out=np.zeros(len(values)), where=octaves > 0)
    return [(low, 1.0 - share), (high, share)]


def octaves(columns: Columns, names: tuple[str, ...]) -> Floats:
    """Return (n, len(names)) base-2 logarithms of 1 + each column."""
    return np.log2(1.0 + np.stack([columns[n] for n in names], axis=1, dtype=float))


def aggregated(columns: Columns, time_s: Floats) -> tuple[Columns, Floats]:
    """Return each shape once, with the median of its times."""
    time_s = np.asarray(time_s, dtype=np.float64)
    low, high = _RATES
    if bad := np.flatnonzero(~((time_s >= low) & (time_s <= high))).tolist():
        raise UserError(
            f"a time must lie between {low:g} and {high:g} seconds; got "
            f"{time_s[bad[0]]:g} in row {bad[0]}: check the unit"
        )
    if not len(time_s):
        return columns, time_s
    table = np.stack([np.asarray(values) for values in columns.values()], axis=1)
    shapes, places = unique_rows(table)
    order = np.lexsort((time_s, places))
    counts = np.bincount(places)
    starts = np.cumsum(counts) - counts
    sorted_s = time_s[order]
    middle = (sorted_s[starts + (counts - 1) // 2] + sorted_s[starts + counts // 2]) / 2
    return dict(zip(columns, shapes.T, strict=True)), middle


def longest_share(length: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which points have one of the longest eighth of the distinct lengths."""
    distinct = np.unique(length)
    held = max(1, round(len(distinct) / 8))
    if held >= len(distinct):
        return np.zeros(len(length), dtype=np.bool_)
    longest: NDArray[np.bool_] = length >= distinct[-held]
    return longest
