"""The formats, by the name that ``--to`` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.results.output import ResultFiles, output_directory, output_file
from sim.views.exports.bench import write_bench
from sim.views.exports.chrome import Window, write_trace
from sim.views.exports.csv_tables import TABLES, write_csv
from sim.views.exports.folder import RunFolder
from sim.views.exports.prometheus import write_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXPORTS: Final = "exports"
"""Folder in the results where exports go."""

CSV_FILES: Final = ResultFiles(
    "kvsim export --to csv",
    "requests.csv",
    frozenset(f"{name}.csv" for name in TABLES),
)


@dataclass(frozen=True, slots=True)
class Format:
    """A format that results can be written in.

    Parameters
    ----------
    file_name
        What it is called unless the user says so.
    write
        From results, a path and a window to lines for the user.
    has_window
        Whether a part of the time can be written.
    files
        Of a format that is a folder: what may be in it.
    """

    file_name: str
    write: Callable[[RunFolder, Path, Window], list[str]]
    has_window: bool = False
    files: ResultFiles | None = None


FORMATS: Final = {
    "chrome": Format("trace.json", write_trace, has_window=True),
    "bench": Format("bench.json", lambda folder, path, _: write_bench(folder, path)),
    "prometheus": Format(
        "metrics.prom", lambda folder, path, _: write_prometheus(folder, path)
    ),
    "csv": Format(
        "csv", lambda folder, path, _: write_csv(folder, path), files=CSV_FILES
    ),
}


def export(
    directory: Path,
    to: str,
    out: Path | None = None,
    window: Window | None = None,
    *,
    overwrite: bool = False,
) -> tuple[Path, list[str]]:
    """Write results of a run in another format.

    Parameters
    ----------
    directory
        The results.
    to
        One of `FORMATS`.
    out
        Where to; in ``exports`` of the results by default.
    window
        The part of the time to be written, of a format that has one; all of it if None.
    overwrite
        Replace what is there.

    Returns
    -------
    path, lines
        Where it is, and what to say about it.

    Raises
    ------
    OutputError
        If there are no results, or `out` exists or cannot be written.
    """
    folder = RunFolder(directory)
    form = FORMATS[to]
    path = out or directory / EXPORTS / form.file_name
    replaced = (
        output_file(path, overwrite=overwrite)
        if form.files is None
        else output_directory(path, overwrite=overwrite, files=form.files)
    )
    with replaced as partial:
        return path, form.write(folder, partial, window or Window())
