"""Checks of the numbers that routers and deciders are given."""

from __future__ import annotations

from math import isfinite

from sim.errors import ConfigError


def at_least(least: int, **given: float | None) -> None:
    """Refuse numbers below `least` or without end; None is a default."""
    for name, value in given.items():
        if value is not None and not (value >= least and isfinite(value)):
            raise ConfigError(
                f"{name}: must be {least} or more, and finite, got {value}"
            )


def shares(**given: float) -> None:
    """Refuse numbers that are no share of a whole."""
    for name, value in given.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}: must be from 0 to 1, got {value}")
