"""Checks of what a user sets of a cost model; a message gives rule, value, remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sim.errors import ConfigError
from sim.hardware.models.architecture import KV_CACHE_DTYPE_BYTES, dtype_bytes

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture


def at_least_zero(key: str, value: float) -> float:
    return _finite(key, value, "a finite number >= 0", minimum=0.0)


def above_zero(key: str, value: float) -> float:
    number = _finite(key, value, "a finite number > 0", minimum=0.0)
    if number == 0.0:
        raise ConfigError(f"{key} must be a finite number > 0; got {value!r}")
    return number


def share(key: str, value: float) -> float:
    """Return `value`, an efficiency in (0, 1], as a float."""
    number = above_zero(key, value)
    if number > 1.0:
        raise ConfigError(
            f"{key} is a share of the datasheet's rate and must be in (0, 1]; "
            f"got {value!r}: give 0.8 for 80 %"
        )
    return number


def correlation(key: str, value: float) -> float:
    """Return `value`, how alike choices are, in [0, 1), as a float."""
    number = at_least_zero(key, value)
    if number >= 1.0:
        raise ConfigError(
            f"{key} must be in [0, 1); got {value!r}: give 0 for tokens that choose "
            "freely"
        )
    return number


def _finite(key: str, value: object, rule: str, minimum: float) -> float:
    # bool is an int to Python, but `base_s: true` is a slip of the pen
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be {rule}; got {value!r}: give a number")
    if not math.isfinite(value) or value < minimum:
        raise ConfigError(f"{key} must be {rule}; got {value!r}")
    return float(value)


def check_factor(key: str, value: float) -> None:
    if not value >= 1.0:
        raise ConfigError(
            f"{key} says how many times longer something takes beside another and "
            f"must be >= 1; got {value!r}: give 1.0 for no effect"
        )


def check_choice(key: str, value: Any, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{key} must be one of {', '.join(map(str, choices[:-1]))}, or null for "
            f"what the engine does; got {value!r}"
        )


def kv_itemsize_bytes(model: ModelArchitecture, dtype: str) -> int:
    """Return the bytes of a number of the KV cache, or refuse what has no price."""
    asked = model.kv_cache_dtype
    if dtype == "auto" and asked is None:
        return dtype_bytes(model.dtype)
    known = KV_CACHE_DTYPE_BYTES
    if dtype not in {"auto", *known}:
        raise ConfigError(
            f"unknown kv_cache_dtype: {dtype!r}; use 'auto' or one of "
            f"{', '.join(known)}"
        )
    if dtype == "auto" and asked not in known:
        raise ConfigError(
            f"kv_cache_dtype: {model.name} asks for {asked}, in which steps "
            f"have no price; use one of {', '.join(known)}"
        )
    return known[asked if asked and dtype == "auto" else dtype]
