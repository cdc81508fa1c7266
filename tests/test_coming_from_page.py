"""`docs/coming_from.md`: kvsim's commands are understood, and its file is a run."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from sim.cli.main import build_app
from sim.config.engine import EngineConfig
from sim.config.tables import parse_config
from tests.shared import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
COMMANDS = [
    each.group(0)
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for each in re.finditer(r"^kvsim .*$", block.replace("\\\n", ""), re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    build_app().parse_args(words, exit_on_error=False, print_error=False)


def test_the_file_is_a_run_and_keys_are_there() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert parse_config(yaml.safe_load(text)).engine.model == "Qwen/Qwen3-14B"
    keys = set(re.findall(r"`engine\.(\w+)`", PAGE))
    assert keys <= {*EngineConfig.model_fields}
    assert len(COMMANDS) == 5
