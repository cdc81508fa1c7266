"""`docs/tiers.md` says what the plan of host memory prints."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import run as kvsim
from tests.shared import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = " ".join((ROOT / "docs/tiers.md").read_text(encoding="utf-8").split())
EXAMPLE = ROOT / "examples/plan_host_memory.yaml"


@pytest.mark.slow
def test_the_plan_says_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = [
        re.search(r"256 GiB behind each engine (saves .*?) at the prices", PAGE),
        re.search(r"behind `random`, the default, .*? it (saves .*? more)\.", PAGE),
    ]
    for routers, said in zip(("session", ""), sentences, strict=True):
        assert said is not None
        saves = said[1].replace("L40S", "l40s")
        split = ["--set", f"replicas.routers=[{routers}]"]
        out = ["--out", str(tmp_path / (routers or "random"))]
        assert kvsim(["plan", str(EXAMPLE), *split, *out, "--json"]) == 0
        (verdict,) = json.loads(capsys.readouterr().out)["verdict"].values()
        (sentence,) = verdict["host_memory"]
        assert saves in sentence
