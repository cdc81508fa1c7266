"""Sums of floats that are the same on every Python."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def added(values: Iterable[float]) -> float:
    """Return values added one by one.

    The builtin `sum` does so up to Python 3.11; from 3.12 on it carries rounding errors
    along, and last digits differ.
    """
    return reduce(add, values, 0)
