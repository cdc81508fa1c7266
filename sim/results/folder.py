"""The folder of a run's results, and the one reader of its files."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sim.config.files import read_yaml
from sim.errors import ResultsError
from sim.results import schema
from sim.results.recording.blocks import BLOCKS_FILE, BLOCKS_FORMAT
from sim.results.tables.memory import ResultTable, as_recorded, is_text, to_numpy
from sim.results.tables.steps import BATCH_ROWS, ParquetSteps, frame_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt
    import pandas as pd

Kind: TypeAlias = Literal["run", "sweep", "plan"]
Columns: TypeAlias = "dict[str, npt.NDArray[Any]]"
"""Columns of a table, equally long; texts as objects."""

MARKERS: Final[Mapping[str, Kind]] = {
    "plan.json": "plan",
    "sweep.json": "sweep",
    "summary.json": "run",
}
"""Kind of a folder's results by the file that marks it."""

TABLES: Final[Mapping[str, Iterable[str]]] = {
    "steps": schema.STEPS,
    "requests": schema.REQUESTS,
    "preemptions": schema.PREEMPTIONS,
}
"""Tables of every run, and their columns."""

_RANKS: Final = ("ranks", "data-parallel ranks", "rank")
_ENGINES: Final = ("engines", "engines of a fleet", "engine")
"""Parts of a run: their key in a summary, in words, and their column."""
_KINDS: Final[Mapping[str, type]] = {
    "title": str,
    "scheduling": str,
    "cost": dict,
    "capacity": dict,
    "versions": dict,
    "warnings": list,
}
_MEASURE: Final = re.compile(
    r"(num_|mean_|median_|p\d+_|max_|peak_)\w+(?<!_interval)|duration|completed|\w+_ms"
    r"|\w+_(throughput|rate|bytes|tokens|blocks|size)"
)
"""Names of numbers in a summary, which may be null."""

_CODES: Final = pa.dictionary(pa.int32(), pa.string())
"""The type of texts in memory."""


def kind_of(directory: Path) -> Kind:
    """Return the kind of results in a folder, or refuse one without any."""
    for marker, kind in MARKERS.items():
        if (directory / marker).is_file():
            return kind
    if directory.is_file() and directory.name in MARKERS:
        raise ResultsError(
            f"'{directory}' is a file of results; give its folder, '{directory.parent}'"
        )
    why = f"holds no results: there is no {', '.join(MARKERS)} in it"
    if not directory.is_dir():
        why = "is no directory" if directory.exists() else "does not exist"
    raise ResultsError(
        f"'{directory}' {why}; give the --out of 'kvsim run', 'sweep' or 'plan'"
    )


class RunFolder:
    """The results of a run on disk: summary, configuration and tables.

    All files are looked at, so that damage is told early; tables are read when they
    are asked for. `columns` and `numbers` name those that the reader will need.
    """

    def __init__(
        self,
        directory: Path,
        columns: Mapping[str, Iterable[str]] = TABLES,
        numbers: Iterable[str] = ("num_gpu_blocks",),
    ) -> None:
        self.directory = directory
        if (kind := kind_of(directory)) != "run":
            raise ResultsError(
                f"'{directory}' holds a {kind}, not a run; give the --out of a "
                f"'kvsim run', or run one of its configurations"
            )
        path = directory / "summary.json"
        self.summary = _Summary(path, read_json(path))
        _check_kinds(path, self.summary)
        for key in numbers:
            if not isinstance(self.summary[key], int | float):
                raise lacks(path, "number", key)
        for name in ("config.yaml", *(f"{table}.parquet" for table in TABLES)):
            if self.recorded(name) is None:
                raise ResultsError(
                    f"'{directory}' is not whole: there is no {name}; run it again"
                )
        for path in sorted(directory.glob("*.parquet")):
            _check_table(path, columns.get(path.stem, ()))

    def of_one_engine(self) -> Self:
        """Return it, or refuse a run of several engines."""
        return self._alone(_RANKS, _ENGINES)

    def of_no_ranks(self) -> Self:
        """Return it, of an engine or of a fleet, or refuse one of ranks."""
        return self._alone(_RANKS)

    def _alone(self, *of: tuple[str, str, str]) -> Self:
        for key, what, column in of:
            if parts := self.summary.get(key):
                raise ResultsError(
                    f"'{self.directory}' is of {len(parts)} {what}, and this is built "
                    f"for one engine; use 'kvsim plot', or read its tables by their "
                    f"column {column}"
                )
        return self

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.directory / "config.yaml"
        try:
            return read_yaml(path)
        except ValueError as error:
            raise damaged(path, error) from error

    @property
    def engine(self) -> Mapping[str, Any]:
        """The table ``engine`` of the configuration."""
        table = self.config.get("engine")
        return table if isinstance(table, dict) else {}

    @cached_property
    def step_table(self) -> ParquetSteps:
        return ParquetSteps(self.directory / "steps.parquet")

    @cached_property
    def request_table(self) -> ResultTable:
        return read_table(self.directory / "requests.parquet")

    @cached_property
    def preemption_table(self) -> ResultTable:
        return read_table(self.directory / "preemptions.parquet")

    @cached_property
    def group_table(self) -> ResultTable | None:
        """``kv_cache_groups.parquet``, of models with several kinds of KV cache."""
        return self._read("kv_cache_groups")

    @cached_property
    def tree_table(self) -> ResultTable | None:
        """``prefix_tree.parquet``, of engines that keep prefixes in a tree."""
        return self._read("prefix_tree")

    @cached_property
    def transfer_table(self) -> ResultTable | None:
        """``transfers.parquet``, of engines with a tier behind their pool."""
        return self._read("transfers")

    @cached_property
    def tier_table(self) -> ResultTable | None:
        """``tier.parquet``, of engines with a tier behind their pool."""
        return self._read("tier")

    @cached_property
    def fleet_table(self) -> ResultTable | None:
        """``fleet.parquet``, of the pools of a fleet over time."""
        return self._read("fleet")

    def _read(self, table: str) -> ResultTable | None:
        path = self.recorded(f"{table}.parquet")
        return None if path is None else read_table(path)

    @cached_property
    def steps(self) -> pd.DataFrame:
        return frame_of(self.step_table)

    @cached_property
    def requests(self) -> pd.DataFrame:
        return self.request_table.frame()

    @cached_property
    def preemptions(self) -> pd.DataFrame:
        return self.preemption_table.frame()

    @cached_property
    def blocks(self) -> Mapping[str, Any] | None:
        """``blocks.json``, if it was recorded."""
        if (path := self.recorded(BLOCKS_FILE)) is None:
            return None
        found = read_json(path)
        if (found.get("format"), found.get("version")) != (BLOCKS_FORMAT, 1):
            raise ResultsError(
                f"'{path}' is not '{BLOCKS_FORMAT}', version 1; record it again with "
                f"this version of kvsim, or take it away"
            )
        return found

    def recorded(self, name: str) -> Path | None:
        """Return the path of a file, or None where it is not there."""
        path = self.directory / name
        return path if path.is_file() else None

    def columns(self, table: str, names: Sequence[str]) -> Columns:
        path = self.directory / f"{table}.parquet"
        try:
            with pq.ParquetFile(path) as file:
                found = file.read(list(names))
            return {name: _array(_recorded(found[name])) for name in names}
        except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
            raise damaged(path, error) from error

    def token_gaps(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield request ids and seconds since the token before, the first left out."""
        last_id, last_s = -1, 0.0
        names = ["request_id", "time_s"]
        with pq.ParquetFile(self.directory / "itl.parquet", pre_buffer=False) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                ids, times_s = (
                    to_numpy(as_recorded(batch.column(name))) for name in names
                )
                gaps_s = np.diff(times_s, prepend=last_s)
                follows = np.diff(ids, prepend=last_id) == 0
                last_id, last_s = int(ids[-1]), float(times_s[-1])
                yield ids[follows], gaps_s[follows]


class _Summary(dict[str, Any]):
    """A summary that says where a number is missing from."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise lacks(self._path, "number", key)


def _check_kinds(path: Path, summary: Mapping[str, Any]) -> None:
    """Refuse a summary that holds a text, say, where a number is due."""
    for key, value in summary.items():
        wanted = _KINDS.get(key, (float, int) if _MEASURE.fullmatch(key) else None)
        if wanted is not None and value is not None and not isinstance(value, wanted):
            shown = repr(value)[:40]
            raise damaged(path, ValueError(f"{key} cannot be {shown}"))


def lacks(path: Path, what: str, name: str) -> ResultsError:
    """Return the error of a file in which another release left something out."""
    return ResultsError(
        f"'{path}' has no {what} '{name}': it is of another version of kvsim; run it "
        f"again"
    )


def damaged(path: Path, error: Exception) -> ResultsError:
    return ResultsError(f"'{path}' cannot be read ({str(error)[:200]}); run it again")


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    if not isinstance(data, dict):
        raise ResultsError(f"'{path}' holds no table; run it again")
    return data


def read_table(path: Path) -> ResultTable:
    """Read a table of requests or preemptions as it was in memory."""
    kinds = {field.name: _kind(field.type) for field in pq.read_schema(path)}
    texts = [name for name, kind in kinds.items() if kind == "str"]
    # Not `pq.read_table`, which imports pandas.
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        whole = file.read()
    columns = {}
    for name, kind in kinds.items():
        column = _one_chunk(whole[name])
        if column.type != _CODES:
            column = as_recorded(column)
            column = column.dictionary_encode() if kind == "str" else column
        if kind == "str":
            _check_texts(path, column.dictionary)
        columns[name] = column
    return ResultTable(columns, kinds)


def _check_texts(path: Path, texts: pa.Array) -> None:
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise damaged(path, error) from error


def _kind(type_: pa.DataType) -> str:
    """Return the name of a type in `sim.results.schema`: ``double`` is its float64."""
    if is_text(type_):
        return "str"
    return "float64" if pa.types.is_float64(type_) else str(type_)


def _recorded(column: pa.ChunkedArray) -> pa.Array:
    return as_recorded(_one_chunk(column))


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    chunks = whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]
    return chunks[0] if chunks else pa.nulls(0, column.type)


def _check_table(path: Path, columns: Iterable[str]) -> None:
    try:
        known = set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise damaged(path, error) from error
    for name in columns:
        if name not in known:
            raise lacks(path, "column", name)


def _array(column: pa.Array) -> npt.NDArray[Any]:
    """Return numbers as they are and texts as objects, without pandas."""
    if _kind(column.type) == "str":
        return np.array(column.to_pylist(), np.object_)
    # `from_dlpack` warns of an empty array.
    return (
        to_numpy(column) if len(column) else np.empty(0, column.type.to_pandas_dtype())
    )
