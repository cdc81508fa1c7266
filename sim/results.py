"""The results of a run: tables, summary, and their form on disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sim.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    from sim.config import RunConfig

RESULT_FILES = ("config.yaml", "summary.json")
"""What a directory must hold to be taken for results of ours."""


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

    def write(self, directory: Path, *, figures: bool = True) -> None:
        """Write configuration, summary, tables and figures into `directory`.

        The same configuration gives the same bytes (invariant 5).
        """
        write_text(directory / "config.yaml", self.config.to_yaml())
        write_json(directory / "summary.json", self.summary)
        for name in ("requests", "steps", "preemptions"):
            _write_parquet(directory / f"{name}.parquet", getattr(self, name))
        if figures:
            self.draw(directory / "figures")

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


def check_output(directory: Path, *, overwrite: bool) -> None:
    """Refuse a results directory that exists or could not be written.

    Called before anything is simulated, so that no work is lost.

    Raises
    ------
    OutputError
        With the rule and the remedy.
    """
    if directory.exists() or directory.is_symlink():
        if not directory.is_dir():
            raise OutputError(f"'{directory}' is not a directory; choose another --out")
        if not overwrite:
            raise OutputError(
                f"'{directory}' exists already; choose another --out or add --overwrite"
            )
        foreign = any(directory.iterdir()) and not all(
            (directory / name).is_file() for name in RESULT_FILES
        )
        if foreign:
            raise OutputError(
                f"'{directory}' does not hold results of a run and will not be "
                f"overwritten; choose another --out"
            )
    parent = directory.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise OutputError(
            f"'{directory}' cannot be written: '{parent}' is not a writable "
            f"directory; choose another --out"
        )


@contextmanager
def output_directory(directory: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a directory to write to that takes the place of `directory` at the end.

    Nothing half-written stays behind: if the body raises, what it wrote is removed
    and an older `directory` is as it was.

    Raises
    ------
    OutputError
        See `check_output`.
    """
    check_output(directory, overwrite=overwrite)
    target = directory.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(
            tempfile.mkdtemp(
                prefix=f".{target.name}.", suffix=".partial", dir=target.parent
            )
        )
    except OSError as error:
        raise OutputError(f"'{directory}' cannot be written: {error}") from error
    try:
        yield partial
        partial.chmod(0o755)
        _replace(partial, target)
    except OSError as error:
        raise OutputError(f"'{directory}' could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(partial: Path, target: Path) -> None:
    """Put `partial` where `target` is, if it is."""
    if not target.exists():
        partial.rename(target)
        return
    old = Path(
        tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent)
    )
    target.rename(old / target.name)
    try:
        partial.rename(target)
    except OSError:
        (old / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
