"""Types of the tables of a configuration, and their strictness."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Kind = dict[str, Any]
Named = Annotated[
    Kind,
    BeforeValidator(lambda value: {"kind": value} if type(value) is str else value),
]
"""A table with a kind, or the kind alone."""
Count = Annotated[int, Field(ge=1, le=10**9)]
Limit = Annotated[float, Field(gt=0)]


def _number_or_shares(value: object) -> object:
    """Say in one rule what the branches of the union would say in several."""
    rule = "should be a whole number, or shares such as {1: 0.9, 4: 0.1}"
    if isinstance(value, dict):
        for each, share in value.items():
            if type(each) is not int or type(share) not in (int, float):
                raise ValueError(f"{rule}, got {shortened({each: share})}")
    elif type(value) is not int:
        raise ValueError(rule)
    return value


def _name_or_shares(value: object) -> object:
    """Say in one rule what the branches of the union would say in several."""
    rule = "should be a name, or shares such as {interactive: 0.8, batch: 0.2}"
    if isinstance(value, dict):
        for each, share in value.items():
            if not isinstance(each, str) or type(share) not in (int, float):
                raise ValueError(f"{rule}, got {shortened({each: share})}")
    elif type(value) is not str:
        raise ValueError(rule)
    return value


def _priority(value: object) -> object:
    """Let a service level have a priority; else as any number or shares."""
    if not isinstance(value, dict) or not any(isinstance(each, str) for each in value):
        return _number_or_shares(value)
    for name, rank in value.items():
        if not isinstance(name, str) or type(rank) is not int:
            rule = (
                "should give each service level a number, such as {gold: 0, bronze: 1}"
            )
            raise ValueError(f"{rule}, got {shortened({name: rank})}")
    return value


Priority = Annotated[
    int | dict[int, float] | dict[str, int], BeforeValidator(_priority)
]
"""One for all requests, shares of priorities, or one for each service level."""

Names = Annotated[str | dict[str, float], BeforeValidator(_name_or_shares)]
"""One name for all requests, or from a name to the share that has it."""

Shares = Annotated[int | dict[int, float], BeforeValidator(_number_or_shares)]
"""One value for all requests, or from a value to the share that has it."""


class ConfigTable(BaseModel):
    """A part of a configuration: unknown keys, wrong types and NaN are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )


def shortened(value: object, most: int = 80) -> str:
    """Return a value as text, for a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
