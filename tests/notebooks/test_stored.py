"""Notebooks as they are stored: small, tidy, and of the sources beside them."""

from __future__ import annotations

import ast
import base64
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from notebooks.percent import HERE, Cell, cells_of, sources

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = sources()
MOST_CELLS = 10
MOST_LINES_OF_A_POLICY = 20
MOST_PICTURE_BYTES = 100_000
WITH_DEFINITIONS = "05_your_own_policy"

every_source = pytest.mark.parametrize("source", SOURCES, ids=[s.stem for s in SOURCES])


def cells(source: Path) -> list[Cell]:
    return cells_of(source.read_text(encoding="utf-8"))


def code(source: Path) -> list[str]:
    return [cell.source for cell in cells(source) if cell.kind == "code"]


def stored(source: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(source.with_suffix(".ipynb").read_text("utf-8"))
    return found


def outputs(source: Path) -> list[dict[str, Any]]:
    return [o for cell in stored(source)["cells"] for o in cell.get("outputs", ())]


def test_there_are_eleven_and_nothing_but_them() -> None:
    assert [source.name[:2] for source in SOURCES] == [f"{n:02d}" for n in range(1, 12)]
    built = {path.stem for path in HERE.glob("*.ipynb")}
    assert built == {source.stem for source in SOURCES}
    suffixes = {path.suffix for path in HERE.iterdir() if path.is_file()}
    assert suffixes == {".py", ".ipynb", ".md"}, "data does not belong here"


@every_source
def test_it_asks_one_question_first(source: Path) -> None:
    first = cells(source)[0]
    assert first.kind == "markdown"
    title = first.source.splitlines()[0]
    assert re.fullmatch(rf"# {source.name[:2]}\. [^?]+\?", title), title


@every_source
def test_it_is_short_and_imports_its_logic(source: Path) -> None:
    assert len(cells(source)) <= MOST_CELLS, "text counts, too"
    definitions = [
        node
        for cell in code(source)
        for node in ast.walk(ast.parse(cell))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)
    ]
    if source.stem != WITH_DEFINITIONS:
        assert not definitions
        return
    classes = [node for node in definitions if isinstance(node, ast.ClassDef)]
    assert len(classes) == 2
    for node in classes:
        assert node.end_lineno is not None
        assert node.end_lineno - node.lineno < MOST_LINES_OF_A_POLICY


@every_source
def test_it_ends_with_what_it_found(source: Path) -> None:
    """A number, and one that was computed: it stands in the output, not in the code."""
    last = cells(source)[-1]
    assert last.kind == "code"
    assert "What we have learned" in cells(source)[-2].source
    (output,) = stored(source)["cells"][-1]["outputs"]
    said = "".join(output["text"])
    assert re.search(r"\d", said)
    tree = ast.parse(last.source)
    fields = [node for node in ast.walk(tree) if isinstance(node, ast.FormattedValue)]
    assert len(fields) >= 2


@every_source
def test_the_notebook_is_built_of_the_source(source: Path) -> None:
    found = [
        Cell(cell["cell_type"], "".join(cell["source"]))
        for cell in stored(source)["cells"]
    ]
    assert found == cells(source), "make notebooks"


@every_source
def test_nothing_in_it_changes_from_build_to_build(source: Path) -> None:
    found = stored(source)
    assert set(found["metadata"]) == {"kernelspec", "language_info"}
    assert found["metadata"]["language_info"] == {"name": "python"}
    names = [cell["id"] for cell in found["cells"]]
    stem = source.stem.replace("_", "-")
    assert names == [f"{stem}-{number:02d}" for number in range(len(names))]
    assert all(cell["metadata"] == {} for cell in found["cells"])
    counts = [c["execution_count"] for c in found["cells"] if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@every_source
def test_it_neither_fails_nor_warns_nor_names_a_machine(source: Path) -> None:
    assert outputs(source)
    for output in outputs(source):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        text = json.dumps({**output, "data": texts(output)})
        assert not re.search(r"/tmp|/home|/root|/Users| at 0x", text)


def texts(output: dict[str, Any]) -> dict[str, Any]:
    data = output.get("data", {})
    return {kind: text for kind, text in data.items() if not kind.startswith("image/")}


@every_source
def test_pictures_are_small_and_name_no_program(source: Path) -> None:
    found = [
        o["data"]["image/png"]
        for o in outputs(source)
        if "image/png" in o.get("data", {})
    ]
    assert found
    for encoded in found:
        picture = base64.b64decode(encoded)
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < MOST_PICTURE_BYTES
        assert not re.search(rb"tEXt|iTXt|tIME", picture)


def test_the_page_has_a_line_for_each() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    for source in SOURCES:
        assert f"({source.stem}.ipynb)" in page
        question = cells(source)[0].source.splitlines()[0].removeprefix("# ")[4:]
        assert question in page, question


def test_cells_before_the_first_sign_are_refused() -> None:
    with pytest.raises(ValueError, match="a source begins with"):
        cells_of("import this\n# %%\n")
