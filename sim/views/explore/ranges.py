"""Where a curve over a control is taken, and what is said of each point."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.views.explore.control import Control, Slider

NUM_POINTS: Final = 8
"""Runs of a curve."""

_NUMBERS: Final = (
    "num_preemptions",
    "kv_cache_usage_max",
    "p95_ttft_ms",
    "p95_tpot_ms",
    "p95_e2el_ms",
    "output_throughput",
)


def values_of(control: Control, now: Any) -> list[Any]:
    """Return the values of a curve: `now` is among them, where it is in the range.

    Raises
    ------
    ConfigError
        If the control has no range: a name of many, or a number without a slider.

    Examples
    --------
    >>> from sim.views.explore.control import Control, Slider
    >>> tenths = Slider(0.4, 1.1, 0.1)
    >>> rate = Control("rate", "rate", "traffic", "number", 1.0, slider=tenths)
    >>> values_of(rate, 0.85)
    [0.4, 0.5, 0.6, 0.7, 0.85, 0.9, 1.0, 1.1]
    """
    if control.what == "switch":
        return [False, True]
    if control.what == "choice":
        names = [each.value for each in control.choices]
        if not 1 < len(names) <= 2 * NUM_POINTS:
            raise ConfigError(
                f"{control.key}: a curve is drawn over 2 to {2 * NUM_POINTS} names, "
                f"got {len(names)}; choose one after the other"
            )
        return names
    if control.slider is None:
        raise ConfigError(f"{control.key}: has no range for a curve; type its values")
    values = _spaced(control.slider, is_whole=control.what == "whole")
    if isinstance(now, int | float) and values[0] < now < values[-1]:
        inner = values[1:-1] or values
        nearest = min(inner, key=lambda each: abs(each - now))
        values[values.index(nearest)] = now
    return sorted(set(values))


def _spaced(slider: Slider, *, is_whole: bool) -> list[Any]:
    """Return numbers over the range of a slider, as it is spaced."""
    shares = [each / (NUM_POINTS - 1) for each in range(NUM_POINTS)]
    low, high = slider.low, slider.high
    if slider.step:
        steps = [round((high - low) * share / slider.step) for share in shares]
        found = [float(f"{low + each * slider.step:.10g}") for each in steps]
    else:
        found = [low * math.exp(math.log(high / low) * share) for share in shares]
        found = [float(f"{each:.3g}") for each in found]
    return [round(each) for each in found] if is_whole else found


def point(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the point of a run on a curve: some numbers, and the objectives."""
    verdict = summary.get("verdict")
    numbers = {key: summary.get(key) for key in _NUMBERS}
    if verdict is not None:
        numbers |= {each["name"]: each["value"] for each in verdict["objectives"]}
    return {
        "numbers": numbers,
        "holds": None if verdict is None else verdict["holds"],
    }
