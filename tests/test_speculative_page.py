"""`docs/speculative.md` and its examples say what the code does."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.config.tables import load_config, parse_config
from sim.simulation.simulate import simulate
from sim.studies.planning.phases.candidates import candidates_of
from sim.studies.planning.phases.sensitivity import levers_of
from sim.studies.planning.spec import load_plan
from sim.studies.sweeps.expand import Sweep, check_runs
from sim.studies.sweeps.spec import load_sweep
from tests.shared import ROOT

if TYPE_CHECKING:
    from typing import Any

PAGE = (ROOT / "docs/speculative.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples"


def printed(what: str) -> str:
    pattern = rf"<!-- output of: {re.escape(what)} -->\n```text\n(.*?)```"
    found = re.search(pattern, PAGE, re.DOTALL)
    assert found, what
    return found[1]


def test_the_configuration_on_the_page_is_the_example() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    on_page = parse_config(yaml.safe_load(text))
    example = load_config(
        EXAMPLES / "speculative_chat.yaml",
        ["engine.enable_prefix_caching=null", "cost_intervals=true"],
    )
    assert on_page == example


def test_the_capacity_on_the_page_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = re.search(r"<!-- output of: (kvsim capacity .*?) -->", PAGE)
    assert found
    assert kvsim(shlex.split(found[1])[1:]) == 0
    assert capsys.readouterr().out.startswith(printed(found[1]))


def cell(what: str, rate: float, num_drafts: int) -> float:
    first, _, *lines = printed(what).splitlines()
    place = first.split()[1:].index(str(num_drafts))
    rows = {float(name): cells for name, *cells in map(str.split, lines)}
    return float(rows[rate][place].replace(",", ""))


@pytest.mark.parametrize(
    ("rate", "num_drafts"), [(1.0, 0), pytest.param(1.0, 3, marks=pytest.mark.slow)]
)
def test_the_tables_on_the_page_are_those_of_the_sweep(
    rate: float, num_drafts: int
) -> None:
    changes: dict[str, Any] = {
        "workload.synthetic.rate_scale": rate,
        "engine.speculative_config.num_speculative_tokens": num_drafts,
    }
    summary = simulate(load_config(EXAMPLES / "speculative_chat.yaml", changes)).summary
    for name, digits in (("median_tpot_ms", 1), ("output_throughput", 0)):
        expected = cell(f"{name} of the sweep", rate, num_drafts)
        assert round(summary[name], digits) == expected


def test_the_sweep_has_so_many_runs() -> None:
    sweep = Sweep(load_sweep(EXAMPLES / "speculative_sweep.yaml"))
    check_runs(list(sweep.runs()))
    assert sweep.num_runs == 20
    assert "20 runs" in (EXAMPLES / "speculative_sweep.yaml").read_text()


def test_the_number_of_drafts_is_a_lever_of_plans() -> None:
    plan = load_plan(EXAMPLES / "speculative_plan.yaml")
    none, three = candidates_of(plan)
    assert none.pool.num_gpu_blocks > three.pool.num_gpu_blocks
    levers = {
        lever.change: lever
        for lever in levers_of(three, {})
        if lever.name == "num_speculative_tokens"
    }
    assert list(levers) == ["0", "1", "2", "4", "5"]
    for change, lever in levers.items():
        engine = parse_config(lever.apply(three.run)).engine
        assert engine.speculative_config is not None
        assert engine.speculative_config.num_speculative_tokens == int(change)
        assert engine.speculative_config.method == "eagle3"
