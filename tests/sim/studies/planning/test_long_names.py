"""Plans and sweeps of the longest names that there are: words are whole and inside."""

from __future__ import annotations

import json
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from sim.cli.output.plan import plan_lines
from sim.hardware.gpus import GPUS
from sim.hardware.models.bundled import bundled_models
from sim.studies.planning.answer.file import labels
from sim.views.plots.catalogue import SWEEP_FIGURES
from sim.views.plots.compared.sweep_runs import SweepRuns, read_sweep
from sim.views.plots.studies.plans import PLAN_FIGURES
from tests.sim.studies.planning.plans import small, solved
from tests.sim.views.plots.test_extents import check

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODELS = sorted(bundled_models(), key=len)[-2:]
LONG = dict(
    zip(
        ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "h200_sxm", "h100_sxm"),
        (*MODELS, *sorted(GPUS, key=len)[-2:]),
        strict=True,
    )
)
LONG |= {
    short.partition("/")[2]: long.partition("/")[2] for short, long in LONG.items()
}
del LONG[""]


def with_long_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return results that tell of the longest models and GPUs."""
    renamed: dict[str, Any] = json.loads(_with_long_names(json.dumps(data)))
    return renamed


def _with_long_names(text: str) -> str:
    for short, long in LONG.items():
        text = text.replace(short, long)
    return text


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    gpus = {"gpu": ["h200_sxm", "h100_sxm"]}
    asked = small(
        candidates=[
            {"model": [model], "max_num_seqs": [number], **gpus}
            for model, number in (("meta-llama/Llama-3.1-8B", 8), ("Qwen/Qwen3-8B", 16))
        ],
        objectives={"p95_ttft_ms": 200.0, "goodput": {"share": 0.9, "ttft_ms": 200.0}},
        sensitivity={"num_seeds": 1},
    )
    for key in ("model", "max_num_seqs"):
        asked["engine"].pop(key)
    asked["workload"]["synthetic"]["num_requests"] = 100
    return with_long_names(solved(asked, tmp_path_factory.mktemp("plan")).data)


@pytest.fixture(scope="module")
def sweep(pressed_sweep: Path) -> SweepRuns:
    runs = read_sweep(pressed_sweep)
    frame = runs.frame.map(lambda v: _with_long_names(v) if isinstance(v, str) else v)
    return SweepRuns(MODELS[-1], frame, runs.keys)


@pytest.mark.parametrize("name", PLAN_FIGURES)
@pytest.mark.slow
def test_figures_of_plans(name: str, plan: Mapping[str, Any]) -> None:
    check(PLAN_FIGURES[name](plan))


@pytest.mark.parametrize("name", SWEEP_FIGURES)
@pytest.mark.slow
def test_figures_of_sweeps(name: str, sweep: SweepRuns) -> None:
    check(SWEEP_FIGURES[name](sweep))


@pytest.mark.parametrize("width", [80, 120, 200])
def test_what_a_plan_prints(width: int, plan: Mapping[str, Any]) -> None:
    said = StringIO()
    console = Console(width=width, file=said)
    for part in plan_lines(plan, width):
        console.print(part)
    printed = said.getvalue()
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= width
    words = "".join(printed.split())
    for label in labels(plan).values():
        assert "".join(label.split()) in words
    for each in plan["candidates"]:
        assert f"{each['cost_per_hour']:,.2f}" in printed
        assert f"{each['rate']['low']:.3g}" in printed
