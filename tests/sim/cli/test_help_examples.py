"""The help of every command ends with two examples, which are command lines."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from calibrate.cli.profile import importing, profile
from sim.cli.examples import EXAMPLES
from sim.cli.main import COMMANDS, LISTS, build_app
from sim.cli.main import run as kvsim
from sim.cli.workload import COMMANDS as WORKLOAD_COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

ALL = [
    *COMMANDS,
    *LISTS,
    *(f"workload {name}" for name in WORKLOAD_COMMANDS),
    "calibrate",
    "calibrate replay",
    "profile",
    *(f"profile {name}" for name in profile if not name.startswith("-")),
    *(f"profile import {name}" for name in importing if not name.startswith("-")),
]


def test_every_command_has_two() -> None:
    assert {*EXAMPLES} == {"", *ALL}
    assert {len(lines) for lines in EXAMPLES.values()} == {2}


@pytest.mark.parametrize("command", ["", *ALL])
def test_help_ends_with_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(line.startswith(f"kvsim {command}") for line in EXAMPLES[command])
    assert kvsim([*command.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.partition("Examples:")[2].split())
    for line in EXAMPLES[command]:
        assert line in text


@pytest.mark.parametrize(
    "line", [line for lines in EXAMPLES.values() for line in lines]
)
def test_they_are_understood(line: str) -> None:
    words = shlex.split(line)
    assert words[0] == "kvsim"
    build_app().parse_args(words[1:], exit_on_error=False, print_error=False)


def test_completion_is_installed_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kvsim(["--install-completion", "--shell", "bash"]) == 0
    assert "kvsim" in capsys.readouterr().out
    assert any("kvsim" in path.read_text() for path in tmp_path.rglob("*kvsim*"))
