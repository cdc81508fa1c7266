"""Which of several ways to do one operation the tables of a model take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.costs.profile import OpTable

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
    "copy": {"num_blocks": 64},
}
"""The shape at which variants of an operation are compared: that of a busy engine."""

_APART: Final = frozenset({"launch_s", "block_size"})
"""Constants that do not make another shape."""


def parse_variants(texts: Iterable[str]) -> dict[str, str]:
    """Return operation to variant, from texts such as ``decode_attention=split_kv``.

    Raises
    ------
    UserError
        When one has another form, or names an operation that has no choice.
    """
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
    at `TYPICAL`, or the nearest point to it that all of them have, is taken: an engine
    would.

    Parameters
    ----------
    operation
        Of all `tables`.
    tables
        Those of a profile.
    wanted
        Operation to a variant that is taken whether fastest or not.

    Raises
    ------
    UserError
        When a wanted variant was not timed.
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
    points = {name: _points(tables) for name, tables in by_variant.items()}
    shared = set.intersection(*(set(found) for found in points.values()))
    if not shared:  # nothing to compare: the one that was looked at most
        return max(sorted(points), key=lambda name: len(points[name]))
    typical = TYPICAL[operation]

    def distance(point: tuple[tuple[str, int], ...]) -> tuple[float, Any]:
        octaves = [
            abs(np.log2(1 + value) - np.log2(1 + typical.get(axis, value)))
            for axis, value in point
        ]
        return float(sum(octaves)), point

    nearest = min(shared, key=distance)
    return min(sorted(points), key=lambda name: points[name][nearest])


def _points(
    tables: Iterable[OpTable],
) -> dict[tuple[tuple[str, int], ...], float]:
    found = {}
    for table in tables:
        axes = sorted(table.axes)
        rows = zip(*(table.axes[axis] for axis in axes), strict=True)
        for row, seconds in zip(rows, table.quantiles["p50_s"], strict=True):
            found[tuple(zip(axes, row, strict=True))] = seconds
    return found
