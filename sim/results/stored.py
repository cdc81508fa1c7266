"""The tables of a run that lie on disk, read when they are asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from sim.errors import ResultsError
from sim.results import schema
from sim.results.step_table import ParquetSteps, frame_of
from sim.results.table import ResultTable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

_NEEDED: Mapping[str, Mapping[str, str]] = {
    "steps": schema.STEPS,
    "requests": schema.REQUESTS,
    "preemptions": schema.PREEMPTIONS,
}


class StoredTables:
    """What `sim.results.recorder.Recording` says of a run, as far as its files do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name, columns in _NEEDED.items():
            _check_columns(self._path(name), columns)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.parquet"

    @property
    def step_table(self) -> ParquetSteps:
        """One row a step, in batches."""
        return ParquetSteps(self._path("steps"))

    @cached_property
    def request_table(self) -> ResultTable:
        """One row a request, by id."""
        return read_table(self._path("requests"))

    @cached_property
    def preemption_table(self) -> ResultTable:
        """One row a preemption, in order."""
        return read_table(self._path("preemptions"))

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All steps in memory."""
        return frame_of(self.step_table)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """`request_table` as a frame."""
        return self.request_table.frame()

    @cached_property
    def preemptions(self) -> pd.DataFrame:
        """`preemption_table` as a frame."""
        return self.preemption_table.frame()


def read_table(path: Path) -> ResultTable:
    """Read a table of requests or preemptions as it was in memory."""
    kinds = {field.name: _kind(field.type) for field in pq.read_schema(path)}
    texts = [name for name, kind in kinds.items() if kind == "str"]
    # Not `pq.read_table`, which imports pandas.
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        whole = file.read()
    columns = {name: _one_chunk(whole[name]) for name in whole.column_names}
    return ResultTable(pa.table(columns), kinds)


def _kind(type_: pa.DataType) -> str:
    """Return what `sim.results.schema` calls a type: ``double`` is its float64."""
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "str"
    return "float64" if pa.types.is_float64(type_) else str(type_)


def _one_chunk(column: pa.ChunkedArray) -> pa.ChunkedArray:
    whole = column.combine_chunks()
    chunks = whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]
    if not chunks:
        chunks = [pa.nulls(0, column.type)]
    return pa.chunked_array(chunks)


def _check_columns(path: Path, columns: Mapping[str, str]) -> None:
    try:
        found = set(pq.read_schema(path).names)
    except (OSError, pa.ArrowInvalid) as error:
        why = "is not there" if not path.exists() else "is no Parquet file"
        raise ResultsError(
            f"'{path}' {why}; give a directory that 'kvsim run' wrote"
        ) from error
    if missing := [name for name in columns if name not in found]:
        raise ResultsError(
            f"'{path}' lacks the column {missing[0]}: another release wrote it; run "
            f"its config.yaml again"
        )
