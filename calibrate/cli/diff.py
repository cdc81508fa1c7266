"""Two profiles, point by point."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sim.costs.profile import OpTable, Profile

_SAME = 0.05
"""Medians may differ by so much and still count as the same measurement."""


@dataclass(frozen=True, slots=True)
class TableDiff:
    """How the shared points of one table differ, right over left."""

    num_left: int
    num_right: int
    num_shared: int
    median_ratio: float | None
    p10_ratio: float | None
    p90_ratio: float | None

    @property
    def differs(self) -> bool:
        """Whether the shared points differ by more than 5 % in the median."""
        return self.median_ratio is not None and abs(self.median_ratio - 1.0) > _SAME

    def to_json(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self) | {"differs": self.differs}


def diff_profiles(left: Profile, right: Profile) -> dict[str, TableDiff]:
    """Return the differences by table (operation, variant, data type)."""
    before, after = _by_table(left), _by_table(right)
    return {
        name: _diff(before.get(name, {}), after.get(name, {}))
        for name in sorted(before.keys() | after.keys())
    }


def _by_table(profile: Profile) -> dict[str, dict[tuple[Any, ...], float]]:
    found: dict[str, dict[tuple[Any, ...], float]] = {}
    for table in profile.ops:
        name = f"{table.operation} {table.variant} {table.dtype}"
        found.setdefault(name, {}).update(_points(table))
    return found


def _points(table: OpTable) -> dict[tuple[Any, ...], float]:
    # a time beside the points, such as `launch_s`, is measured and names no shape
    constants = tuple(
        sorted(
            (key, str(value))
            for key, value in table.constants.items()
            if not key.endswith("_s")
        )
    )
    axes = sorted(table.axes)
    rows = zip(*(table.axes[axis] for axis in axes), strict=True)
    seconds = table.quantiles["p50_s"]
    return {
        (constants, tuple(axes), row): value
        for row, value in zip(rows, seconds, strict=True)
    }


def _diff(
    before: dict[tuple[Any, ...], float], after: dict[tuple[Any, ...], float]
) -> TableDiff:
    shared = before.keys() & after.keys()
    ratios = [after[key] / before[key] for key in shared]
    low, middle, high = (
        np.quantile(ratios, [0.1, 0.5, 0.9]).tolist() if ratios else (None,) * 3
    )
    return TableDiff(len(before), len(after), len(shared), middle, low, high)
