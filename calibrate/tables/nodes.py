"""Nodes of tables, and how predictions are written at them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.estimators.kernel import aggregated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from calibrate.estimators import KernelEstimator
    from calibrate.points import Points

    Integers = NDArray[np.int64]

BATCHES: Final = 2 ** np.arange(13)
CONTEXTS: Final = 2 ** np.arange(21)
QUERIES: Final = np.unique([1, *(2 ** np.arange(4, 18)), *(3 * 2 ** np.arange(9, 16))])
TOKENS: Final = 2 ** np.arange(18)
_GAP: Final = 4
_MAX_NODES: Final = 128
"""Measured values of an axis beyond which only some of them are nodes."""


def nodes(
    measured: Integers, regular: Integers | None = None, most: int = _MAX_NODES
) -> list[int]:
    """Return the nodes of an axis: measured values, and `regular` ones further out."""
    own = np.unique(measured)
    if len(own) > most:
        own = np.unique(np.append(own[:: len(own) // most + 1], own[-1]))
    more = own if regular is None else np.union1d(own, regular)
    found: list[int] = more.tolist()
    return found


def octaves(measured: Integers, first: int = 0) -> list[int]:
    """Return the measured values of an axis, one an octave: the largest of each.

    Parameters
    ----------
    measured
        Values.
    first
        Smaller ones are left out.
    """
    own = [value for value in np.unique(measured).tolist() if value >= first]
    by_octave = {value.bit_length() if value else -1: value for value in own}
    powers = {value.bit_length(): value for value in own if value.bit_count() == 1}
    return sorted((by_octave | powers).values())


def filled(values: Iterable[int]) -> list[int]:
    """Return ascending nodes with powers of two where two are over four times apart."""
    own = sorted(values)
    found = set(own)
    for low, high in itertools.pairwise(own):
        if low and high > _GAP * low:
            found |= {1 << e for e in range(low.bit_length(), high.bit_length())}
    return sorted(value for value in found if own[0] <= value <= own[-1])


def product(**axes: Iterable[int]) -> dict[str, Integers]:
    """Return the columns of every combination of values, the last axis fastest."""
    grids = np.meshgrid(*(list(values) for values in axes.values()), indexing="ij")
    return {
        key: grid.ravel().astype(np.int64)
        for key, grid in zip(axes, grids, strict=True)
    }


def broadcast(columns: Mapping[str, Any]) -> dict[str, Integers]:
    """Return columns of one length, of columns and numbers."""
    length = max(np.size(value) for value in columns.values())
    return {
        key: np.broadcast_to(np.asarray(value, dtype=np.int64), length)
        for key, value in columns.items()
    }


def predicted(
    estimator: KernelEstimator,
    columns: Mapping[str, Any],
    *shape: int,
    points: Points | None = None,
) -> dict[str, Any]:
    """Return ``time_s`` and ``beyond`` of a table of that shape, JSON-ready.

    Parameters
    ----------
    estimator
        Fitted.
    columns
        Shapes at the nodes, the last axis fastest, and numbers that all share.
    shape
        Of the table.
    points
        What was measured: where a node is a measured shape, its median stands, unless
        it is faster than the device.
    """
    full = broadcast(columns)
    seconds = estimator.predict(full)
    if points is not None:
        measured = _measured(points, estimator.columns)
        rows = zip(*(full[key].tolist() for key in estimator.columns), strict=True)
        own = np.array([measured.get(row, np.nan) for row in rows])
        least = np.maximum(own, estimator.floor(full))
        seconds = np.where(np.isnan(own), seconds, least)
    beyond = estimator.extrapolated(full).reshape(shape)
    return {
        "time_s": rounded(seconds.reshape(shape)),
        "beyond": beyond.astype(int).tolist(),
    }


def _measured(points: Points, names: Iterable[str]) -> dict[tuple[int, ...], float]:
    """Return shape to median seconds."""
    columns, time_s = aggregated(points.columns, points.time_s)
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    return dict(zip(rows, time_s.tolist(), strict=True))


def rounded(values: NDArray[np.float64]) -> Any:
    """Return seconds to six digits, nested as `values` is."""
    if values.ndim == 1:
        return [float(f"{value:.6g}") for value in values.tolist()]
    return [rounded(row) for row in values]
