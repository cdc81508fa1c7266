"""Ranges of a key's values: spread evenly, or drawn."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.config.plug import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("uniform", "log", "int", "log_int", "choice")

_FORMS = "{uniform: [0.5, 2.0]}, {log: [1, 100]}, {int: [1, 8]}, {choice: [a, b]}"


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a key may take."""

    kind: str
    """One of `KINDS`."""
    bounds: tuple[Any, ...]
    """Lowest and highest value, both included; of ``choice`` all values."""

    def at(self, share: float) -> Any:
        """Return the value below which `share` of the range lies, from 0 up to 1."""
        low, high = self.bounds[0], self.bounds[-1]
        if self.kind == "choice":
            return self.bounds[int(share * len(self.bounds))]
        if self.kind == "uniform":
            return low + share * (high - low)
        if self.kind == "log":
            return low * (high / low) ** share
        if self.kind == "int":
            return low + int(share * (high - low + 1))
        # Each whole number has the interval up to the next one.
        return min(high, int(low * ((high + 1) / low) ** share))

    def points(self, num: int) -> list[Any]:
        """Return `num` different values from lowest to highest, evenly spaced."""
        low, high = self.bounds[0], self.bounds[-1]
        shares = [i / (num - 1) for i in range(num)] if num > 1 else [0.0]
        if self.kind in ("uniform", "int"):
            values = [low + share * (high - low) for share in shares]
        else:
            values = [low * (high / low) ** share for share in shares]
        if self.kind in ("int", "log_int"):
            values = [round(value) for value in values]
        else:
            # no 0.30000000000000004
            values = [float(f"{value:.12g}") for value in values]
        if len(set(values)) < num:
            raise ValueError(
                f"{low} to {high} has no {num} different values, got num {num}; lower "
                f"it or widen the range"
            )
        return values


def parse_range(value: object) -> Range:
    """Return the range that a table such as ``{log: [1, 100]}`` describes."""
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"should be a range such as {_FORMS}, got {_shown(value)}")
    ((kind, bounds),) = value.items()
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS)
        raise ValueError(
            f"unknown range '{kind}'{hint} (there are: {', '.join(KINDS)})"
        )
    if kind == "choice":
        return Range(kind, tuple(distinct(bounds)))
    _check_bounds(kind, bounds)
    return Range(kind, tuple(bounds))


def parse_values(value: object) -> list[Any]:
    """Return the values of a grid's key: a list, or a range with ``num`` of them."""
    if not isinstance(value, dict):
        return distinct(value)
    rest = {key: each for key, each in value.items() if key != "num"}
    values = parse_range(rest)
    if values.kind == "choice":
        raise ValueError(f"choice is a plain list here, got {_shown(value)}")
    num = value.get("num")
    if num is None and values.kind == "int":
        num = values.bounds[1] - values.bounds[0] + 1
    if type(num) is not int or num < 2:
        raise ValueError(
            f"num should say how many values, at least 2, such as "
            f"{{uniform: [0.5, 2.0], num: 4}}, got {_shown(value)}"
        )
    return values.points(num)


def distinct(values: object) -> list[Any]:
    """Return a list that is not empty and holds no value twice; refuse all else."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"should be a list of values, not empty, got {_shown(values)}")
    seen = set()
    for value in values:
        text = json.dumps(value, sort_keys=True)
        if text in seen:
            raise ValueError(
                f"{_shown(value)} stands twice; remove one (repeats runs it again with "
                f"another seed)"
            )
        seen.add(text)
    return values


def _check_bounds(kind: str, bounds: object) -> None:
    numbers: Sequence[Any] = bounds if isinstance(bounds, list) else ()
    types = (int,) if "int" in kind else (int, float)
    if len(numbers) != 2 or not all(
        type(number) in types and math.isfinite(number) for number in numbers
    ):
        what = "whole numbers" if "int" in kind else "numbers"
        raise ValueError(
            f"{kind} should have two {what}, [lowest, highest], got {_shown(bounds)}"
        )
    low, high = numbers
    if low >= high:
        raise ValueError(
            f"the range is empty: {low} is not below {high}; give [lowest, highest]"
        )
    if kind.startswith("log") and low <= 0:
        raise ValueError(
            f"{kind} needs a lowest value above 0, got {low}; raise it, or use uniform"
        )


def _shown(value: object, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
