"""Changes to a configuration on its way in: values by key, or ``key.path=value``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from sim.config.files import parse_yaml
from sim.errors import ConfigError

Overrides: TypeAlias = Mapping[str, Any] | Iterable[str]
"""Values by dotted key, or assignments with values in YAML."""


def override(data: dict[str, Any], overrides: Overrides) -> None:
    """Apply overrides as of `load_config`, in place."""
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides are a table of values by key, or a list of key.path=value, "
            f"got the text '{overrides}'; put it in a list"
        )
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            put(data, key, value)
        return
    for each in overrides:
        assign(data, each)


def assign(data: dict[str, Any], override: str) -> None:
    """Apply one ``key.path=value``, the value in YAML, in place."""
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set takes key.path=value, got '{override}'")
    value = parse_yaml(text, f"--set {key}")
    table = data
    for name in names[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}: '{name}' is not a table")
        table = inner
    table[names[-1]] = value


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a key with dots, in place; the value is copied."""
    *tables, last = key.split(".")
    table = data
    for name in tables:
        inner = table.get(name)
        if inner is None:
            inner = table[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: '{name}' is not a table")
        table = inner
    table[last] = copy.deepcopy(value)
