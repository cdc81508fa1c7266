"""In which keys configurations differ: what a legend says, and a table's columns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MISSING = object()


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return plain data with dotted keys: one entry for every value that is no table.

    Examples
    --------
    >>> flat({"engine": {"gpu": "h200_sxm", "watermark": None}, "seed": 0})
    {'engine.gpu': 'h200_sxm', 'engine.watermark': None, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys in which configurations differ, and the value of each of them.

    Keys are dotted, in the order in which they first come; None where one has none.
    """
    tables = [flat(config) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = {key: [table.get(key, _MISSING) for table in tables] for key in keys}
    return {
        key: [None if value is _MISSING else value for value in values]
        for key, values in found.items()
        if len({_text(value) for value in values}) > 1
    }


def _text(value: Any) -> str:
    return "" if value is _MISSING else json.dumps(value, sort_keys=True, default=str)


def short_value(value: Any) -> str:
    """Return a value in few words: of a table its kind and keys, of a path the file.

    Examples
    --------
    >>> short_value({"kind": "/home/me/my.py:InTurn", "most_times": 2})
    'my.py:InTurn most_times=2'
    >>> short_value("/home/me/my.py:InTurn"), short_value("lru"), short_value(None)
    ('my.py:InTurn', 'lru', 'null')
    """
    if isinstance(value, dict):
        rest = (f"{k}={short_value(v)}" for k, v in value.items() if k != "kind")
        kind = [short_value(value["kind"])] if "kind" in value else []
        return " ".join([*kind, *rest])
    if isinstance(value, str):
        return value.rpartition("/")[2] if ".py:" in value else value
    return json.dumps(value, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ends of dotted keys that tell them apart.

    Examples
    --------
    >>> short_names(["engine.gpu", "workload.a.name", "workload.b.name"])
    {'engine.gpu': 'gpu', 'workload.a.name': 'a.name', 'workload.b.name': 'b.name'}
    >>> short_names(["fleet.router.kind", "fleet.pools.0.replicas"])
    {'fleet.router.kind': 'router.kind', 'fleet.pools.0.replicas': 'replicas'}
    """
    return {key: _short(key, keys) for key in keys}


_OF_WHAT = frozenset({"kind", "name", "path"})
"""Keys that say nothing without their table."""


def _short(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for num in range(1 + (parts[-1] in _OF_WHAT), len(parts)):
        if parts[-num].isdigit():
            continue
        end = ".".join(parts[-num:])
        if sum(f".{other}".endswith(f".{end}") for other in keys) == 1:
            return end
    return key
