"""Configuration files: YAML as plain data, and the files that they name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sim.config.plugins import USER_CLASS, refuse_plugins
from sim.errors import ConfigError
from workloads.errors import PlainDataError
from workloads.plain import parse_yaml

_NAMING_KEYS = frozenset(
    {"kind", "type", "scheduler", "evictor", "preemption_victim", "admission"}
    | {"cost", "router", "decode_router", "decider"}
)
_FETCH = "see 'kvsim workload fetch --help'"


def read_yaml(path: Path, tables: str = "workload, engine and cost") -> dict[str, Any]:
    """Read a file that holds a table."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file '{path}'; start from one in the "
            "repository's examples/"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"'{path}' cannot be read: {error}; give a YAML file"
        ) from error
    data = _parsed(text, f"'{path}'")
    if not isinstance(data, dict):
        raise ConfigError(f"'{path}' must hold the tables {tables}; see examples/")
    return data


def find_files(data: dict[str, Any], directory: Path) -> None:
    """Make the paths in a configuration absolute, in place.

    Traces, presets, models, GPUs, profiles and users' own classes are looked for from
    the working directory, then beside the configuration, so that it runs from anywhere,
    and so that what is written into the results runs again.
    """
    refuse_plugins(data)
    engine = data.get("engine")
    if isinstance(engine, dict):
        for key in ("model", "gpu"):
            found = found_path(engine.get(key), directory)
            # A folder is a model only if it holds one, and never a GPU.
            if found and Path(found).is_dir():
                config = Path(found) / "config.json"
                found = found if key == "model" and config.is_file() else None
            engine[key] = found or engine.get(key)
            if engine[key] is None:
                del engine[key]  # missing, to be said so
        for key in ("interconnect", "network"):
            if found := found_path(engine.get(key), directory):
                engine[key] = found
        drafts = engine.get("speculative_config")
        if isinstance(drafts, dict) and (
            found := found_path(drafts.get("model"), directory)
        ):
            drafts["model"] = found
    _find_user_classes(data, directory)
    fleet = data.get("fleet")
    if isinstance(fleet, dict) and isinstance(prices := fleet.get("prices"), str):
        found = found_path(prices, directory)
        if found is None:
            raise ConfigError(
                f"fleet.prices: there is no file '{prices}'; copy examples/prices.yaml "
                f"and edit it"
            )
        fleet["prices"] = read_yaml(Path(found), "per_gpu_hour")
    cost = data.get("cost")
    if isinstance(cost, dict) and "profile" in cost:
        cost["profile"] = found_path(cost["profile"], directory) or cost["profile"]
    workload = data.get("workload")
    preset = workload.get("preset") if isinstance(workload, dict) else None
    if isinstance(preset, dict) and str(preset.get("name")).endswith(".json"):
        preset["name"] = found_path(preset["name"], directory) or preset["name"]
    _find_traces(workload, directory, "workload")


def _find_traces(value: object, directory: Path, where: str) -> None:
    """Resolve the ``path`` of every table, however deep: all of them are traces."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            _find_traces(each, directory, f"{where}[{index}]")
    if not isinstance(value, dict):
        return
    for key, each in value.items():
        if key != "path" or not isinstance(each, str):
            _find_traces(each, directory, f"{where}.{key}")
            continue
        found = found_path(each, directory)
        if found is None:
            raise ConfigError(
                f"{where}.path: there is no file '{each}'; point to "
                f"yours with --set {where}.path=FILE, or {_FETCH}"
            )
        value[key] = found


def _find_user_classes(table: dict[str, Any], directory: Path) -> None:
    """Resolve every ``kind: file.py:Class``, and where a class may stand bare."""
    for key, value in table.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                _find_user_classes(each, directory)
        if key in _NAMING_KEYS and isinstance(value, str):
            own = USER_CLASS.fullmatch(value)
            found = own and found_path(own["file"], directory)
            if own and found:
                table[key] = f"{found}:{own['name']}"


def found_path(given: object, directory: Path) -> str | None:
    """Return the absolute path of what `given` names, if there is such a thing."""
    if not isinstance(given, str) or not given:
        return None
    for candidate in (Path(given).expanduser(), directory / given):
        try:
            if candidate.exists():
                return str(candidate.resolve())
        except (OSError, RuntimeError, ValueError):
            return None  # too long for a path, say
    return None


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
    _put(data, key, _parsed(text, f"--set {key}"), f"--set {key}")


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_yaml(text, where)
    except PlainDataError as error:
        raise ConfigError(str(error)) from error


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a key with dots, in place; the value is copied."""
    _put(data, key, copy.deepcopy(value), key)


def _put(data: dict[str, Any], key: str, value: Any, where: str) -> None:
    table: Any = data
    *tables, last = key.split(".")
    for name in tables:
        if isinstance(table, list):
            table = table[_place(table, name, where)]
        else:
            inner = table.get(name)
            if inner is None:
                inner = table[name] = {}
            table = inner
        if not isinstance(table, dict | list):
            raise ConfigError(f"{where}: '{name}' is not a table")
    table[_place(table, last, where) if isinstance(table, list) else last] = value


def place_of(rows: list[Any], name: str) -> int | None:
    """Return where a list has the item of this number, or of this ``name``."""
    for place, row in enumerate(rows):
        if name == str(place) or (isinstance(row, dict) and row.get("name") == name):
            return place
    return None


def _place(rows: list[Any], name: str, where: str) -> int:
    place = place_of(rows, name)
    if place is not None:
        return place
    named = [
        str(row["name"]) for row in rows if isinstance(row, dict) and "name" in row
    ]
    known = ", ".join(named) or f"0 to {len(rows) - 1}" if rows else "none"
    raise ConfigError(f"{where}: the list has no item '{name}' (it has: {known})")
