"""What a report is made of: the directories that kvsim's commands leave.

A directory is known by a file that its command always writes: ``summary.json`` of a
run, ``sweep.json`` of a sweep, ``plan.json`` of a plan.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from sim.config.files import parse_yaml
from sim.errors import UserError
from sim.results import schema
from sim.results.blocks import BLOCKS_FILE, BLOCKS_FORMAT
from sim.results.step_table import ParquetSteps
from sim.views.report.reduced import COLUMNS, Limits, Reduced, reduce_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Columns = Mapping[str, npt.NDArray[Any]]

MAX_RUNS: Final = 8
"""Runs of one page: so many colours and lines can be told apart."""

MARKERS: Final = {
    "plan.json": "plan",
    "sweep.json": "sweep",
    "summary.json": "run",
}
"""By which file a directory is known, and whose it is."""

REQUESTS: Final = (
    "request_id",
    "arrival_s",
    "num_prompt_tokens",
    "num_output_tokens",
    "status",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "ttft_s",
    "tpot_s",
    "e2el_s",
    "num_preemptions",
)
"""Columns of requests that a report reads."""

NUMBERS: Final = (
    "duration",
    "num_requests",
    "completed",
    "request_throughput",
    "num_gpu_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_preemptions",
    "kv_cache_usage_mean",
    "kv_cache_usage_max",
    "num_steps",
)
"""Numbers without which a summary is not one of ours."""


class ReportError(UserError):
    """A directory that no page can be made of."""


@dataclass(frozen=True)
class Run:
    """The results of one run."""

    number: int  # from 1, in the order given: its colour
    label: str  # short, and unlike that of the other runs on the page
    path: Path  # as given
    summary: Mapping[str, Any]  # contents of ``summary.json``
    config: Mapping[str, Any]  # contents of ``config.yaml``

    @cached_property
    def requests(self) -> Columns:
        """The requests by column, see `REQUESTS`."""
        return read_columns(self.path / "requests.parquet", REQUESTS)

    @cached_property
    def preemptions(self) -> Columns:
        """The preemptions by column, see `sim.results.schema.PREEMPTIONS`."""
        return read_columns(self.path / "preemptions.parquet", [*schema.PREEMPTIONS])

    @cached_property
    def blocks(self) -> Mapping[str, Any] | None:
        """Contents of ``blocks.json``, if it was recorded."""
        path = self.path / BLOCKS_FILE
        if not path.is_file():
            return None
        found = read_json(path)
        if (found.get("format"), found.get("version")) != (BLOCKS_FORMAT, 1):
            raise ReportError(
                f"'{path}' is not '{BLOCKS_FORMAT}', version 1; record it again with "
                f"this version of kvsim, or take it away"
            )
        return found

    @cached_property
    def steps(self) -> Reduced:
        """The steps, reduced."""
        path = self.path / "steps.parquet"
        _check_columns(path, COLUMNS)
        limits = Limits(
            self.summary["max_num_seqs"], self.summary["max_num_batched_tokens"]
        )
        last_s = float(self.preemptions["time_s"].max(initial=0.0))
        try:
            return reduce_steps(ParquetSteps(path), limits, last_s)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, error) from error


@dataclass(frozen=True)
class Source:
    """A directory, and whose it is."""

    path: Path
    kind: str


def find_source(path: Path) -> Source:
    """Return what kind of results a directory holds."""
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ReportError(
            f"'{path}' {what}; give the --out of 'kvsim run', 'sweep' or 'plan'"
        )
    for marker, kind in MARKERS.items():
        if (path / marker).is_file():
            return Source(path, kind)
    raise ReportError(
        f"'{path}' holds no results: there is no {', '.join(MARKERS)} in it; give the "
        f"--out of 'kvsim run', 'sweep' or 'plan'"
    )


def load_runs(paths: Sequence[Path]) -> tuple[Run, ...]:
    """Read what is small of each run, and check that the rest can be read."""
    if len(paths) > MAX_RUNS:
        raise ReportError(
            f"a page compares at most {MAX_RUNS} runs, got {len(paths)}; leave some "
            f"out, or sweep them: a sweep's page has all of its runs"
        )
    return tuple(
        _load_run(number, label, path)
        for number, (label, path) in enumerate(
            zip(labels(paths), paths, strict=True), 1
        )
    )


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each path: its last part, if no other has the same."""
    names = [path.resolve().name or str(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    told = [str(path) for path in paths]
    if len(set(told)) == len(told):
        return told
    raise ReportError(
        f"'{next(p for p in told if told.count(p) > 1)}' is given twice; give each "
        f"directory once"
    )


def _load_run(number: int, label: str, path: Path) -> Run:
    summary = read_json(path / "summary.json")
    for key in NUMBERS:
        if not isinstance(summary.get(key), int | float):
            raise ReportError(
                f"'{path / 'summary.json'}' has no number '{key}': it is of another "
                f"version of kvsim; run it again"
            )
    config = path / "config.yaml"
    try:
        told = parse_yaml(config.read_text(encoding="utf-8"), f"'{config}'")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(config, error) from error
    run = Run(number, label, path, summary, told if isinstance(told, dict) else {})
    _check_columns(path / "requests.parquet", REQUESTS)
    _check_columns(path / "preemptions.parquet", [*schema.PREEMPTIONS])
    _check_columns(path / "steps.parquet", COLUMNS)
    return run


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(data, dict):
        raise ReportError(f"'{path}' holds no table; run it again")
    return data


def read_columns(path: Path, names: Sequence[str]) -> Columns:
    """Read columns of a Parquet file."""
    _check_columns(path, names)
    try:
        with pq.ParquetFile(path) as file:
            found = file.read(list(names))
            return {name: found[name].to_numpy() for name in names}
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _check_columns(path: Path, names: Sequence[str]) -> None:
    try:
        known = pq.read_schema(path).names
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    missing = [name for name in names if name not in known]
    if missing:
        raise ReportError(
            f"'{path}' has no column '{missing[0]}': it is of another version of "
            f"kvsim; run it again"
        )


def _unreadable(path: Path, error: Exception) -> ReportError:
    if isinstance(error, FileNotFoundError):
        return ReportError(f"'{path}' is missing; run it again")
    return ReportError(f"'{path}' cannot be read: {error}; run it again")


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by dotted keys; an empty table is one."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{before}{key}.")
        else:
            leaves[f"{before}{key}"] = value
    return leaves
