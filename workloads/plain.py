"""JSON that users write: a key stands once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_json(text: str) -> Any:
    """Return what `text` spells; a ValueError says what is wrong with it."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice; the first would be lost in silence."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key '{key}' stands twice; remove one")
        table[key] = value
    return table
