"""`docs/sizing.md`: its answers are those of the code, and those of full plans."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from sim.cli.main import run as kvsim
from tests.shared import ROOT, shared

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs/sizing.md").read_text(encoding="utf-8")
ANSWERS = re.findall(
    r"```text\n\$ kvsim (size (?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", PAGE, re.S
)
FULL = (
    "search.num_seeds=9",
    "search.shortlist=null",
    "search.tolerance=0.02",
    "replicas.num_seeds=5",
)


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has the trace which the page names."""
    traces = tmp_path / "traces"
    traces.mkdir()
    name = "azure_llm_2023_conv.csv"
    (traces / name).symlink_to(shared(f"traces/{name}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def asked(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def bought(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the fleet that an answer says to buy."""
    assert kvsim([*arguments, "--json"]) == 0
    answer: str = json.loads(capsys.readouterr().out)["verdict"]["answer"]
    fleet, served, _ = answer.partition(" serve")
    assert served
    return fleet


def test_there_are_six_questions_that_differ() -> None:
    options = [dict(re.findall(r"--([\w-]+) (\S+)", each)) for each, _ in ANSWERS]
    assert len(options) == 6
    assert len({each["model"] for each in options}) >= 5
    assert len({tuple(k for k in each if k[0] == "p") for each in options}) >= 4


@pytest.mark.slow
@pytest.mark.usefixtures("page_folder")
@pytest.mark.parametrize(("command", "block"), ANSWERS)
def test_answers_are_what_the_code_prints(
    command: str, block: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvsim(asked(command)) == 0
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert found == block.splitlines()


@pytest.mark.slow
@pytest.mark.usefixtures("page_folder")
@pytest.mark.parametrize("command", [each for each, _ in ANSWERS])
def test_decisions_are_those_of_full_plans(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = asked(command)
    full = [part for key in FULL for part in ("--set", key)]
    assert bought(arguments, capsys) == bought([*arguments, *full], capsys)
