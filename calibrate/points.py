"""From the tables of a profile to the points of an estimator, one variant of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrate.estimators import ESTIMATORS, DecodeAttention, PrefillAttention
from sim.errors import UserError
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from calibrate.device import DeviceFacts
    from calibrate.estimators import KernelEstimator
    from sim.costs.measured.profile import OpTable, Profile

TYPICAL: Final[dict[str, dict[str, int]]] = {
    "decode_attention": {"batch": 64, "context": 2048},
    "prefill_attention": {"batch": 1, "query": 2048, "past": 0},
    "mixed_attention": {
        "query": 1024,
        "past": 0,
        "num_decodes": 32,
        "decode_context": 2048,
    },
    "gemm": {"m": 64},
    "moe": {"tokens": 64},
    "copy": {"num_blocks": 64},
}
"""The shape at which variants of an operation are compared: that of a busy engine."""

_APART: Final = frozenset({"launch_s", "block_size"})
"""Constants that do not make another shape."""
_LAUNCH = "launch_s"
APART = ("swap", "copy")
"""Operations of which every variant, direction and kind of host memory is fitted by
itself: other mechanisms."""
_WAYS = ("direction", "memory")


def parse_variants(texts: Iterable[str]) -> dict[str, str]:
    """Return operation to variant, from texts such as ``decode_attention=split_kv``."""
    found = {}
    for text in texts:
        operation, equals, variant = text.partition("=")
        if not (equals and variant) or operation not in TYPICAL:
            raise UserError(
                f"--variant must be OPERATION=VARIANT, of {', '.join(TYPICAL)}; got "
                f"{text[:60]!r}"
            )
        found[operation] = variant
    return found


def chosen(
    operation: str, tables: Sequence[OpTable], wanted: Mapping[str, str]
) -> list[OpTable]:
    """Return the tables of one variant for each shape that several were timed for.

    A profile holds only variants that passed the correctness gate. Of those the fastest
    at `TYPICAL`, or the nearest point to it that all of them have, is taken, as an
    engine would; `wanted` names variants that are taken whether fastest or not.
    """
    if operation not in TYPICAL:
        return list(tables)
    name = wanted.get(operation)
    there = sorted({table.variant for table in tables})
    if name is not None and name not in there:
        raise UserError(
            f"the profile has no {operation} of variant '{name}'; it has "
            f"{', '.join(there)}"
        )
    groups: dict[tuple[Any, ...], dict[str, list[OpTable]]] = {}
    for table in tables:
        of_shape = groups.setdefault(_shape(table), {})
        of_shape.setdefault(table.variant, []).append(table)
    found: list[OpTable] = []
    for by_variant in groups.values():
        best = name if name in by_variant else _fastest(operation, by_variant)
        found += by_variant[best]
    return found


def _shape(table: OpTable) -> tuple[Any, ...]:
    constants = {
        key: str(value) for key, value in table.constants.items() if key not in _APART
    }
    return (table.dtype, *sorted(constants.items()))


def _fastest(operation: str, by_variant: Mapping[str, Sequence[OpTable]]) -> str:
    """Return the variant with the least time at the typical point they share."""
    if len(by_variant) == 1:
        return next(iter(by_variant))
    points = {name: _times_by_point(tables) for name, tables in by_variant.items()}
    shared = set.intersection(*(set(found) for found in points.values()))
    if not shared:  # nothing to compare: the one that was looked at most
        return max(sorted(points), key=lambda name: len(points[name]))
    typical = TYPICAL[operation]

    def distance(point: tuple[tuple[str, int], ...]) -> tuple[float, Any]:
        octaves = [
            abs(np.log2(1 + value) - np.log2(1 + typical.get(axis, value)))
            for axis, value in point
        ]
        return float(added(octaves)), point

    nearest = min(shared, key=distance)
    return min(sorted(points), key=lambda name: points[name][nearest])


def _times_by_point(
    tables: Iterable[OpTable],
) -> dict[tuple[tuple[str, int], ...], float]:
    found = {}
    for table in tables:
        axes = sorted(table.axes)
        rows = zip(*(table.axes[axis] for axis in axes), strict=True)
        for row, seconds in zip(rows, table.quantiles["p50_s"], strict=True):
            found[tuple(zip(axes, row, strict=True))] = seconds
    return found


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
        columns = {key: values[mask] for key, values in self.columns.items()}
        spread = None if self.spread is None else self.spread[mask]
        return replace(self, columns=columns, time_s=self.time_s[mask], spread=spread)


def points_of(
    profile: Profile, variants: Mapping[str, str] | None = None
) -> list[Points]:
    """Return the points of every operation that an estimator knows."""
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


def with_parts(found: Mapping[str, Points]) -> dict[str, Points]:
    """Return points by name, and the parts of mixed steps not measured otherwise."""
    every = dict(found)
    if (mixed := found.get("mixed_attention")) is not None:
        for alone in (decodes_alone(mixed), chunks_alone(mixed)):
            if alone.name not in found and len(alone.time_s):
                every[alone.name] = alone
    return every


def decodes_alone(mixed: Points) -> Points:
    """Return the steps of a mixed table that have no chunk, as decodes."""
    columns = mixed.columns
    own = mixed.where((columns["query"] == 0) & (columns["num_decodes"] > 0))
    axes = {"batch": "num_decodes", "context": "decode_context"}
    return _renamed(own, DecodeAttention.operation, DecodeAttention.columns, axes)


def chunks_alone(mixed: Points) -> Points:
    """Return the steps of a mixed table that have no decodes, as chunks."""
    columns = mixed.columns
    own = mixed.where((columns["query"] > 0) & (columns["num_decodes"] == 0))
    return _renamed(own, PrefillAttention.operation, PrefillAttention.columns, {})


def _renamed(
    points: Points, operation: str, names: tuple[str, ...], axes: Mapping[str, str]
) -> Points:
    missing = {"batch": 1, "window": 0}
    columns = {}
    for name in names:
        source = axes.get(name, name)
        if source in points.columns:
            columns[name] = points.columns[source]
        else:
            like = points.columns["query"]
            columns[name] = like * 0 + missing[name]
    return Points(
        name=operation,
        operation=operation,
        columns=columns,
        time_s=points.time_s,
        codes={},
        launch_s=points.launch_s,
        variants=points.variants,
    )
