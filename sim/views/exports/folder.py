"""The results of a run on disk, read as far as an export needs them."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sim.config.files import read_yaml
from sim.errors import OutputError
from sim.results.metrics import SERVED
from sim.results.step_table import BATCH_ROWS, ParquetSteps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

Columns = dict[str, "npt.NDArray[Any]"]
"""Columns of a table, equally long; texts as objects."""

_NEEDED = (
    "summary.json",
    "config.yaml",
    "requests.parquet",
    "steps.parquet",
    "preemptions.parquet",
)


class RunFolder:
    """Results that ``kvsim run`` wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if (directory / "sweep.json").is_file():
            raise OutputError(
                f"'{directory}' holds a sweep, not a run; its dataset opens as it is, "
                f"and each row's config runs again with 'kvsim run'"
            )
        for name in _NEEDED:
            if not (directory / name).is_file():
                raise OutputError(
                    f"'{directory}' holds no results of a run: there is no {name}; "
                    f"give the --out of a 'kvsim run'"
                )
        for path in sorted(directory.glob("*.parquet")):
            _check_whole(path)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """``summary.json``."""
        path = self.directory / "summary.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise OutputError(f"'{path}' is no JSON ({error}); run it again") from error
        if not isinstance(data, dict):
            raise OutputError(f"'{path}' is no table; run it again")
        return _Summary(path, data)

    @cached_property
    def engine(self) -> Mapping[str, Any]:
        """The table ``engine`` of the configuration."""
        table = read_yaml(self.directory / "config.yaml").get("engine")
        return table if isinstance(table, dict) else {}

    def requests(self, names: Sequence[str]) -> Columns:
        """Return columns of the requests, in order of their ids."""
        return self._columns("requests", names)

    def preemptions(self, names: Sequence[str]) -> Columns:
        """Return columns of the preemptions, in order of time."""
        return self._columns("preemptions", names)

    @property
    def steps(self) -> ParquetSteps:
        """One row a step, in batches."""
        return ParquetSteps(self.directory / "steps.parquet")

    def recorded(self, name: str) -> Path | None:
        """Return the path of a file that is there on request only, or None."""
        path = self.directory / name
        return path if path.is_file() else None

    def _columns(self, table: str, names: Sequence[str]) -> Columns:
        path = self.directory / f"{table}.parquet"
        try:
            with pq.ParquetFile(path) as file:
                found = file.read(list(names))
        except (pa.ArrowException, KeyError) as error:
            raise OutputError(
                f"'{path}' cannot be read ({str(error)[:100]}); run it again"
            ) from error
        return {name: _array(found[name].combine_chunks()) for name in names}


class _Summary(dict[str, Any]):
    """A summary that says where a number is missing from."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise OutputError(
            f"'{self._path}' has no number '{key}': it is of another version of kvsim; "
            f"run it again"
        )


def _check_whole(path: Path) -> None:
    try:
        pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise OutputError(
            f"'{path}' cannot be read ({str(error)[:100]}); run it again"
        ) from error


def _array(column: pa.Array) -> npt.NDArray[Any]:
    """Return numbers as they are and texts as objects, without pandas."""
    if pa.types.is_string(column.type):
        return np.array(column.to_pylist(), np.object_)
    return np.from_dlpack(column)


def is_served(status: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which requests got their answer."""
    return np.array([each in SERVED for each in status], np.bool_)


def token_gaps(path: Path) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yield request ids and seconds since the token before, the first ones left out."""
    last_id, last_s = -1, 0.0
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=["request_id", "time_s"]):
            ids = np.from_dlpack(batch.column("request_id"))
            times_s = np.from_dlpack(batch.column("time_s"))
            gaps_s = np.diff(times_s, prepend=last_s)
            follows = np.diff(ids, prepend=last_id) == 0
            last_id, last_s = int(ids[-1]), float(times_s[-1])
            yield ids[follows], gaps_s[follows]
