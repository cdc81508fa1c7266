"""Between measured values of an axis: straight lines in octaves."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from numpy.typing import NDArray

    from calibrate.estimators.kernel import Columns

    Floats = NDArray[np.float64]
    Sides = list[tuple[NDArray[Any], Floats]]


def interpolated(
    columns: Columns,
    nodes: Mapping[str, NDArray[Any]],
    values_of: Callable[[Columns], Floats],
) -> Floats:
    """Return what `values_of` gives at the nodes around each row, weighted.

    Trees are level between the points that they saw and jump halfway, so that times
    would fall where more is asked for; a line between two measured points does not.

    Parameters
    ----------
    columns
        Arrays (n,) by name.
    nodes
        Of some of the columns, the measured values, ascending. A row outside them keeps
        its own.
    values_of
        Values (n,) of columns.
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
