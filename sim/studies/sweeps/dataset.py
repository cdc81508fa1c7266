"""Runs as rows of plain numbers and text, and the Parquet files that they go to."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sim.errors import OutputError
from sim.results.tables.memory import to_arrow, to_arrow_texts
from sim.studies.sweeps.expand import value_at

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

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

_WHOLE = "runs.parquet"
_PARTIAL = ".partial"
_FIRST_WAIT_S = 1.0
_SHARE_AT_RISK = 0.01
"""The share of its time that a sweep may lose if all of it is killed."""
_ROW_GROUP = 16_384


class RowMaker:
    """Makes the rows of a sweep.

    Each of `keys`, which are varied, is a column: of JSON text if it is one of
    `text_keys`, whose values have several types.
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
    """Return the text of `flow`, value by value: ten times as slow."""
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


class RunDataset:
    """Rows of runs in a folder that opens as one table at any time.

    While runs finish, small files are added, each written as a whole or not at all.
    `finish` makes one file of them in the order of runs: the same bytes, in whatever
    order rows came and however often the sweep was interrupted. Columns may appear and
    numbers become floats as it grows; all files always have the same columns: the
    `leaders`, then the others by name. `clock` decides when the next file is due.
    """

    def __init__(
        self,
        directory: Path,
        leaders: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._leaders = leaders
        self._clock = clock
        self._began_s = self._written_s = clock()
        self._rows: list[Mapping[str, Any]] = []
        for path in directory.glob(f".*{_PARTIAL}"):
            path.unlink()
        if (directory / _WHOLE).exists():  # finished, but for what was to be removed
            self._remove_parts()
        self._schema = _union(*(pq.read_schema(path) for path in self._files()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Write the rows so far, also if the sweep ends early."""
        self.flush()

    @property
    def is_whole(self) -> bool:
        return (self._directory / _WHOLE).exists()

    def finished(self) -> set[int]:
        tables = (_read(path, ["run"]) for path in self._files())
        return {index for table in tables for index in table["run"].to_pylist()}

    def counts(self) -> dict[str, int]:
        """Return how many runs on disk ended with each status."""
        found: dict[str, int] = {}
        for path in self._files():
            for status in _read(path, ["status"])["status"].to_pylist():
                found[status] = found.get(status, 0) + 1
        return found

    def append(self, row: Mapping[str, Any]) -> None:
        """Take a row; from time to time, those that have come go to disk."""
        self._rows.append(row)
        now_s = self._clock()
        due_s = max(_FIRST_WAIT_S, _SHARE_AT_RISK * (now_s - self._began_s))
        if now_s - self._written_s >= due_s:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        table, schema = self._come()
        parts = self._files()
        if not schema.equals(self._schema):
            for path in parts:
                _write(path, _as(_read(path), schema))
        number = max((int(path.stem.partition("-")[2]) for path in parts), default=0)
        self._schema = schema
        _write(self._directory / f"part-{number + 1:06}.parquet", _as(table, schema))
        self._rows = []
        self._written_s = self._clock()

    def finish(self) -> None:
        """Make one file of all rows, in the order of runs."""
        if self.is_whole:
            return
        tables, schema = [_read(path) for path in self._files()], self._schema
        if self._rows:
            table, schema = self._come()
            tables.append(table)
        whole = pa.concat_tables([_as(table, schema) for table in tables])
        _write(self._directory / _WHOLE, whole.sort_by("run"))
        self._rows, self._schema = [], schema
        self._remove_parts()

    def _come(self) -> tuple[pa.Table, pa.Schema]:
        """Return the rows that are not on disk, and the columns of all rows."""
        table = _table(self._rows)
        schema = self._in_order(_union(self._schema, table.schema))
        return table, schema

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.parquet"))

    def _remove_parts(self) -> None:
        for path in self._directory.glob("part-*.parquet"):
            path.unlink()

    def _in_order(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns with the leaders first, and the configuration last."""
        first = {name: place for place, name in enumerate(self._leaders)}

        def place(field: pa.Field) -> tuple[int, bool, str]:
            name = field.name
            return first.get(name, len(first)), name == "config", name

        return pa.schema(sorted(schema, key=place))


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a file without `pyarrow.dataset`, which imports pandas."""
    with pq.ParquetFile(path) as file:
        return file.read(columns)


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table of the columns that any of them has."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: to_column([row.get(name) for row in rows]) for name in names}
    return pa.table(columns)


def _union(*schemas: pa.Schema) -> pa.Schema:
    """Return all columns, each of a type that holds the values of all."""
    types: dict[str, pa.DataType] = {}
    for field in (field for schema in schemas for field in schema):
        types[field.name] = _common(types.get(field.name, pa.null()), field.type)
    return pa.schema(list(types.items()))


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns of `schema`: nulls where it had none."""
    if table.schema.equals(schema):
        return table
    columns = [
        table[field.name].cast(field.type, safe=False)  # 2**60 is a float as well
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _write(path: Path, table: pa.Table) -> None:
    """Write a file so that there is all of it, or what there was before."""
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        with partial.open("wb") as file:
            whole = table.combine_chunks()
            pq.write_table(whole, file, compression="zstd", row_group_size=_ROW_GROUP)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OutputError(
            f"'{path}' could not be written: {error.strerror or error}; make room and "
            f"go on with --resume"
        ) from error


def to_column(values: Sequence[Any]) -> pa.Array:
    """Return a column of numbers, truths or texts, else of JSON; None is missing.

    `pyarrow.array` of a list imports pandas where it is installed: seconds.
    """
    is_there = np.array([value is not None for value in values], bool)
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.nulls(len(values))
    if kinds <= {int, float}:
        kind = np.dtype(np.int64 if kinds == {int} else np.float64)
        filled = to_arrow(np.array([value or 0 for value in values], kind))
    elif kinds == {bool}:
        bits = _bits(np.array([bool(value) for value in values], bool))
        filled = pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])
    else:
        filled = to_arrow_texts([_text(value) for value in values])
    if is_there.all():
        return filled
    buffers = [_bits(is_there), *filled.buffers()[1:]]
    return pa.Array.from_buffers(filled.type, len(values), buffers)


def _bits(truths: Any) -> pa.Buffer:
    return pa.py_buffer(np.packbits(truths, bitorder="little"))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
