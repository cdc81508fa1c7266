"""What a run found: its configuration, its tables and its summary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sim.errors import ResultsError
from sim.results.output import write_json, write_text
from sim.results.parquet import copy_steps, write_itl, write_table
from sim.results.stored import StoredTables

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from sim.config.tables import RunConfig
    from sim.results.recorder import Recording
    from sim.results.step_table import StepTable


@dataclass(frozen=True, repr=False)
class Results:
    """What a simulation found; `sim.api.Results` adds the figures."""

    config: RunConfig
    recording: Recording | StoredTables
    summary: Mapping[str, Any]

    @classmethod
    def load(cls, directory: Path | str) -> Self:
        directory = Path(directory)
        summary = _read_summary(directory)
        config = _read_config(directory)
        return cls(config, StoredTables(directory), summary)

    @property
    def step_table(self) -> StepTable:
        """One row a step, in batches."""
        return self.recording.step_table

    @property
    def steps(self) -> pd.DataFrame:
        """One row a step, all in memory; columns as in `sim.results.schema`."""
        return self.recording.steps

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request."""
        return self.recording.requests

    @property
    def preemptions(self) -> pd.DataFrame:
        """One row a preemption."""
        return self.recording.preemptions

    def __repr__(self) -> str:
        told = self.summary
        done = f"{told['completed']:,} of {told['num_requests']:,} requests completed"
        return f"<Results: {told['title']}; {done}>"

    def write(self, directory: Path | str, *, itl: bool = False) -> None:
        """Write configuration, summary and tables into a folder that exists.

        The same configuration gives the same bytes (invariant 5), whether the steps
        were kept in memory or went to disk as they came; steps that lie there already
        stay. With `itl`, ``itl.parquet`` says when each token came.
        """
        directory, recording = Path(directory), self.recording
        write_text(directory / "config.yaml", self.config.to_yaml())
        write_json(directory / "summary.json", self.summary)
        tables = {
            "requests": recording.request_table,
            "preemptions": recording.preemption_table,
        }
        for name, table in tables.items():
            write_table(directory / f"{name}.parquet", table.arrow, table.kinds)
        copy_steps(recording.step_table, directory / "steps.parquet")
        if itl:
            if isinstance(recording, StoredTables):
                raise ResultsError(
                    "itl: when each token came is known of a run that was just "
                    "simulated; simulate its config again"
                )
            write_itl(recording, directory / "itl.parquet")


def _read_summary(directory: Path) -> dict[str, Any]:
    """Return the summary of a results directory, or say what the directory is not."""
    path = directory / "summary.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = "holds no summary.json" if directory.is_dir() else "is no directory"
        raise ResultsError(
            f"'{directory}' {what}; give a directory that 'kvsim run' wrote"
        ) from error
    except ValueError as error:
        raise ResultsError(
            f"'{path}' is not JSON ({error}); run its config.yaml again"
        ) from error
    if not isinstance(found, dict) or "num_gpu_blocks" not in found:
        raise ResultsError(f"'{path}' is no summary of a run; give a run's directory")
    return found


def _read_config(directory: Path) -> RunConfig:
    from sim.config.files import read_yaml  # noqa: PLC0415
    from sim.config.tables import parse_config  # noqa: PLC0415 - only where results are read

    # Traces and the like that it names need not be here any more.
    return parse_config(read_yaml(directory / "config.yaml"))
