"""The page of a plan: what plan.json holds, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.cli.main import run as kvsim
from sim.studies.planning.answer.file import labels
from sim.views.plots.studies.plans import load_points
from tests.sim.commands import refused
from tests.sim.studies.planning.plans import small, written
from tests.sim.views.report.pages import Page, page_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = small(
        candidates=[
            {"gpu": ["h200_sxm", "h100_sxm"]},
            {"gpu": ["h100_sxm"], "model": ["meta-llama/Llama-3.1-70B"]},
        ],
        objectives={"p95_ttft_ms": 200.0, "goodput": {"share": 0.9, "ttft_ms": 200.0}},
        sensitivity={"num_seeds": 1},
    )
    asked["engine"].pop("model")
    asked["candidates"][0]["model"] = ["meta-llama/Llama-3.1-8B"]
    asked["workload"]["synthetic"]["num_requests"] = 200
    folder = tmp_path_factory.mktemp("plan")
    told = ["plan", str(written(asked, folder)), "--out", str(folder / "out")]
    assert kvsim([*told, "--workers", "1", "--quiet"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def plan(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "plan.json").read_text())


@pytest.fixture(scope="module")
def page(directory: Path) -> Page:
    return page_of(directory)


def test_numbers_are_those_of_the_plan(page: Page, plan: dict[str, Any]) -> None:
    data = [
        (each["data-run"], each["data-key"], json.loads(each["value"]))
        for name, each in page.elements
        if name == "data"
    ]
    assert ("traffic", "rate", plan["traffic"]["rate"]) in data
    found = [each for each in plan["candidates"] if "rate" in each]
    assert len(found) == 2
    for each in found:
        assert (each["name"], "rate", each["rate"]["value"]) in data
        assert (each["name"], "replicas", each["replicas"]) in data
        assert (each["name"], "cost_per_hour", each["cost_per_hour"]) in data
        # That of the cheapest begins a sentence of the verdict, with a capital.
        assert each["binding"]["sentence"][1:] in page.visible
    assert len(data) == 1 + 3 * len(found)
    assert all(e["answer"] in page.visible for e in plan["verdict"].values())


def test_candidates_that_do_not_fit_say_why(page: Page, plan: dict[str, Any]) -> None:
    (left,) = (each for each in plan["candidates"] if "rate" not in each)
    assert " ".join(left["reason"].split()) in page.visible


def test_figures_hold_the_points_of_the_plan(page: Page, plan: dict[str, Any]) -> None:
    assert list(page.figures)[:2] == ["capacity-curves", "pareto"]
    curves = page.figures["capacity-curves"]["data"]
    for each in plan["candidates"]:
        if "rate" not in each:
            continue
        lines = [trace for trace in curves if trace["name"] == each["name"]]
        for line, objective in zip(lines, plan["objectives"], strict=True):
            points = load_points(each, objective["name"])
            medians = [float(np.median(values)) for values in points.values()]
            assert line["y"] == pytest.approx(medians, rel=1e-5)
    names = set(labels(plan).values())
    marks = [t for t in page.figures["pareto"]["data"] if t["name"] in names]
    costs = [point["cost_per_hour"] for point in plan["pareto"]["points"]]
    assert sorted(x for mark in marks for x in mark["x"]) == pytest.approx(
        sorted(costs)
    )
    for number, found in enumerate(plan["sensitivity"].values(), 1):
        gains = [100 * e["rate_gain"] for e in found["effects"] if e["rate_gain"]]
        (bars,) = page.figures[f"sensitivity-{number}"]["data"]
        drawn = [x for x in bars["x"] if x]
        assert drawn == pytest.approx(sorted(gains, reverse=True), rel=1e-5)


def test_static_pages_of_plans(directory: Path, page: Page) -> None:
    static = page_of(directory, is_static=True)
    assert not static.unclosed
    drawn = [e["id"] for _, e in static.elements if "still" in e.get("class", "")]
    assert drawn == [f"plot-{key}" for key in page.figures]


def test_plans_of_other_formats_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text('{"format": "kvplan/9"}')
    told = ["report", str(tmp_path), "--out", str(tmp_path / "x.html")]
    assert "is of format 'kvplan/9'" in refused(told, capsys, tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"candidates": 3}, "has no list 'candidates'"),
        ({"candidates": [3]}, "candidate 0 has no 'name'"),
        ({"candidates": [{"name": "a"}]}, "candidate 0 has no 'model'"),
        ({"prices": None}, "has no table 'prices'"),
        ({"cheapest": []}, "has no table 'cheapest'"),
        ({"format": "kvplan/9"}, "is of format 'kvplan/9'"),
    ],
)
@pytest.mark.parametrize("command", ["report", "plot"])
def test_damaged_plans_are_refused_in_a_line(  # noqa: PLR0917 - fixtures
    command: str,
    damage: dict[str, Any],
    message: str,
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = json.loads((directory / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | damage))
    told = [command, str(tmp_path), "--out", str(tmp_path / "out")]
    line = refused(told, capsys, tmp_path)
    assert message in line
    assert "plan again" in line
    assert not (tmp_path / "out").exists()
