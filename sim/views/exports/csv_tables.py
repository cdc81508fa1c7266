"""The tables of a run as CSV: a cell is empty where there is no value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from sim.results.tables.memory import as_recorded, is_text
from sim.results.tables.steps import BATCH_ROWS

if TYPE_CHECKING:
    from pathlib import Path

    from sim.results.folder import RunFolder

TABLES: Final = ("requests", "steps", "preemptions", "itl")


def write_csv(folder: RunFolder, directory: Path) -> list[str]:
    """Write a file a table, some rows at a time; return how many rows each has."""
    done = []
    for name in TABLES:
        source = folder.recorded(f"{name}.parquet")
        if source is not None:
            num = _write(source, directory / f"{name}.csv")
            done.append(f"{num:,} {name}" if name != "itl" else f"{num:,} tokens")
    return [f"rows: {', '.join(done)}"]


def _write(source: Path, path: Path) -> int:
    with pq.ParquetFile(source, pre_buffer=False) as file:
        schema = pa.schema(
            (field.name, pa.string() if is_text(field.type) else field.type)
            for field in file.schema_arrow
        )
        with pyarrow.csv.CSVWriter(str(path), schema) as writer:
            for batch in file.iter_batches(BATCH_ROWS):
                columns = [_without_nan(as_recorded(each)) for each in batch.columns]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        return int(file.metadata.num_rows)


def _without_nan(column: pa.Array) -> pa.Array:
    if not pa.types.is_floating(column.type):
        return column
    nothing = pa.scalar(None, column.type)
    return pc.if_else(pc.is_nan(column), nothing, column)
