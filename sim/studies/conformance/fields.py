"""Types of the fields of decision workloads, and the table that holds them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def whole(value: Any) -> Any:
    """Return ``1.0`` as ``1``, anything else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


MAX_BLOCKS = 1 << 22
"""Far beyond any engine; a slip of the pen is refused rather than run out of memory."""

Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Pair = Annotated[tuple[Count, Count], BeforeValidator(as_tuple)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Table(BaseModel):
    """An object of a workload file: its keys are known, and it does not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
