"""The results of a run: tables, summary, and their form on disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.recording.parquet import copy_steps, write_itl
from sim.recording.parquet import write_table as _write_parquet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

    from sim.config import RunConfig
    from sim.recorder import Recording
    from sim.step_table import StepTable


@dataclass(frozen=True)
class Results:
    """What a simulation found.

    Parameters
    ----------
    config
        The configuration that was run.
    recording
        Everything that happened.
    summary
        JSON-ready numbers and provenance; no NaN, no wall time.
    """

    config: RunConfig
    recording: Recording
    summary: Mapping[str, Any]

    @property
    def step_table(self) -> StepTable:
        """One row a step, in batches."""
        return self.recording.step_table

    @property
    def steps(self) -> pd.DataFrame:
        """One row a step, all in memory; columns as in `sim.schema`."""
        return self.recording.steps

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request."""
        return self.recording.requests

    @property
    def preemptions(self) -> pd.DataFrame:
        """One row a preemption."""
        return self.recording.preemptions

    def write(self, directory: Path, *, itl: bool = False) -> None:
        """Write configuration, summary and tables into `directory`.

        The same configuration gives the same bytes (invariant 5), whether the steps
        were kept in memory or went to disk as they came.

        Parameters
        ----------
        directory
            Must exist. Steps that lie there already stay.
        itl
            Write ``itl.parquet``, too: when each token came.
        """
        recording = self.recording
        write_text(directory / "config.yaml", self.config.to_yaml())
        write_json(directory / "summary.json", self.summary)
        tables = {
            "requests": recording.request_table,
            "preemptions": recording.preemption_table,
        }
        for name, table in tables.items():
            _write_parquet(directory / f"{name}.parquet", table.arrow, table.kinds)
        copy_steps(recording.step_table, directory / "steps.parquet")
        if itl:
            write_itl(recording, directory / "itl.parquet")

    def draw(self, directory: Path) -> list[Path]:
        """Draw all figures as PNG into `directory`; return their paths."""
        from sim.plots import draw_all  # noqa: PLC0415  # matplotlib only when drawing

        directory.mkdir(parents=True, exist_ok=True)
        return draw_all(
            self.recording.step_table,
            self.recording.request_table,
            self.recording.preemption_table,
            self.summary,
            directory,
        )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` as JSON with a final newline; NaN is a fault of ours."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write and sync a text file."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
