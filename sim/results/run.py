"""Results of a run: its configuration, its tables and its summary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sim.config.tables import parse_config
from sim.errors import ResultsError
from sim.results import schema
from sim.results.folder import RunFolder
from sim.results.output import write_json, write_text
from sim.results.recording.tokens import token_times
from sim.results.tables.parquet import TableFile, copy_steps, write_table
from sim.results.tables.steps import BATCH_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from sim.config.tables import RunConfig
    from sim.results.recording.recorder import Recording
    from sim.results.tables.steps import StepTable

_ITL_BATCH_ROWS = 4 * BATCH_ROWS


@dataclass(frozen=True, repr=False)
class Results:
    """Results of a simulation; `sim.views.results.Results` adds the figures."""

    config: RunConfig
    recording: Recording | RunFolder
    summary: Mapping[str, Any]

    @classmethod
    def load(cls, directory: Path | str) -> Self:
        folder = RunFolder(Path(directory))
        # Traces and the like that it names need not be here any more.
        return cls(parse_config(folder.config), folder, dict(folder.summary))

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
        """Write configuration, summary and tables into a folder, made where missing.

        The same configuration gives the same bytes (invariant 5), whether the steps
        were kept in memory or went to disk as they came; steps that lie there already
        stay. With `itl`, ``itl.parquet`` says when each token came.
        """
        directory, recording = Path(directory), self.recording
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "config.yaml", self.config.to_yaml())
        write_json(directory / "summary.json", self.summary)
        tables = {
            "requests": recording.request_table,
            "preemptions": recording.preemption_table,
        }
        more = {
            "kv_cache_groups": recording.group_table,
            "prefix_tree": recording.tree_table,
            "transfers": recording.transfer_table,
            "tier": recording.tier_table,
            "fleet": recording.fleet_table,
        }
        tables |= {name: table for name, table in more.items() if table is not None}
        for name, table in tables.items():
            write_table(directory / f"{name}.parquet", table)
        copy_steps(recording.step_table, directory / "steps.parquet")
        if itl:
            if isinstance(recording, RunFolder):
                raise ResultsError(
                    "itl: when each token came is known of a run that was just "
                    "simulated; simulate its config again"
                )
            write_itl(recording, directory / "itl.parquet")


def write_itl(recording: Recording, path: Path) -> None:
    """Write when each token of the served requests came, in bounded memory.

    Engines come one after another, where there are several.
    """
    with TableFile(path, schema.ITL) as file:
        for part in recording.of_rank:
            for batch in token_times(
                part.step_table, part.streaks, path.parent, _ITL_BATCH_ROWS
            ):
                file.write(batch)
