"""The meaning and unit of each key, read from the page on the configuration.

``docs/configuration.md`` is held to the code by a test, and travels in the wheel, so
that help beside a control never says anything else than the page does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PAGE = "configuration.md"
_UNIT = re.compile(r", (?!or )([A-Za-z][A-Za-z/ ]*)$")
_NAMES = re.compile(r"`(.*?)`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Meaning:
    """The page's entry on a key: a sentence, and the unit of its values."""

    sentence: str
    unit: str = ""


NOTHING = Meaning("")


def meaning_of(section: str, kind: str, key: str) -> Meaning:
    """Return the page's entry on a key.

    Parameters
    ----------
    section
        ``run``, ``workload``, ``engine``, ``cost`` or ``fleet``.
    kind
        The table or kind that the key is in; empty for the section's own table.
    key
        Its name.

    Examples
    --------
    >>> meaning_of("engine", "", "max_num_seqs")
    Meaning(sentence='Most requests that run at a time.', unit='requests')
    """
    return _meanings().get((section, kind, key), NOTHING)


@cache
def _meanings() -> Mapping[tuple[str, str, str], Meaning]:
    found = {}
    for section, header, cells in _rows(_text()):
        if header[-1] != "meaning":
            continue
        row = dict(zip(header, cells, strict=True))
        type_ = next((row[name] for name in header if name.startswith("type")), "")
        unit = _UNIT.search(type_)
        sentence = _LINK.sub(r"\1", row["meaning"]).replace("`", "")
        meaning = Meaning(sentence, unit[1] if unit else "")
        kinds = [""] if header[0] == "key" else _NAMES.findall(cells[0])
        for kind in kinds:
            for key in _NAMES.findall(row["key"]):
                found[section, kind, key] = meaning
    return found


def _text() -> str:
    installed = files("sim.views.explore") / _PAGE
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    clone = Path(__file__).parents[3] / "docs" / _PAGE
    return clone.read_text(encoding="utf-8") if clone.is_file() else ""


def _rows(page: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield section, header and cells of every row of the page's tables."""
    section, header = "run", None
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip("`")
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
        elif set(line) != set("|-") and len(cells) == len(header):
            yield section, header, cells
