"""From the tables of a profile to the columns of an estimator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.estimators import ESTIMATORS
from calibrate.variants import chosen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from calibrate.device import DeviceFacts
    from calibrate.estimators import KernelEstimator
    from sim.costs.profile import OpTable, Profile

_LAUNCH = "launch_s"
APART = ("swap", "copy")
"""Operations of which every variant, direction and kind of host memory is fitted by
itself: other mechanisms."""
_WAYS = ("direction", "memory")


@dataclass(frozen=True, slots=True)
class Points:
    """Points of one operation, ready for ``fit``."""

    name: str
    """The operation, with what is fitted apart: ``swap.loop.h2d.pinned``."""
    operation: str
    columns: dict[str, NDArray[np.int64]]
    time_s: NDArray[np.float64]
    codes: dict[str, tuple[str, ...]]
    """Texts that the integers of a column stand for."""
    variants: tuple[str, ...] = ()
    """Ways in which the points were timed."""
    launch_s: float | None = None
    """Seconds that a call takes at least, where the tables say so."""
    spread: NDArray[np.float64] | None = None
    """p90 less p10 of a point's calls, over their median, where all tables say so."""

    def where(self, mask: NDArray[np.bool_]) -> Points:
        """Return the points that `mask` keeps."""
        columns = {key: values[mask] for key, values in self.columns.items()}
        spread = None if self.spread is None else self.spread[mask]
        return replace(self, columns=columns, time_s=self.time_s[mask], spread=spread)


def points_of(
    profile: Profile, variants: Mapping[str, str] | None = None
) -> list[Points]:
    """Return the points of every operation that an estimator knows.

    Parameters
    ----------
    profile
        Tables.
    variants
        Operation to the variant whose points are taken; the fastest where it is not
        named. See `calibrate.variants.chosen`.
    """
    by_operation: dict[str, list[OpTable]] = {}
    for table in profile.ops:
        if table.operation in ESTIMATORS and table.num_points:
            by_operation.setdefault(table.operation, []).append(table)
    groups: dict[str, list[OpTable]] = {}
    for operation, tables in by_operation.items():
        if operation in APART:
            for table in tables:
                groups.setdefault(_apart(table), []).append(table)
        else:
            groups[operation] = chosen(operation, tables, variants or {})
    return [_points(name, tables) for name, tables in sorted(groups.items())]


def _apart(table: OpTable) -> str:
    """Return ``swap.loop.h2d.pinned``, or as much of it as the table says."""
    ways = [str(table.constants[key]) for key in _WAYS if key in table.constants]
    return ".".join((table.operation, table.variant, *ways))


def estimator_of(points: Points, device: DeviceFacts) -> KernelEstimator:
    """Return the estimator for `points`, with what else their tables say."""
    return ESTIMATORS[points.operation](device, launch_s=points.launch_s)


def _points(name: str, tables: Sequence[OpTable]) -> Points:
    operation = tables[0].operation
    launches = [float(t.constants[_LAUNCH]) for t in tables if _LAUNCH in t.constants]
    columns: dict[str, list[NDArray[np.int64]]] = {}
    codes: dict[str, tuple[str, ...]] = {}
    for key in ESTIMATORS[operation].columns:
        values = [_value(table, key) for table in tables]
        if any(isinstance(value, str) for value in values):
            codes[key] = tuple(sorted({str(value) for value in values}))
            values = [codes[key].index(str(value)) for value in values]
        columns[key] = [
            np.broadcast_to(np.asarray(value, dtype=np.int64), table.num_points)
            for value, table in zip(values, tables, strict=True)
        ]
    return Points(
        name=name,
        operation=operation,
        columns={key: np.concatenate(parts) for key, parts in columns.items()},
        time_s=np.concatenate([table.quantiles["p50_s"] for table in tables]),
        codes=codes,
        launch_s=min(launches, default=None),
        variants=tuple(sorted({table.variant for table in tables})),
        spread=_spread(tables),
    )


def _spread(tables: Sequence[OpTable]) -> NDArray[np.float64] | None:
    if not all({"p10_s", "p90_s"} <= set(table.quantiles) for table in tables):
        return None
    p10_s, p50_s, p90_s = (
        np.concatenate([np.array(table.quantiles[key]) for table in tables])
        for key in ("p10_s", "p50_s", "p90_s")
    )
    found: NDArray[np.float64] = (p90_s - p10_s) / p50_s
    return found


def _value(table: OpTable, key: str) -> Any:
    if key in table.axes:
        return table.axes[key]
    if key in table.constants:
        return table.constants[key]
    return {"dtype": table.dtype, "variant": table.variant}.get(key, 0)
