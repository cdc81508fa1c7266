"""Checks of what a trace says: lengths, times, JSON objects."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from workloads._checks import MAX_TOKENS
from workloads.traces.parsing.files import numbered_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from workloads.traces.parsing.bad_lines import BadLines

MAX_SECONDS = 1e12
"""Latest time: some 30,000 years."""
MAX_SESSION_ID = 2**62
"""Largest session id that is kept as it is; results hold 64 bits."""


def length_problem(name: str, value: object) -> str | None:
    """Return what is wrong with a length in tokens, or None if it is right.

    Parameters
    ----------
    name
        Column or key, for the message.
    value
        What the trace says; only an int from 1 to 1e9 is right.
    """
    return whole_problem(name, value, 1, MAX_TOKENS)


def whole_problem(name: str, value: object, low: int, high: int) -> str | None:
    """Return what is wrong with a whole number, or None if it is right."""
    if type(value) is int and low <= value <= high:
        return None
    rule = f"{name} must be a whole number from {low} to {high}"
    return f"{rule}; got {value!r:.80}; mend or remove the line"


def time_problem(name: str, value: object, unit: str, most: float) -> str | None:
    """Return what is wrong with a time or duration, or None if it is right.

    Parameters
    ----------
    name
        Column or key, for the message.
    value
        What the trace says; only an int or float from 0 to `most` is right.
    unit
        What it counts, in the plural.
    most
        Largest value.
    """
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


def json_lines(path: str | Path, bad: BadLines) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line_number, object)`` of a file with a JSON object a line.

    Raises
    ------
    WorkloadError, TraceFormatError
        As `numbered_lines`, and for a line that is no object unless `bad` skips it.
    """
    for number, line in numbered_lines(path, bad):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"a line must be one JSON object; got {line[-40:]!r} at its "
            bad.refuse(number, f"{problem}end ({error}); the file may be cut short")
            continue
        if isinstance(entry, dict):
            yield number, entry
        else:
            got = str(entry)[:80]
            problem = f"a line must be a JSON object; got {got!r}; mend the line"
            bad.refuse(number, problem)


def session_numbers(names: Sequence[object]) -> list[int | None]:
    """Return a number for every session: its own if all are numbers, else in order.

    Parameters
    ----------
    names
        Session of each row as the trace writes it; None for no session.
    """
    if all(name is None or _is_number(name) for name in names):
        return [None if name is None else int(str(name)) for name in names]
    numbers: dict[object, int] = {}
    return [
        None if name is None else numbers.setdefault(name, len(numbers))
        for name in names
    ]


def _is_number(name: object) -> bool:
    """Whether a name is a whole number as Python writes it."""
    text = str(name)
    return (
        type(name) in (int, str)
        and len(text) <= 19
        and text.isascii()
        and text.isdecimal()
        and (text == "0" or text[0] != "0")
        and int(text) <= MAX_SESSION_ID
    )
