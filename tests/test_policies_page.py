"""docs/policies.md names what there is."""

from __future__ import annotations

import re
import runpy
from typing import TYPE_CHECKING

from cache.v1.policies import CACHE_POLICIES
from sim.config.tables import load_config
from tests.shared import ROOT
from tests.sim.commands import kvsim

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
EVICTION = PAGE.partition("## Eviction")[2].partition("\n## ")[0]


def test_every_eviction_policy_stands_on_the_page() -> None:
    described, _, tables = EVICTION.partition("**The tables.**")
    assert set(re.findall(r"^\| `(\w+)` \|", described, re.MULTILINE)) == set(
        CACHE_POLICIES
    )
    measured = re.split(r"^\*\*.*blocks \(.*\)\*\*$", tables, flags=re.MULTILINE)[1:]
    assert len(measured) >= 3
    for table in measured:
        kinds = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert kinds == [kind for kind in CACHE_POLICIES if kind in kinds]
        assert set(kinds) >= set(CACHE_POLICIES) - {"clairvoyant"}


def test_tables_of_which_no_run_is_kept_stay_on_the_page() -> None:
    script = runpy.run_path(str(ROOT / "examples" / "eviction_policies.py"))
    page_with, races = script["page_with"], script["RACES"]
    titles = [race.title for race in races]
    assert page_with(PAGE, {title: [] for title in titles}) == PAGE
    chats = ["### " + titles[-1], "", "| made anew |", ""]
    page = page_with(PAGE, {title: [] for title in titles[:-1]} | {titles[-1]: chats})
    kept, made = page.split("### " + titles[-1])
    assert kept == PAGE.split("### " + titles[-1])[0]
    assert made.startswith("\n\n| made anew |\n\n<!-- end")


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_the_policies_on_the_page_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = re.findall(
        r"--set '?(engine\.evictor=[^'\n]+)'?$", EVICTION, re.MULTILINE
    )
    assert len(settings) == 2
    for setting in settings:
        config = load_config(
            ROOT / "examples" / "agents.yaml",
            [setting, "workload.sessions.duration_s=60"],
        )
        path = tmp_path / "config.yaml"
        path.write_text(config.to_yaml())
        out = str(tmp_path / config.engine.evictor_kind)  # type: ignore[operator]
        arguments = ["run", str(path), "--out", out, "--no-figures", "--quiet"]
        assert kvsim(arguments) == 0
    capsys.readouterr()


def test_the_questions_quote_the_page() -> None:
    questions = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
    quoted = re.findall(
        r"(?<=\| )[^|`]*\([-+][\d.]+ to [-+][\d.]+\)|x [\d.]+ to [\d.]+", questions
    )
    assert len(quoted) >= 40
    for cell in quoted:
        assert cell in PAGE, cell
