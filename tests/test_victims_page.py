"""`docs/policies.md` on victims and admission: its classes run, its names are there."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from sim.config.tables import load_config, parse_config
from sim.scheduler.admission import ADMISSION_RULES
from sim.scheduler.victims import VICTIMS
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.shared import ROOT
from tests.sim.config.test_config import write
from tests.sim.scheduler.test_victims import pressed

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs/policies.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[
        0
    ]


SECTIONS = {
    "preemption_victim": section("Preemption victims"),
    "admission": section("Admission"),
}


def code(key: str, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, SECTIONS[key], re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("key", "kinds"), [("preemption_victim", VICTIMS), ("admission", ADMISSION_RULES)]
)
def test_every_kind_is_on_the_page_and_in_a_table(
    key: str, kinds: dict[str, type]
) -> None:
    text = SECTIONS[key]
    listed = re.findall(
        r"^\| `(\w+)` \|", text.partition("<!-- table")[0], re.MULTILINE
    )
    assert sorted(listed) == sorted(kinds)
    tables = re.findall(
        r"<!-- table: ([\w ]+) -->\n(.*?)<!-- end: \1 -->", text, re.DOTALL
    )
    assert {name.split()[1] for name, _ in tables} >= {"demo", "azure", "chats"}
    for name, table in tables:
        assert "the engine's own" in table, name
        assert "nan" not in table, name
        assert len(table.splitlines()) >= 5, name


@pytest.mark.parametrize("key", SECTIONS)
def test_the_class_on_the_page_acts(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (text,) = code(key, "python")
    assert len(text.splitlines()) <= 20
    name = re.match(r"# (\w+\.py)\n", text)
    assert name
    (tmp_path / name[1]).write_text(text)
    command = code(key, "sh")[-1].replace("\\\n", " ")
    overrides = [v for word, v in pairwise(shlex.split(command)) if word == "--set"]
    # Smaller numbers, for a smaller engine.
    small = {"3000": "60"}
    for old, new in small.items():
        overrides = [each.replace(old, new) for each in overrides]
    if key == "admission":
        overrides.append("engine.admission.few=3")
    monkeypatch.chdir(tmp_path)
    config = load_config(write(tmp_path, pressed()), overrides)
    own = Simulation(config).run(check_every=1)
    assert own.summary["completed"] == own.summary["num_requests"]
    default = simulate(parse_config(pressed()))
    assert not own.steps.equals(default.steps)


def test_orcas_rule_is_what_the_page_says() -> None:
    longest = {
        "kind": "conservative",
        "output_tokens": {"kind": "fixed", "tokens": 1_000_000},
    }
    data = pressed(admission=longest)
    assert data["workload"]["max_tokens"] == 60
    assert simulate(parse_config(data)).summary["num_preemptions"] == 0
    assert simulate(parse_config(pressed())).summary["num_preemptions"] > 0
