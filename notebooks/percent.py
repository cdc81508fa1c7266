"""The percent format, as far as our sources use it; jupytext reads the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_CODE, _TEXT = "# %%", "# %% [markdown]"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a source.

    Parameters
    ----------
    kind
        ``code`` or ``markdown``, as in the notebook format.
    source
        What it says; of text, without the signs of comments.
    """

    kind: str
    source: str


def sources() -> list[Path]:
    """Return the notebooks' sources in their order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def cells_of(text: str) -> list[Cell]:
    r"""Return the cells of a source in the percent format.

    Examples
    --------
    >>> cells_of("# %% [markdown]\n# Why?\n\n# %%\n1 + 1\n")
    [Cell(kind='markdown', source='Why?'), Cell(kind='code', source='1 + 1')]
    """
    cells: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line in (_CODE, _TEXT):
            cells.append(("code" if line == _CODE else "markdown", []))
        elif cells:
            cells[-1][1].append(line)
        elif line.strip():
            raise ValueError(f"a source begins with '{_TEXT}'; got {line!r}")
    return [Cell(kind, _source(kind, lines)) for kind, lines in cells]


def _source(kind: str, lines: list[str]) -> str:
    if kind == "markdown":
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    return "\n".join(lines).strip("\n")
