"""Results that another writer of Parquet rewrote say what they said."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.cli.main import run as kvsim
from sim.results.folder import RunFolder
from sim.views.exports.formats import FORMATS, export
from tests.sim.commands import refused
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def by_pandas(path: Path) -> None:
    """Texts become large strings, and what is no number a null."""
    pd.read_parquet(path).to_parquet(path, row_group_size=100)


def by_pandas_as_categories(path: Path) -> None:
    frame = pd.read_parquet(path)
    texts = frame.select_dtypes(exclude="number").columns
    frame.astype(dict.fromkeys(texts, "category")).to_parquet(path)


def with_views(path: Path) -> None:
    """Write as newer writers do: views of texts, narrow integers, other order."""
    table = pq.read_table(path)
    fields = []
    for field in reversed(table.schema):
        kind = field.type
        if pa.types.is_string(kind):
            kind = pa.large_string()
        elif pa.types.is_integer(kind):
            kind = pa.int32()
        fields.append(pa.field(field.name, kind, nullable=False))
    schema = pa.schema(fields)
    pq.write_table(table.select(schema.names).cast(schema), path, store_schema=False)


def without_nan(path: Path) -> None:
    table = pq.read_table(path)
    columns = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_floating(column.type):
            values = column.to_numpy(zero_copy_only=False)
            column = pa.array(values, mask=np.isnan(values))
        columns[name] = column
    pq.write_table(pa.table(columns), path, compression="gzip", row_group_size=50)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with preemptions, rejected requests, and times that are not there."""
    directory = tmp_path_factory.mktemp("results")
    data = minimal(num_gpu_blocks_override=40, max_model_len=600)
    data["workload"]["synthetic"] |= {
        "num_requests": 120,
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 700},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 120},
    }
    out = directory / "out"
    config = write(directory, data)
    more = ["--itl", "exact", "--no-figures", "--quiet", "--out", str(out)]
    assert kvsim(["run", str(config), *more]) == 0
    return out


@pytest.mark.parametrize(
    "rewrite", [by_pandas, by_pandas_as_categories, with_views, without_nan]
)
def test_readers_take_what_equal_writers_write(
    rewrite: Callable[[Path], None], results: Path, tmp_path: Path
) -> None:
    other = tmp_path / "out"
    shutil.copytree(results, other)
    tables = sorted(other.glob("*.parquet"))
    assert len(tables) == 4
    for path in tables:
        rewrite(path)
    ours, theirs = RunFolder(results), RunFolder(other)
    for name in ("steps", "requests", "preemptions"):
        expected: pd.DataFrame = getattr(ours, name)
        found: pd.DataFrame = getattr(theirs, name)
        pd.testing.assert_frame_equal(
            found[list(expected)], expected, check_dtype=False
        )
    assert expected.shape[0] > 0
    assert ours.requests["ttft_s"].isna().any()
    said = []
    for folder in (results, other):
        written = {}
        for to in FORMATS:
            path, lines = export(folder, to, tmp_path / f"{folder.parent.name}-{to}")
            written[to] = lines
            for file in [path] if path.is_file() else sorted(path.iterdir()):
                rows = file.read_text().splitlines()
                key = f"{to}/{file.name if path.is_dir() else ''}"
                # A table with its columns in another order is the same table.
                written[key] = [sorted(row.split(",")) for row in rows]
        said.append(written)
    assert said[0] == said[1]


@pytest.mark.parametrize("words", [("export", "--to", "prometheus"), ("report",)])
def test_texts_that_are_no_utf_8_are_named(
    words: tuple[str, ...],
    results: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "out"
    shutil.copytree(results, other)
    path = other / "requests.parquet"
    table = pq.read_table(path)
    odd = pa.array([b"\xe5x"] * len(table), pa.binary()).view(pa.string())
    place = table.schema.get_field_index("status")
    in_rows = table.set_column(place, "status", odd)
    for name in ("rows", "names"):
        pq.write_table(in_rows if name == "rows" else table, path)
        if name == "names":
            path.write_bytes(path.read_bytes().replace(b"turn", b"tur\xc1"))
        out = ["--out", str(tmp_path / "page.html")]
        line = refused([words[0], str(other), *words[1:], *out], capsys, tmp_path)
        assert "requests.parquet' cannot be read" in line
