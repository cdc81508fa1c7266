"""The dataset of a sweep: Parquet files that grow while runs finish."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from sim.studies.sweeps.columns import to_column

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_WHOLE = "runs.parquet"
_PARTIAL = ".partial"
_FIRST_WAIT_S = 1.0
_SHARE_AT_RISK = 0.01
"""What a sweep may lose if all of it is killed: a hundredth of its time."""
_ROW_GROUP = 16_384


class RunDataset:
    """Rows of runs in a folder that opens as one table at any time.

    While runs finish, small files are added, each written as a whole or not at all.
    `finish` makes one file of them in the order of runs: the same bytes, in whatever
    order rows came and however often the sweep was interrupted. Columns may appear and
    numbers become floats as it grows; all files always have the same columns.

    Parameters
    ----------
    directory
        Where the files are; must exist.
    leaders
        Columns that stand first; the others follow by name.
    clock
        Seconds from any start on, to decide when the next file is due.
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
        """Write what has come, also if the sweep ends early."""
        self.flush()

    @property
    def is_whole(self) -> bool:
        """Whether `finish` was called."""
        return (self._directory / _WHOLE).exists()

    def finished(self) -> set[int]:
        """Return the indices of the runs that are on disk."""
        tables = (_read(path, ["run"]) for path in self._files())
        return {index for table in tables for index in table["run"].to_pylist()}

    def counts(self) -> dict[str, int]:
        """Return how many runs on disk ended in which way."""
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
        """Write all rows that have come."""
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
    with partial.open("wb") as file:
        whole = table.combine_chunks()
        pq.write_table(whole, file, compression="zstd", row_group_size=_ROW_GROUP)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
