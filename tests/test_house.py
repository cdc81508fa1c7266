"""Rules beside import-linter's layers: no circles of files, and 500 lines at most."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PACKAGES = ("cache", "calibrate", "kvsim", "sim", "workloads")


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the files that a file imports: in functions and for types only, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and (room := node.module or "") in known:
            inner = [f"{room}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in known)
            if any(name not in known for name in inner):
                yield room


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the files on circles of imports, and those between two circles."""
    left = dict(graph)
    while True:
        wanted = set().union(*left.values()) if left else set()
        on_circles = {
            name: uses & left.keys()
            for name, uses in left.items()
            if name in wanted and uses & left.keys()
        }
        if on_circles == left:
            return sorted(left)
        left = on_circles


def test_no_files_import_each_other_in_a_circle() -> None:
    known = modules()
    graph = {name: set(imported(path, known)) for name, path in known.items()}
    assert len(graph) > 500
    assert "sim.scheduler.v1.holdings" in graph["sim.scheduler.v1.scheduler"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert circles(graph) == []


def test_a_file_can_be_read_at_a_sitting() -> None:
    """At most 500 lines: find the object that hides in one that grows longer."""
    lines = {name: path.read_bytes().count(b"\n") for name, path in modules().items()}
    assert {name: number for name, number in lines.items() if number > 500} == {}
