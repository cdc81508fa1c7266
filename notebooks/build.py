"""Build the notebooks: run every source, keep what it shows, the same bytes each time.

::

    python -m notebooks.build            # all of them
    python -m notebooks.build 03 05      # some
    python -m notebooks.build --check    # run them, and say what has changed

A source is a script in the percent format (jupytext). What is built of it holds no
times, no paths, no ids of its own: a difference between two commits is one that
somebody made.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from notebooks.percent import HERE, sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbformat import NotebookNode

TIMEOUT_S = 600
"""Longest time of a cell; a notebook takes seconds, machines may be busy."""

_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


class BuildError(Exception):
    """A notebook breaks a rule: the message names rule and place in one line."""


def build(source: Path) -> str:
    """Run a source and return the text of its notebook.

    Parameters
    ----------
    source
        One of `notebooks.percent.sources`.

    Raises
    ------
    BuildError
        If a cell fails, warns, or shows what is not the same everywhere.
    """
    import nbformat  # noqa: PLC0415 - of the group notebooks only

    notebook = _read(source)
    _run(notebook, source.name)
    # Only now: the kernel has added its release.
    notebook.metadata = {
        "kernelspec": dict(_KERNEL),
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(_code(notebook), 1):
        where = f"{source.name}, code cell {number}"
        cell.execution_count = number
        cell.metadata = {}
        cell.outputs = [_kept(output, where) for output in cell.outputs]
    return str(nbformat.writes(notebook)) + "\n"


def _read(source: Path) -> NotebookNode:
    import jupytext  # noqa: PLC0415

    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = {"kernelspec": dict(_KERNEL)}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem.replace('_', '-')}-{number:02d}"
        cell.metadata = {}
    return notebook


def _run(notebook: NotebookNode, name: str) -> None:
    """Execute all cells in the folder of the notebooks, as an editor would."""
    from nbclient import NotebookClient  # noqa: PLC0415
    from nbclient.exceptions import CellExecutionError  # noqa: PLC0415

    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,  # where a busy kernel divides them says nothing
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(HERE)}},
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            client.execute(env=_environment(folder))
    except CellExecutionError as error:
        raise BuildError(f"{name} fails: {error.ename}: {error.evalue}") from error


def _environment(folder: str) -> dict[str, str]:
    """Return ours without the user's settings of IPython and matplotlib."""
    return os.environ | {
        "IPYTHONDIR": folder,
        "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", folder),
        "COLUMNS": "80",
        "LINES": "24",
    }


def _code(notebook: NotebookNode) -> Iterable[NotebookNode]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def _kept(output: NotebookNode, where: str) -> NotebookNode:
    """Return an output without what differs from run to run, or refuse it."""
    if output.output_type == "stream" and output.name == "stderr":
        raise BuildError(f"{where} warns: {output.text.strip()}")
    if output.output_type == "error":
        raise BuildError(f"{where} fails: {output.ename}: {output.evalue}")
    if "execution_count" in output:
        output.execution_count = None
    if "data" in output:
        output.metadata = {}
        if "image/png" in output.data:
            from notebooks.pictures import small_png  # noqa: PLC0415 - pillow

            output.data["image/png"] = small_png(output.data["image/png"])
    _check(_texts(output), where)
    return output


def _texts(output: NotebookNode) -> list[str]:
    data = output.get("data", {})
    texts = [text for kind, text in data.items() if not kind.startswith("image/")]
    return [str(text) for text in [*texts, output.get("text", "")]]


def _check(texts: Sequence[str], where: str) -> None:
    """Refuse what is not the same on another machine."""
    homes = {str(HERE.parent), str(Path.home()), tempfile.gettempdir()} - {"/"}
    for text in texts:
        for sign in [*homes, " at 0x"]:
            if sign in text:
                raise BuildError(f"{where} shows '{sign}', which others do not have")


def _difference(built: str, stored: str) -> str:
    """Return the first cell in which two notebooks differ, pictures aside."""
    import nbformat  # noqa: PLC0415

    ours, theirs = (nbformat.reads(text, as_version=4) for text in (built, stored))
    if len(ours.cells) != len(theirs.cells):
        return f"{len(ours.cells)} cells, stored are {len(theirs.cells)}"
    for left, right in zip(ours.cells, theirs.cells, strict=True):
        new, old = _shown(left), _shown(right)
        if new != old:
            pair = next((n, o) for n, o in zip(new, old, strict=False) if n != o)
            return f"cell {left.id}: now {pair[0][:300]!r}, stored {pair[1][:300]!r}"
    return ""


def _shown(cell: NotebookNode) -> list[str]:
    """Return everything that a cell shows as text; of a picture, that it is there.

    Pixels depend on the release of matplotlib and of its fonts.
    """
    shown = [cell.cell_type, cell.id, cell.source]
    for output in cell.get("outputs", ()):
        pictures = [kind for kind in output.get("data", {}) if kind[:6] == "image/"]
        shown += [output.output_type, *pictures, *_texts(output)]
    return [*shown, "no more"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build or check notebooks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build")
    parser.add_argument("names", nargs="*", help="how a name begins, such as 03")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args(arguments)
    names = tuple(asked.names) or ("",)
    chosen = [path for path in sources() if path.name.startswith(names)]
    if not chosen:
        there = ", ".join(path.stem for path in sources())
        parser.error(f"no notebook is called so (there are: {there})")
    wrong = [source.name for source in chosen if not _one(source, check=asked.check)]
    return 1 if wrong else 0


def _one(source: Path, *, check: bool) -> bool:
    """Build or check one notebook; say what happened and whether it is well."""
    target = source.with_suffix(".ipynb")
    try:
        built = build(source)
    except BuildError as error:
        print(error, file=sys.stderr)
        return False
    if not check:
        target.write_text(built, encoding="utf-8")
        print(f"{target.name}: {len(built) / 1024:.0f} KiB")
        return True
    stored = target.read_text(encoding="utf-8") if target.exists() else ""
    found = _difference(built, stored) if stored else "not built"
    print(f"{target.name}: {found or 'as stored'}")
    return not found


if __name__ == "__main__":
    sys.exit(main())
