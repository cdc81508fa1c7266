"""The configurations, and what differs between them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from sim.results.differences import flat
from sim.views.report.html import Markup, details, element, paragraph, table
from sim.views.report.looks import tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.views.report.source import Run

_MISSING = object()


def show_configuration(runs: Sequence[Run]) -> Iterator[Markup]:
    """Return what differs, and each configuration in full."""
    if len(runs) > 1:
        yield _differences(runs)
    else:
        yield paragraph("Keys that are set; all others take their defaults.")
        yield _yaml(_set_keys(runs[0].config))
    for run in runs:
        whose = "" if len(runs) == 1 else f" of {run.label}"
        yield details(f"Complete configuration{whose}", _yaml(run.config))


def _yaml(config: Mapping[str, Any]) -> Markup:
    told = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    return element("pre", told, tabindex="0")


def _set_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that are null, at any depth."""
    return {
        key: _set_keys(value) if isinstance(value, dict) and value else value
        for key, value in config.items()
        if value is not None
    }


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values are not all the same, and the values."""
    tables = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for each in tables for key in each)
    found = []
    for key in keys:
        values = [each.get(key, _MISSING) for each in tables]
        if any(value != values[0] for value in values[1:]):
            found.append((key, values))
    return found


def _differences(runs: Sequence[Run]) -> Markup:
    found = differences(runs)
    if not found:
        return paragraph("The configurations are the same.")
    head = ["key", *(tag(run) for run in runs)]
    rows = [(element("code", key), *map(_told, values)) for key, values in found]
    return table("Keys that differ", head, rows, class_="texts")


def _told(value: Any) -> str:
    if value is _MISSING:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
