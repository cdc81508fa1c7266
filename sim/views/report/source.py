"""The runs that a report compares: their folders, labels and reduced steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa

from sim.errors import ResultsError
from sim.results import schema
from sim.results.folder import RunFolder, damaged
from sim.results.metrics import is_served
from sim.views.report.reduced import COLUMNS, Limits, Reduced, reduce_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from sim.results.folder import Columns
    from sim.results.tables.memory import ResultTable
    from sim.results.tables.steps import StepTable

MAX_RUNS: Final = 8
"""Runs of one page: so many colours and lines can be told apart."""

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


class Found(Protocol):
    """A run as a page reads it: its folder, or the part that is kept in memory."""

    @property
    def directory(self) -> Path: ...

    @property
    def summary(self) -> Mapping[str, Any]: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def blocks(self) -> Mapping[str, Any] | None: ...

    @property
    def step_table(self) -> StepTable: ...

    @property
    def transfer_table(self) -> ResultTable | None: ...

    @property
    def tier_table(self) -> ResultTable | None: ...

    @property
    def fleet_table(self) -> ResultTable | None: ...

    def columns(self, table: str, names: Sequence[str]) -> Columns: ...

    def recorded(self, name: str) -> Path | None: ...


@dataclass(frozen=True)
class Run:
    """The results of one run."""

    number: int  # from 1, in the order given: its colour
    label: str  # short, and unlike that of the other runs on the page
    folder: Found

    @property
    def path(self) -> Path:
        return self.folder.directory

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.folder.summary

    @property
    def config(self) -> Mapping[str, Any]:
        return self.folder.config

    @property
    def blocks(self) -> Mapping[str, Any] | None:
        return self.folder.blocks

    @cached_property
    def requests(self) -> Columns:
        return self.folder.columns("requests", REQUESTS)

    @cached_property
    def served(self) -> npt.NDArray[np.bool_]:
        return is_served(self.requests["status"])

    @cached_property
    def preemptions(self) -> Columns:
        return self.folder.columns("preemptions", [*schema.PREEMPTIONS])

    @property
    def is_fleet(self) -> bool:
        """Whether several engines behind a router ran."""
        return bool(self.summary.get("engines"))

    @cached_property
    def steps(self) -> Reduced:
        """The steps of an engine; of a fleet, drawn engine by engine, their end."""
        s = self.summary
        if self.is_fleet:
            return Reduced(max(float(s["duration"]), 1e-9), s["num_steps"])
        limits = Limits(s["max_num_seqs"], s["max_num_batched_tokens"])
        last_s = float(self.preemptions["time_s"].max(initial=0.0))
        try:
            return reduce_steps(self.folder.step_table, limits, last_s)
        except (OSError, pa.ArrowException) as error:
            raise damaged(self.path / "steps.parquet", error) from error


def load_runs(paths: Sequence[Path]) -> tuple[Run, ...]:
    """Read the small parts of each run, and check that the rest can be read."""
    if len(paths) > MAX_RUNS:
        raise ResultsError(
            f"a page compares at most {MAX_RUNS} runs, got {len(paths)}; leave some "
            f"out, or sweep them: a sweep's page has all of its runs"
        )
    needed = {
        "requests": REQUESTS,
        "preemptions": schema.PREEMPTIONS,
        "steps": COLUMNS,
    }
    runs = []
    for number, (label, path) in enumerate(zip(labels(paths), paths, strict=True), 1):
        folder = RunFolder(path, needed, NUMBERS).of_no_ranks()
        folder.config  # noqa: B018 - read, so that damage is told before anything is drawn
        runs.append(Run(number, label, folder))
    return tuple(runs)


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each path: its last part, if no other has the same."""
    names = [path.resolve().name or str(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    told = [str(path) for path in paths]
    if len(set(told)) == len(told):
        return told
    raise ResultsError(
        f"'{next(p for p in told if told.count(p) > 1)}' is given twice; give each "
        f"directory once"
    )
