"""How far the time of an operation may lie from its prediction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Width(NamedTuple):
    """Shares of a time by which it may be shorter and longer.

    `down` is below 1, so that no time comes out at zero or less.
    """

    down: float
    up: float

    def squares(self, seconds: float) -> tuple[float, float]:
        down_s, up_s = seconds * self.down, seconds * self.up
        return down_s * down_s, up_s * up_s


class Widths(NamedTuple):
    """Of an operation: within what was measured, and beyond it.

    Indexed by the flag of a lookup.
    """

    inside: Width
    beyond: Width


def by_factor(shorter: float, longer: float) -> Width:
    """Return the width of a time from ``1 / shorter`` to `longer` times itself."""
    return Width(1.0 - 1.0 / shorter, longer - 1.0)


def wider(one: Width, other: Width) -> Width:
    return Width(max(one.down, other.down), max(one.up, other.up))


ESTIMATE: Final = by_factor(1.65, 1.65)
"""Of what stands on the datasheet alone: swaps, copies, experts, collectives without
a table, chunks with a past. Of the roofline's in-sample tables in the README, nine
points of ten are within two thirds of the measurement in the worst (chunks with a
history), but for element-wise kernels. Nothing measured stands behind swaps and copies
at all."""

HEAD: Final = by_factor(1.3, 1.3)
"""A matrix product of the roofline: nine of ten within 14 to 27 % on three GPUs."""

KERNELS: Final = by_factor(3.5, 1.5)
"""Element-wise kernels: predicted 2.3 times too slow in the median of the one GPU that
they were judged on, nine of ten within 3.6 times; hardly ever too fast."""


def read_widths(fit: Mapping[str, Any], operation: str) -> Widths:
    """Return the widths of an operation from the `intervals` of a profile's fit.

    They are percentages p, inside and beyond: nine measurements of ten lie within a
    factor ``1 + p / 100`` of the prediction, either way, as they are quantiles of
    the absolute log residual. An operation without them, or with 0, which stands
    for "not judged", is taken for an estimate. Beyond is never narrower than inside.
    """
    found = (fit.get("intervals") or {}).get(operation) or (0.0, 0.0)
    if not _are_percentages(found):
        raise ConfigError(
            f"profile: intervals of {operation} must be two finite percentages >= 0; "
            f"got {str(found)[:60]}: fit the profile again"
        )
    inside, beyond = (
        by_factor(1.0 + p / 100.0, 1.0 + p / 100.0) if p else ESTIMATE for p in found
    )
    return Widths(inside, wider(inside, beyond))


def _are_percentages(found: Any) -> bool:
    return (
        isinstance(found, list | tuple)
        and len(found) == 2
        and all(
            isinstance(p, int | float) and math.isfinite(p) and p >= 0.0 for p in found
        )
    )
