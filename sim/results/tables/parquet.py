"""Result tables on disk: the same rows give the same bytes, however they came."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from sim.results import schema
from sim.results.tables.memory import to_arrow
from sim.results.tables.steps import BATCH_ROWS, ParquetSteps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sim.results.tables.memory import ResultTable
    from sim.results.tables.steps import Batch, StepTable

_TYPES = {
    "int8": pa.int8(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "float64": pa.float64(),
    "str": pa.string(),
}
# Shares and seconds that often repeat; the bytes of other floats hardly ever do, and
# compress better one place at a time.
_REPEATED = frozenset(
    {
        "gemm_s",
        "prefill_attention_s",
        "head_s",
        "allreduce_s",
        "swap_s",
        "copy_s",
        "host_s",
        "kv_cache_usage",
        "cpu_cache_usage",
    }
)


def _encoding(name: str, kind: str) -> str:
    if kind == "float64":
        return "PLAIN" if name in _REPEATED else "BYTE_STREAM_SPLIT"
    return "DELTA_BINARY_PACKED"


class TableFile:
    """A Parquet file, written in row groups; use it in a ``with`` block.

    Half the time and two thirds of the room that the defaults would take.
    """

    def __init__(self, path: Path, kinds: Mapping[str, str]) -> None:
        self.schema = pa.schema([(name, _TYPES[kind]) for name, kind in kinds.items()])
        texts = [name for name, kind in kinds.items() if kind == "str"]
        self._file = path.open("wb")
        self._writer = pq.ParquetWriter(
            self._file,
            self.schema,
            compression="zstd",
            use_dictionary=texts,
            write_statistics=list(kinds)[:2],
            column_encoding={
                name: _encoding(name, kind)
                for name, kind in kinds.items()
                if kind != "str"
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def write(self, columns: Mapping[str, Any]) -> None:
        arrays = [to_arrow(columns[field.name]) for field in self.schema]
        arrays = [
            array if array.type == field.type else array.cast(field.type)
            for array, field in zip(arrays, self.schema, strict=True)
        ]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        self._writer.write_table(table, row_group_size=max(1, len(table)))

    def close(self) -> None:
        if self._file.closed:
            return
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _abandon(self) -> None:
        """Let go of a file that will not be read."""
        try:
            self._writer.close()
        except (OSError, pa.ArrowException):
            pass  # the error that brought us here says why
        finally:
            self._file.close()


def write_table(path: Path, table: ResultTable) -> None:
    """Write a whole table in row groups of `BATCH_ROWS`, and sync."""
    num_rows = table.num_rows
    with TableFile(path, table.kinds) as file:
        for first in range(0, num_rows, BATCH_ROWS):
            file.write(table.rows(first, min(first + BATCH_ROWS, num_rows)))


class StepsFile:
    """A sink that writes steps to disk as they come; use it in a ``with`` block."""

    def __init__(self, path: Path, kinds: Mapping[str, str] = schema.STEPS) -> None:
        self._path = path
        self._file = TableFile(path, kinds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def write(self, batch: Batch) -> None:
        self._file.write(batch)

    def close(self) -> ParquetSteps:
        self._file.close()
        return ParquetSteps(self._path)


def copy_steps(steps: StepTable, path: Path) -> None:
    """Write `steps` to `path`, unless that is where they are."""
    if isinstance(steps, ParquetSteps) and steps.path == path:
        return
    with StepsFile(path, steps.kinds) as file:
        for batch in steps.batches(list(steps.kinds)):
            file.write(batch)
