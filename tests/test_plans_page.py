"""`docs/plans.md` says what plans take: keys, defaults, objectives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from sim.results.summary.objectives import parse_objectives
from sim.studies.planning.phases.named_fleets import expanded
from sim.studies.planning.spec import PlanConfig, load_plan
from tests.shared import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs/plans.md").read_text(encoding="utf-8")


def keys(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel) and name in (
            "search",
            "replicas",
            "sensitivity",
        ):
            found |= keys(type(default), f"{name}.")
        else:
            found[prefix + name] = "required" if field.is_required() else default
    return found


def test_every_key_is_on_the_page_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| (.+?) \| ", PAGE, re.MULTILINE)
    said = {
        key: value if value == "required" else yaml.safe_load(value.strip("`"))
        for key, value in rows
        if value == "required" or value.startswith("`")
    }
    there = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in keys(PlanConfig).items()
    }
    assert said == there


def test_objectives_on_the_page_are_understood() -> None:
    rows = re.findall(
        r"^\| (`[^|]+`) \| (?:the perc|so many|there are|the cache)", PAGE, re.M
    )
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) == 9
    for name in names:
        table = yaml.safe_load(name.replace("NN", "95"))
        if isinstance(table, str):
            table = {table: 0.5}
        assert parse_objectives(table)


def test_the_example_on_the_page_is_a_plan(tmp_path: Path) -> None:
    text, fleets = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/azure_llm_2023_conv.csv").write_text("")
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert load_plan(path).tables[0]["gpu"] == ["h100_sxm", "l40s"]
    path.write_text(text + fleets)
    found = load_plan(path)
    assert [len([*expanded(table)]) for table in found.fleets] == [8, 4]


def test_lines_are_short() -> None:
    long = [
        line
        for line in PAGE.splitlines()
        if len(line) > 100 and not line.startswith("|")
    ]
    assert not long


def test_the_example_is_a_plan(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("")
    found = load_plan(
        ROOT / "examples/plan_chat.yaml", [f"workload.trace.path={trace}"]
    )
    gpus = {gpu for table in found.tables for gpu in table["gpu"]}
    assert gpus == set(found.parsed_prices.per_gpu_hour)
    assert found.parsed_prices.note
