"""Checks of a trace's values: lengths, times, JSON objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads._checks import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_SECONDS = 1e12
"""Latest time: some 30,000 years."""
MAX_THINK_S = 1e9
"""Longest time between an answer and the next turn: some 30 years."""
MAX_SESSION_ID = 2**62
"""Largest session id that is kept as it is; results hold 64 bits."""


def length_problem(name: str, value: object) -> str | None:
    """Return the fault of a length in tokens, or None if it is right."""
    return whole_problem(name, value, 1, MAX_TOKENS)


def whole_problem(name: str, value: object, low: int, high: int) -> str | None:
    if type(value) is int and low <= value <= high:
        return None
    rule = f"{name} must be a whole number from {low} to {high}"
    return f"{rule}; got {value!r:.80}; mend or remove the line"


def time_problem(name: str, value: object, unit: str, most: float) -> str | None:
    """Return the fault of a time from 0 to `most`, counted in `unit`."""
    # bool is an int to isinstance, and json reads NaN, Infinity and endless integers.
    if type(value) in (int, float) and 0 <= value <= most:  # type: ignore[operator]
        return None
    rule = f"{name} must be a finite number of {unit} from 0 to {most:g}"
    return f"{rule}; got {value!r:.80}; mend or remove the line"


def missing_problem(entry: dict[str, Any], keys: Sequence[str]) -> str | None:
    """Return which of the keys an object lacks, or None if it has them all."""
    for key in keys:
        if key not in entry:
            break
    else:
        return None
    missing = [key for key in keys if key not in entry]
    found = repr(", ".join(entry))[1:-1][:120] or "none"
    return f"keys must include {', '.join(missing)}; got {found}; rename them"


def session_numbers(names: Sequence[object]) -> list[int | None]:
    """Return the sessions' own numbers if all are numbers, else new ones in order."""
    if all(name is None or _is_number(name) for name in names):
        return [None if name is None else int(str(name)) for name in names]
    numbers: dict[object, int] = {}
    return [
        None if name is None else numbers.setdefault(name, len(numbers))
        for name in names
    ]


def _is_number(name: object) -> bool:
    text = str(name)
    return (
        type(name) in (int, str)
        and len(text) <= 19
        and text.isascii()
        and text.isdecimal()
        and (text == "0" or text[0] != "0")
        and int(text) <= MAX_SESSION_ID
    )
