"""``kvsim plot``: figures of results that are there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from sim.cli import options
from sim.cli.console import note, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sim.views.plots.catalogue import Drawing
    from sim.views.plots.output import Format

_MAP = "heat_map"


def plot(
    *directories: Path,
    figure: options.Several = None,
    format_: Annotated[
        list[Literal["png", "svg", "pdf"]] | None,
        Parameter(name="--format", negative=""),
    ] = None,
    style: Path | None = None,
    out: Path = Path("figures"),
    x: str | None = None,
    y: str | None = None,
    metric: str | None = None,
    overwrite: options.Overwrite = False,
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Draw figures of runs, of a sweep or of a plan, from what they wrote.

    Parameters
    ----------
    directories
        Results of a run, of several runs to be compared, of a sweep or of a plan.
    figure
        A figure's name, see --list; may be given several times. Default: all.
    format_
        png, svg or pdf; may be given several times. Default: png.
    style
        A matplotlib style file that wins over ours.
    out
        Folder for the figures, one a file.
    x
        Key along the x axis of a sweep's heat map, whole or its end.
    y
        Key along the y axis.
    metric
        Number of summary.json in the heat map's cells; default: p95_ttft_ms.
    list_
        Print which figures there are, and draw none.
    """
    from sim.errors import UserError
    from sim.views.plots.catalogue import HeatMapKeys, content_of, drawings, named
    from sim.views.plots.output import check_files, read_style, write_files
    from sim.views.plots.style import on_top

    if list_:
        return _list(directories, as_json=json)
    if not directories:
        raise UserError(
            "there is nothing to draw; give the directory of a run, a sweep or a plan"
        )
    formats: list[Format] = list(dict.fromkeys(format_ or ["png"]))
    what = content_of(directories)
    keys = HeatMapKeys(x, y, metric)
    if keys and (what not in ("sweep", "plan") or (figure and _MAP not in figure)):
        raise UserError(f"--x, --y and --metric are for --figure {_MAP} of a sweep")
    settings = {} if style is None else read_style(style)
    with on_top(settings):
        there = drawings(what, directories, keys)
        asked = named(what, there, figure or ([_MAP] if keys else []))
        check_files(_paths(out, asked, formats), overwrite=overwrite)
        files, notes = _draw(asked, out, formats, is_named=bool(figure) or bool(keys))
    write_files(files, overwrite=overwrite)
    _report(list(files), notes, quiet=quiet, as_json=json)
    return 0


def _paths(out: Path, names: Iterable[str], formats: Sequence[Format]) -> list[Path]:
    return [out / f"{name}.{format_}" for name in names for format_ in formats]


def _draw(
    asked: Mapping[str, Drawing],
    out: Path,
    formats: Sequence[Format],
    *,
    is_named: bool,
) -> tuple[dict[Path, bytes], list[str]]:
    """Return the files, and a line for each figure that was left out."""
    from sim.errors import UserError
    from sim.views.plots.output import NotShownError, figure_bytes

    files: dict[Path, bytes] = {}
    notes: list[str] = []
    for name, draw in asked.items():
        try:
            figure = draw()
        except NotShownError as error:
            if is_named:
                raise
            notes.append(f"{name} is left out: {error}")
            continue
        for format_ in formats:
            files[out / f"{name}.{format_}"] = figure_bytes(figure, format_)
    if not files:
        raise UserError(f"nothing was drawn; {notes[0]}")
    return files, notes


def _report(files: list[Path], notes: list[str], *, quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json({"files": [str(path) for path in files], "notes": notes})
        return
    if quiet:
        return
    for line in notes:
        note(line)
    for path in files:
        print(path)


def _list(directories: Sequence[Path], *, as_json: bool) -> int:
    """Print the figures of what is given, or of everything."""
    from sim.views.plots.catalogue import (
        FIGURES_OF,
        HeatMapKeys,
        content_of,
        drawings,
    )

    found = {what: dict(_said(figures)) for what, figures in FIGURES_OF.items()}
    if directories:
        what = content_of(directories)
        there = drawings(what, directories, HeatMapKeys())
        found = {what: {k: v for k, v in found[what].items() if k in there}}
    if as_json:
        print_json(found)
        return 0
    for what, figures in found.items():
        print(f"of {'several runs' if what == 'runs' else f'a {what}'}:")
        for name, says in figures.items():
            print(f"  {name:<18} {says}")
    return 0


def _said(figures: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield each figure with the first line of what its function says."""
    for name, draw in figures.items():
        first = (draw.__doc__ or "").strip().partition("\n")[0]
        yield name, first.removeprefix("Draw ").removesuffix(".")
