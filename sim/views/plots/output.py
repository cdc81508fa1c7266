"""Figures as bytes, in several formats and styles, and as files."""

from __future__ import annotations

import gc
import io
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import matplotlib as mpl

from sim.config.plug import did_you_mean
from sim.errors import OutputError, UserError
from sim.results.output import claimed, write_whole
from sim.views.plots.style import house_style, to_png

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from matplotlib.figure import Figure

Found = TypeVar("Found")
Format: TypeAlias = Literal["png", "svg", "pdf"]

_METADATA: Final[Mapping[str, dict[str, None]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Fields that would differ from day to day, or from release to release."""


class NotShownError(UserError):
    """Refuses a figure that these results cannot fill, with the remedy."""


@house_style
def figure_bytes(figure: Figure, format_: Format) -> bytes:
    """Return a figure in a format, the same bytes for the same figure at any time."""
    if format_ == "png":
        return to_png(figure)
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kvsim", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=format_, metadata=_METADATA[format_])
    return buffer.getvalue()


def read_style(path: Path) -> dict[str, Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise UserError(
            f"--style: '{path}' cannot be read: {why}; give an .mplstyle file"
        ) from error
    known: list[str] = list(mpl.rcParams)
    for line in lines:
        key = line.partition("#")[0].partition(":")[0].strip()
        if key and key not in known:
            raise UserError(
                f"--style: '{path}' has no setting of matplotlib in '{line.strip()}'"
                f"{did_you_mean(key, known)}; mend or remove it"
            )
    try:
        found: Any = mpl.rc_params_from_file(path, True, False)
    except (ValueError, KeyError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"--style: '{path}': {line}; mend or remove it") from error
    return dict(found)


def write_pngs(
    figures: Mapping[str, Callable[[Found], Figure]], found: Found, directory: Path
) -> list[Path]:
    """Draw each figure that `found` can fill into a folder, made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    with _collecting_by_figure() as collect:
        for name, draw in figures.items():
            try:
                figure = draw(found)
            except NotShownError:
                continue
            paths.append(directory / f"{name}.png")
            paths[-1].write_bytes(to_png(figure))
            collect()
    return paths


@contextmanager
def _collecting_by_figure() -> Iterator[Callable[[], object]]:
    """Let Python look for garbage after each figure only, when all of it is.

    A figure is tens of thousands of objects that live until it is drawn; to search
    them while they come takes a tenth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield partial(gc.collect, 0)  # the youngest objects: those of one figure
    finally:
        if was_on:
            gc.enable()


def check_files(paths: list[Path], *, overwrite: bool) -> None:
    there = [path for path in paths if path.exists()]
    if there and not overwrite:
        raise OutputError(
            f"'{there[0]}' exists already; choose another --out or add --overwrite"
        )


def write_files(files: Mapping[Path, bytes], *, overwrite: bool) -> None:
    """Write files, each as a whole or not at all; their folders are made."""
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with claimed(path):
                check_files([path], overwrite=overwrite)
                write_whole(path, content)
        except OSError as error:
            raise OutputError(
                f"'{path}' cannot be written: {error.strerror}; make room or choose "
                f"another --out"
            ) from error
