"""Pages name what there is: links, files, modules; and the site is built of them."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import COMMAND_GROUP
from tests.shared import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ROOMS = ("cache", "calibrate", "docs", "examples", "notebooks", "sim", "tests")
PAGES = [
    *ROOT.glob("*.md"),
    *(p for room in (*ROOMS, "workloads") for p in ROOT.glob(f"{room}/**/*.md")),
]
SITE = runpy.run_path(str(ROOT / "docs/conf.py"))["include_patterns"]
HISTORY = {
    ROOT / each for each in ("CHANGELOG.md", "DESIGN.md", "tests/bench/README.md")
}
"""What they say of earlier days may name what is no more; their links still lead on."""
YOURS = re.compile(
    r"path/to/|my_|\d\d_name|2023|^vllm/|FILE|NAME|^(results|traces|build|runs)/|^\."
)

every_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s#:]+)(?:#[\w-]+)?\)", prose(page)):
        path = page.parent / target
        assert path.is_file(), f"{target}: the site has no folders"
        assert path.suffix != ".md" or path.resolve() in PAGES, f"{target}: not on it"


@every_page
def test_the_site_has_each_page(page: Path) -> None:
    stars = {"*": "[^/]*", "**": ".*"}
    patterns = [re.sub(r"\*+", lambda found: stars[found[0]], each) for each in SITE]
    name = page.relative_to(ROOT).as_posix()
    assert any(re.fullmatch(each, name) for each in patterns), "see docs/conf.py"


@every_page
def test_files_that_are_named_are_there(page: Path) -> None:
    """From the root or the page's folder; a room's page may leave out folders of it."""
    if page in HISTORY:
        pytest.skip("tells of earlier days")
    here = page.parent
    inside = [] if here == ROOT else ["/" + p.as_posix() for p in here.rglob("*")]
    for name in re.findall(
        r"`([\w./]*\w\.(?:py|md)|\w[\w.]*/(?:[\w.]+/)*)`", prose(page)
    ):
        there = (ROOT / name).exists() or (here / name).exists()
        within = any(path.endswith("/" + name.rstrip("/")) for path in inside)
        assert there or within or YOURS.search(name), name


@every_page
def test_modules_that_are_named_can_be_imported(page: Path) -> None:
    if page in HISTORY or "extending" in page.name:
        pytest.skip("names old paths")
    text = page.read_text("utf-8")
    packages = "cache|calibrate|kvsim|sim|workloads"
    for name in re.findall(rf"(?<![\w./-])(?:{packages})(?:\.\w+)+(?![\w/])", text):
        is_file = re.search(r"\.(py|md|json|html|parquet|csv|gz)$", name)
        assert is_file or name == COMMAND_GROUP or resolved(name), name


def resolved(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        try:
            reduce(getattr, parts[end:], module)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="make docs installs what builds the site")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-c", "docs"]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(tmp_path / "trees")]
    site = tmp_path / "site"
    subprocess.run([*command, ".", str(site)], check=True, cwd=ROOT)
    assert "url=docs/index.html" in (site / "index.html").read_text()
    assert "watermark" in (site / "searchindex.js").read_text()
    pages = [p.relative_to(ROOT).with_suffix(".html") for p in PAGES]
    assert all((site / page).exists() for page in pages)
    html = "".join(page.read_text() for page in site.glob("docs/*.html"))
    assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?:', html)
