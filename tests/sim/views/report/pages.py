"""Results to report on, and pages read back, for tests of pages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import yaml

from sim.cli.main import run as kvsim
from sim.views.report import build_page
from sim.views.report.html import VOID
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    from pathlib import Path


def crowded(**engine: Any) -> dict[str, Any]:
    """A run of a second or two that preempts."""
    data = minimal(**{"num_gpu_blocks_override": 40, "max_model_len": 600} | engine)
    data["workload"]["synthetic"] |= {
        "num_requests": 150,
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 200},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 120},
    }
    return data


def swapping() -> dict[str, Any]:
    """A run that preempts by swapping and by computing again."""
    data = crowded(
        scheduler="v0",
        swap_space=1.0,
        max_num_batched_tokens=600,
        num_gpu_blocks_override=90,
    )
    data["workload"] |= {"beam_width": {1: 0.6, 2: 0.4}}
    return data


def results(directory: Path, data: dict[str, Any], *arguments: str) -> Path:
    """Run a configuration with ``kvsim run``; return its results."""
    config = directory.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(data))
    told = ["run", str(config), "--out", str(directory), "--quiet", "--no-figures"]
    assert kvsim([*told, *arguments]) == 0
    return directory


def page_of(*directories: Path, is_static: bool = False) -> Page:
    """Build and read a page."""
    return Page(build_page(directories, is_static=is_static))


@dataclass
class Page:
    """A page, read back."""

    text: str
    elements: list[tuple[str, dict[str, str]]] = field(init=False)
    words: list[str] = field(init=False)
    unclosed: list[str] = field(init=False)

    def __post_init__(self) -> None:
        reader = _Reader()
        reader.feed(self.text)
        self.elements, self.words = reader.elements, reader.words
        self.unclosed = reader.open

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures that plotly is to draw, by key."""
        begin = self.text.index('<script type="application/json"')
        begin = self.text.index(">", begin) + 1
        return json.loads(self.text[begin : self.text.index("</script>", begin)])

    @property
    def visible(self) -> str:
        """The words on the page."""
        return " ".join(" ".join(self.words).split())

    def data(self, run: int = 1) -> list[tuple[str, Any]]:
        """Numbers of a run: key, and full value."""
        return [
            (each["data-key"], json.loads(each["value"]))
            for name, each in self.elements
            if name == "data" and each.get("data-run") == str(run)
        ]

    def ids(self) -> list[str]:
        return [each["id"] for _, each in self.elements if "id" in each]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)
