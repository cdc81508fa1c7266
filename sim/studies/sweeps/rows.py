"""One run as a row of the dataset: plain numbers and text, nothing of the machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sim.studies.sweeps.expand import value_at

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sim.studies.sweeps.job import Job, Outcome

Row = dict[str, Any]

_PLAIN = (bool, int, float, str)
_MOST_INT = 2**63

_ODD_IN_JSON = (
    *("e-", "e+", "NaN", "Infinity"),
    *(f'{end}": ' for end in (*"0123456789", '"true', '"false', '"null')),
)
"""Marks of what JSON may not write as YAML does: powers of ten, and keys that are no
text. Text may have them, too."""


class RowMaker:
    """Makes the rows of a sweep.

    Parameters
    ----------
    keys
        Configuration keys that are varied, each a column.
    text_keys
        Those whose values have several types: columns of JSON text.
    repeats
        Runs of each combination.
    """

    def __init__(
        self, keys: Iterable[str], text_keys: Collection[str] = (), repeats: int = 1
    ) -> None:
        self._keys = [key for key in keys if key != "seed"]
        self._text_keys = text_keys
        self._repeats = repeats

    @property
    def leaders(self) -> list[str]:
        """Columns that stand first, in this order."""
        return ["run", "repeat", *self._keys, "seed", "status", "error"]

    def row(self, job: Job, outcome: Outcome) -> Row:
        """Return the row of a run: the same one, wherever and whenever it ran."""
        config = job.config
        row: Row = {"run": job.index, "repeat": job.index % self._repeats}
        for key in self._keys:
            value = value_at(config, key)
            is_text = key in self._text_keys
            row[key] = json.dumps(value) if is_text else _cell(value)
        row |= {
            "seed": _cell(config.get("seed", 0)),
            "status": outcome.status,
            "error": outcome.error,
        }
        for key, value in (outcome.summary or {}).items():
            row.setdefault(key, _cell(value))
        return row | {"config": flow(config)}


def _cell(value: Any) -> Any:
    """Return a plain value as it is, anything else as JSON."""
    if value is None or isinstance(value, _PLAIN):
        if isinstance(value, int) and not -_MOST_INT <= value < _MOST_INT:
            return float(value)
        return value
    return json.dumps(value)


def flow(value: Any) -> str:
    """Return plain data as YAML that, but for keys that are numbers, is JSON as well.

    A hundredth of the time that a YAML library takes, for every run of a sweep.
    """
    text = json.dumps(value, ensure_ascii=False)
    return _flow(value) if any(mark in text for mark in _ODD_IN_JSON) else text


def _flow(value: Any) -> str:
    """Return what `flow` does, value by value: ten times as slow."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flow(k)}: {_flow(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, float):
        # YAML takes 1e-05 for a word.
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    return json.dumps(value, ensure_ascii=False)


def text_keys(jobs: Iterable[Job], keys: Iterable[str]) -> frozenset[str]:
    """Return the keys whose values, over all runs, are not of one kind.

    Whole and other numbers are of one kind, and a missing value is of any.
    """
    kinds: dict[str, set[str]] = {key: set() for key in keys}
    for job in jobs:
        for key, found in kinds.items():
            found.add(_kind(value_at(job.config, key)))
    return frozenset(key for key, found in kinds.items() if len(found - {""}) > 1)


def _kind(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "json"


def summary_of(row: Mapping[str, Any]) -> str:
    """Return how a run that is not done ended, in a line."""
    lines = str(row["error"]).strip().splitlines()
    return f"run {row['run']} {row['status']}: {lines[-1] if lines else ''}"
