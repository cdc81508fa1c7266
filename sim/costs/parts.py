"""What every cost model shares: the sum of parts, and the check of a coefficient."""

from __future__ import annotations

import math
from math import sqrt
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from sim.costs.base import StepCost
from sim.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_KEPT: Final = 65_536
"""Prices that a model keeps; a longer-lived one computes the rest again."""

V = TypeVar("V")

FLAG: Final = StepCost._fields.index("extrapolated")
LO: Final = StepCost._fields.index("lo_s")
HI: Final = StepCost._fields.index("hi_s")
"""Places in a `StepCost`, and columns of many."""

_new = tuple.__new__


class Memo(dict[int, V]):
    """Prices by count, each computed once; copies and pickles start empty."""

    __slots__ = ()

    def keep(self, count: int, value: V) -> V:
        """Return `value`, kept for `count` while there is room."""
        if len(self) < _MAX_KEPT:
            self[count] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()


def step_cost(  # noqa: PLR0917 - as `StepCost` itself; keywords would cost 0.2 us
    gemm_s: float = 0.0,
    prefill_attention_s: float = 0.0,
    decode_attention_s: float = 0.0,
    head_s: float = 0.0,
    allreduce_s: float = 0.0,
    swap_s: float = 0.0,
    copy_s: float = 0.0,
    host_s: float = 0.0,
    extrapolated: bool = False,
    squares: tuple[float, float] = (0.0, 0.0),
) -> StepCost:
    """Return the cost whose `total_s` is the sum of these parts, in seconds.

    The parts are added from left to right in the order of the parameters, which is
    the order of the fields of `StepCost`: floating-point addition is not associative,
    and the same sum taken over recorded columns must give the same bits.

    `squares` are those of the distances from `total_s` to `lo_s` and to `hi_s`, as
    `sim.costs.widths` adds them up; without them both are `total_s`.
    """
    total_s = (
        gemm_s
        + prefill_attention_s
        + decode_attention_s
        + head_s
        + allreduce_s
        + swap_s
        + copy_s
        + host_s
    )
    down, up = squares
    # as StepCost(...), without the function that a NamedTuple puts before it
    return _new(
        StepCost,
        (
            total_s,
            gemm_s,
            prefill_attention_s,
            decode_attention_s,
            head_s,
            allreduce_s,
            swap_s,
            copy_s,
            host_s,
            extrapolated,
            total_s - sqrt(down) if down else total_s,
            total_s + sqrt(up) if up else total_s,
        ),
    )


def cost_columns(
    num_rows: int,
    *parts: NDArray[np.float64] | float,
    squares: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return `step_cost` of every row, (n, 12) with contiguous columns.

    `parts` are in the order of `step_cost`, each a column or a number for all rows;
    `squares` are two rows, (2, n). The flag is left at 0.
    """
    columns = np.zeros((len(StepCost._fields), num_rows))
    total_s = columns[0]
    for place, part in enumerate(parts, start=1):
        if isinstance(part, float) and not part:
            continue  # x + 0.0 is x, as no part is negative
        columns[place] = part
        total_s += columns[place]
    lo_s, hi_s = columns[LO], columns[HI]
    lo_s[:] = hi_s[:] = total_s
    if squares is not None:
        half_s = np.sqrt(squares)
        lo_s -= half_s[0]
        hi_s += half_s[1]
    return columns.T


def at_least_zero(key: str, value: float) -> float:
    """Return `value`, a finite number >= 0, as a float.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    return _finite(key, value, "a finite number >= 0", minimum=0.0)


def above_zero(key: str, value: float) -> float:
    """Return `value`, a finite number > 0, as a float.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    number = _finite(key, value, "a finite number > 0", minimum=0.0)
    if number == 0.0:
        raise ConfigError(f"{key} must be a finite number > 0; got {value!r}")
    return number


def share(key: str, value: float) -> float:
    """Return `value`, an efficiency in (0, 1], as a float.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    number = above_zero(key, value)
    if number > 1.0:
        raise ConfigError(
            f"{key} is a share of the datasheet's rate and must be in (0, 1]; "
            f"got {value!r}: give 0.8 for 80 %"
        )
    return number


def _finite(key: str, value: object, rule: str, minimum: float) -> float:
    # bool is an int to Python, but `base_s: true` is a slip of the pen
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be {rule}; got {value!r}: give a number")
    if not math.isfinite(value) or value < minimum:
        raise ConfigError(f"{key} must be {rule}; got {value!r}")
    return float(value)
