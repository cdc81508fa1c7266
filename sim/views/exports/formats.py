"""The formats, by the name that ``--to`` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.results.folder import RunFolder
from sim.results.output import ResultFiles, output_directory, output_file
from sim.views.exports.bench import write_bench
from sim.views.exports.chrome import Window, write_trace
from sim.views.exports.csv_tables import TABLES, write_csv
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
    """A format that results can be written in."""

    file_name: str  # what it is called unless the user says so
    # from results, a path and a window to lines for the user
    write: Callable[[RunFolder, Path, Window], list[str]]
    has_window: bool = False  # whether a part of the time can be written
    files: ResultFiles | None = None  # of a format that is a folder: what may be in it


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
    """Write results of a run in another format; return where, and what to say of it."""
    folder = RunFolder(directory, columns={}, numbers=()).of_one_engine()
    form = FORMATS[to]
    path = out or directory / EXPORTS / form.file_name
    replaced = (
        output_file(path, overwrite=overwrite)
        if form.files is None
        else output_directory(path, overwrite=overwrite, files=form.files)
    )
    with replaced as partial:
        return path, form.write(folder, partial, window or Window())
