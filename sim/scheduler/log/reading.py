"""Reading what others wrote: lenient where the meaning is clear."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container

COMMENTS = frozenset({"comment", "comments", "description", "note", "notes"})
"""Keys for people; they decide nothing."""

_REFERENCE = re.compile(
    r"(?:vllm|transformers)?[\s=_-]*v?([0-9]{1,3}(?:\.[0-9]{1,3}){1,3})(?:\.post[0-9]+)?(?:\+[\w.]+)?",
    re.IGNORECASE | re.ASCII,
)


def whole(value: Any) -> Any:
    """Return ``1.0`` as ``1``, anything else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def without_comments(data: Any, nulls: Container[str]) -> Any:
    """Return an object without comments, and without keys of `nulls` that are null.

    A key that is null says as much as one that is not there.
    """
    if not isinstance(data, dict):
        return data
    return {
        key: value
        for key, value in data.items()
        if key not in COMMENTS and (value is not None or key not in nulls)
    }


def release_of(reference: str) -> str:
    """Return the release in ``"vllm 0.33.0"``, ``"vLLM v0.33.0"`` or ``"0.33"``.

    So of ``"transformers 5.17.0"``.

    What is no release comes back as it is.
    """
    matched = _REFERENCE.fullmatch(reference.strip())
    return matched[1] if matched else reference
