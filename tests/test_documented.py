"""Names that users call or subclass are documented, in numpy style."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import kvsim
from tests.shared import ROOT
from tests.test_moved import EXTENSION_POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
FUNCTIONS = [name for name in kvsim.__all__ if inspect.isfunction(getattr(kvsim, name))]
CLASSES = {"kvsim.Results": kvsim.Results} | {
    f"{path}.{name}": getattr(import_module(path), name)
    for path, names in EXTENSION_POINTS.items()
    for name in names
}


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods that a class of ours defines."""
    for each in cls.__mro__:
        if each.__module__.partition(".")[0] in ("cache", "sim", "workloads"):
            for name, value in vars(each).items():
                is_method = inspect.isfunction(value) or isinstance(value, classmethod)
                if is_method and not name.startswith("_"):
                    yield name, getattr(value, "__func__", value)


def section(doc: str, title: str) -> str:
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", doc, re.M | re.S)
    return found[1] if found else ""


def check_first_line(doc: str | None, name: str) -> None:
    assert doc, name
    first = doc.split("\n\n")[0]
    assert first[0].isupper(), name
    assert first.rstrip()[-1] in ".:", (name, first)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_gives_and_raises(name: str) -> None:
    function = getattr(kvsim, name)
    doc = inspect.getdoc(function) or ""
    check_first_line(doc, name)
    parameters = section(doc, "Parameters")
    for parameter in inspect.signature(function).parameters.values():
        assert re.search(
            rf"^\S.*\b{parameter.name}\b|^\W*{parameter.name}\b", parameters, re.M
        ), parameter
    assert section(doc, "Returns"), name
    assert section(doc, "Raises"), name
    assert section(doc, "Examples"), name


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_and_its_methods_say_what_they_are(name: str) -> None:
    cls = CLASSES[name]
    check_first_line(inspect.getdoc(cls), name)
    for method, value in own_methods(cls):
        doc = inspect.getdoc(getattr(cls, method)) or inspect.getdoc(value)
        check_first_line(doc, f"{name}.{method}")


def test_the_reference_has_all_of_them() -> None:
    for name in FUNCTIONS:
        assert f".. autofunction:: {name}\n" in PAGE
    listed = {name.rpartition(".")[2] for name in CLASSES}
    found = re.findall(r"^\.\. autoclass:: ([\w.]+)$", PAGE, re.MULTILINE)
    assert {name.rpartition(".")[2] for name in found} == listed
