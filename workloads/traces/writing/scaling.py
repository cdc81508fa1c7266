"""Times in a format's unit that read back as they were."""

from __future__ import annotations

import math


def scaled(seconds: float, units_per_s: int) -> int | float:
    """Return seconds in another unit, whole where that reads back the same.

    Parameters
    ----------
    seconds
        A time from 0.
    units_per_s
        Such as 1000 for milliseconds.

    Returns
    -------
    int or float
        A value that gives `seconds` again when it is divided by `units_per_s`, or, of
        those that are no such quotient, the nearest.
    """
    units = seconds * units_per_s
    if round(units) / units_per_s == seconds:
        return round(units)
    near = (units, math.nextafter(units, 0), math.nextafter(units, math.inf))
    return min(near, key=lambda each: abs(each / units_per_s - seconds))
