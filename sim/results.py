"""The results of a run: tables, summary, and their form on disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

    from sim.config import RunConfig


@dataclass(frozen=True, slots=True)
class Results:
    """What a simulation found.

    Parameters
    ----------
    config
        The configuration that was run.
    requests, steps, preemptions
        Tables with the columns of `sim.schema`.
    summary
        JSON-ready numbers and provenance; no NaN, no wall time.
    """

    config: RunConfig
    requests: pd.DataFrame
    steps: pd.DataFrame
    preemptions: pd.DataFrame
    summary: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        """Write configuration, summary and tables into `directory`.

        The same configuration gives the same bytes (invariant 5).
        """
        write_text(directory / "config.yaml", self.config.to_yaml())
        write_json(directory / "summary.json", self.summary)
        for name in ("requests", "steps", "preemptions"):
            _write_parquet(directory / f"{name}.parquet", getattr(self, name))

    def draw(self, directory: Path) -> list[Path]:
        """Draw all figures as PNG into `directory`; return their paths."""
        from sim.plots import draw_all  # noqa: PLC0415  # matplotlib only when drawing

        directory.mkdir(parents=True, exist_ok=True)
        return draw_all(
            self.steps, self.requests, self.preemptions, self.summary, directory
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


def _write_parquet(path: Path, frame: pd.DataFrame) -> None:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    with path.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
