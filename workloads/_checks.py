"""Checks of parameters, with messages of one line: rule, value, remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from workloads.errors import WorkloadError

MAX_TOKENS = 10**9
"""Largest length that a request may have; far above any model, far below int64."""

MAX_SPECULATIVE_TOKENS = 1024
"""Most drafts of a step, far above any drafter."""


def finite(name: str, value: float, remedy: str) -> float:
    """Return ``value`` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        remedy = _as_number(value) or remedy
        raise WorkloadError(f"{name} must be a number; got {value!r}; {remedy}")
    try:
        number = float(value)
    except OverflowError:
        got = f"{str(value)[:20]}..."
        raise WorkloadError(f"{name} must be finite; got {got}; {remedy}") from None
    if not math.isfinite(number):
        raise WorkloadError(f"{name} must be finite; got {value!r}; {remedy}")
    return number


def positive(name: str, value: float, remedy: str) -> float:
    """Return ``value`` as a float between 1e-9 and 1e9.

    The range keeps every later sum and reciprocal finite; no real rate, scale or period
    in seconds lies outside it.
    """
    number = finite(name, value, remedy)
    if number <= 0:
        raise WorkloadError(f"{name} must be > 0; got {value!r}; {remedy}")
    return between(name, number, 1e-9, 1e9, remedy)


def between(name: str, value: float, low: float, high: float, remedy: str) -> float:
    """Return ``value`` as a float, both ends included."""
    number = finite(name, value, remedy)
    if not low <= number <= high:
        rule = f"between {low:g} and {high:g}"
        raise WorkloadError(f"{name} must be {rule}; got {value!r}; {remedy}")
    return number


def whole(name: str, value: int, low: int, high: int, remedy: str) -> int:
    """Return ``value`` as an int, both ends included."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise WorkloadError(f"{name} must be an integer; got {value!r}; {remedy}")
    if not low <= value <= high:
        rule = f"between {low} and {high}"
        raise WorkloadError(f"{name} must be {rule}; got {value!r}; {remedy}")
    return int(value)


def _as_number(value: object) -> str:
    """Say how to write a number that arrived as text; empty if it is none."""
    if not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    # YAML 1.1 wants a dot and a sign in an exponent: 1e-3 is text, 1.0e-3 is not.
    return f"write {number!r} without quotes (YAML reads 1e-3 as text, not 1.0e-3)"


def check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    """Check that a lower end is not above the upper one."""
    if low > high:
        raise WorkloadError(
            f"{low_name} must be <= {high_name}; got {low_name}={low}, "
            f"{high_name}={high}; exchange them"
        )


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        known = ", ".join(choices)
        raise WorkloadError(f"{name} must be one of {known}; got {value!r}; choose one")


def numbers(name: str, values: Sequence[float], remedy: str) -> tuple[float, ...]:
    """Return a list's numbers as finite floats."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise WorkloadError(f"{name} must be a list; got {values!r}; {remedy}")
    return tuple(finite(f"{name}[{i}]", n, remedy) for i, n in enumerate(values))


def check_role(name: str, value: object, role: type, method: str) -> None:
    """Check that ``value`` plays a role: a protocol with `method`."""
    if not isinstance(value, role):
        raise WorkloadError(
            f"{name} must have the method {method}; got {value!r}; "
            f"give a {role.__name__}"
        )


def checked_window(window: Sequence[float | None]) -> tuple[float, float | None]:
    """Return a window ``(start_s, end_s)`` of a trace; None for an open end."""
    remedy = "give seconds of the trace, such as [600, 1200], or [600, null] for all"
    remedy += " from 600 s on"
    if isinstance(window, str) or not isinstance(window, Sequence) or len(window) != 2:
        raise WorkloadError(f"window must be two numbers; got {window!r}; {remedy}")
    start, end = window
    # `finite` refuses None too; only the end may be open.
    start_s = finite("window start", start, remedy)  # type: ignore[arg-type]
    end_s = math.inf if end is None else finite("window end", end, remedy)
    if not 0 <= start_s < end_s:
        rule = "window must have 0 <= start < end"
        raise WorkloadError(f"{rule}; got [{start_s:g}, {end_s:g}]; {remedy}")
    return start_s, None if end is None else end_s
