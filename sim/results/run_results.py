"""The results of a run: tables, summary, and their form on disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sim.errors import ResultsError
from sim.results.parquet import copy_steps, write_itl
from sim.results.parquet import write_table as _write_parquet

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from sim.config.tables import RunConfig
    from sim.results.recorder import Recording
    from sim.results.step_table import StepTable
    from sim.results.table import ResultTable
    from sim.views.plots.accessor import RunPlots


class RunTables(Protocol):
    """Tables of a run, in memory (`Recording`) or on disk (`StoredTables`)."""

    @property
    def step_table(self) -> StepTable:
        """One row a step, in batches."""
        ...

    @property
    def request_table(self) -> ResultTable:
        """One row a request."""
        ...

    @property
    def preemption_table(self) -> ResultTable:
        """One row a preemption."""
        ...

    @property
    def steps(self) -> pd.DataFrame:
        """`step_table` as a frame."""
        ...

    @property
    def requests(self) -> pd.DataFrame:
        """`request_table` as a frame."""
        ...

    @property
    def preemptions(self) -> pd.DataFrame:
        """`preemption_table` as a frame."""
        ...


@dataclass(frozen=True)
class Results:
    """What a simulation found, in memory or on disk.

    Parameters
    ----------
    config
        The configuration that was run.
    recording
        Its tables.
    summary
        JSON-ready numbers and provenance; no NaN, no wall time.

    Examples
    --------
    >>> from sim import load_config, simulate
    >>> config = load_config("examples/demo.yaml", {"workload.preset.duration_s": 60})
    >>> results = simulate(config)
    >>> results.summary["completed"], len(results.requests)
    (366, 366)
    >>> float(results.steps["kv_cache_usage"].max().round(3))
    0.568
    >>> round(results.summary["kv_cache_usage_max"], 3)
    0.568
    >>> figure = results.plot.kv_cache_usage()
    """

    config: RunConfig
    recording: RunTables
    summary: Mapping[str, Any]

    @classmethod
    def load(cls, directory: Path | str) -> Results:
        """Read what ``kvsim run`` wrote; tables are read when they are asked for.

        Parameters
        ----------
        directory
            Holds ``config.yaml``, ``summary.json`` and the tables.

        Raises
        ------
        ResultsError
            If it does not, or another release wrote them.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> from sim import Results, load_config, simulate
        >>> config = load_config("examples/demo.yaml", ["workload.preset.duration_s=9"])
        >>> with TemporaryDirectory() as directory:
        ...     results = simulate(config)
        ...     results.write(directory)
        ...     again = Results.load(directory)
        ...     again.requests.equals(results.requests)
        True
        """
        from sim.results.stored import StoredTables  # noqa: PLC0415 - seldom needed

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

    @property
    def plot(self) -> RunPlots:
        """The figures, by name: ``results.plot.queues()``; `dir` lists them."""
        from sim.views.plots.accessor import RunPlots  # noqa: PLC0415 - matplotlib

        return RunPlots(self)

    def __repr__(self) -> str:
        told = self.summary
        done = f"{told['completed']:,} of {told['num_requests']:,} requests completed"
        return f"<Results: {told['title']}; {done}>"

    def _repr_html_(self) -> str:
        """Return the summary as a notebook shows it."""
        from sim.views.html import summary_html  # noqa: PLC0415 - notebooks only

        return summary_html(self.summary)

    def draw(self, directory: Path) -> list[Path]:
        """Draw all figures as PNG into `directory`; return their paths."""
        from sim.views.plots import draw_all  # noqa: PLC0415  # matplotlib only when drawing

        directory.mkdir(parents=True, exist_ok=True)
        return draw_all(
            self.recording.step_table,
            self.recording.request_table,
            self.recording.preemption_table,
            self.summary,
            directory,
        )


@dataclass(frozen=True, repr=False)
class SimulationResults(Results):
    """Results fresh from a simulation, which can be written.

    Parameters
    ----------
    config, summary
        See `Results`.
    recording
        Everything that happened.
    """

    recording: Recording

    def write(self, directory: Path | str, *, itl: bool = False) -> None:
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
        directory, recording = Path(directory), self.recording
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


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` as JSON with a final newline; NaN is a fault of ours."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write and sync a text file."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
