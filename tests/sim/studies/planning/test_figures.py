"""Figures of a plan: what stands on their axes, and the same bytes twice."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from sim.cli.output.plan import answers, plan_lines
from sim.studies.planning.answer.file import labels
from sim.studies.planning.answer.verdict import verdicts_of
from sim.views.plots.output import NotShownError, write_pngs
from sim.views.plots.studies.plans import PLAN_FIGURES
from sim.views.plots.style import to_png
from tests.sim.studies.planning.plans import small, solved

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    asked = small(
        candidates={"gpu": ["h200_sxm", "h100_sxm"]},
        objectives={"p95_ttft_ms": 200.0, "goodput": {"share": 0.9, "ttft_ms": 200.0}},
        sensitivity={"num_seeds": 1},
    )
    asked["workload"]["synthetic"]["num_requests"] = 200
    return solved(asked, tmp_path_factory.mktemp("plan")).data


def test_axes_say_what_they_show(plan: Mapping[str, Any]) -> None:
    labels = {
        name: [(axes.get_xlabel(), axes.get_ylabel()) for axes in draw(plan).axes]
        for name, draw in PLAN_FIGURES.items()
    }
    one = "requests/s of one engine"
    assert labels["capacity_curves"] == [(one, "p95 TTFT (ms)"), (one, "goodput")]
    assert labels["latency_load"] == [(one, "TTFT (ms)"), (one, "TPOT (ms)")]
    assert labels["pareto"] == [
        ("USD an hour, meta-llama/Llama-3.1-8B", "p95 TTFT (ms)")
    ]
    assert labels["tornado"] == [("change of the highest rate (%)", "")]


def test_objectives_are_drawn_in(plan: Mapping[str, Any]) -> None:
    axes = PLAN_FIGURES["capacity_curves"](plan).axes
    limits = [{float(line.get_ydata()[0]) for line in each.lines} for each in axes]  # type: ignore[index]
    assert 200.0 in limits[0]
    assert 0.9 in limits[1]
    assert [len(each.lines) for each in axes] == [3, 3]


@pytest.mark.parametrize("name", PLAN_FIGURES)
def test_same_plan_same_picture(name: str, plan: Mapping[str, Any]) -> None:
    draw = PLAN_FIGURES[name]
    assert to_png(draw(plan)) == to_png(draw(plan))


def test_figures_of_a_plan_without_answers(plan: Mapping[str, Any]) -> None:
    """Stopped before replicas and sensitivities were known."""
    early = {**plan, "cheapest": {}, "sensitivity": {}}
    early["pareto"] = {**plan["pareto"], "points": []}
    for name in ("capacity_curves", "latency_load", "pareto"):
        assert to_png(PLAN_FIGURES[name](early))


def test_the_answer_is_said_in_sentences(plan: Mapping[str, Any]) -> None:
    # both hold 40/s, so the cheaper GPU wins
    (verdict,) = verdicts_of(plan).values()
    assert verdict.answer.startswith("Buy ")
    assert " h100_sxm, " in verdict.answer
    assert "dmission binds: " in verdict.binds
    assert plan["verdict"] == {"meta-llama/Llama-3.1-8B": verdict.to_dict()}
    shown = [getattr(part, "plain", "") for part in plan_lines(plan)]
    assert shown.index(verdict.answer) == 2
    said = list(answers(plan))
    assert shown[len(shown) - len(said) :] == said


@pytest.mark.parametrize("width", [40, 80, 120])
def test_tables_lose_no_number(plan: Mapping[str, Any], width: int) -> None:
    """They become lines where the terminal is too narrow."""
    said = StringIO()
    console = Console(width=width, file=said)
    for part in plan_lines(plan, width):
        console.print(part)
    text = " ".join(said.getvalue().split())
    assert "…" not in text
    for each in plan["candidates"]:
        assert f"{each['cost_per_hour']:,.2f}" in text
        assert f"{each['rate']['low']:.3g} to {each['rate']['high']:.3g}" in text
    assert sorted(labels(plan).values()) == ["h100_sxm", "h200_sxm"]


def test_noise_that_hides_an_effect_is_no_lack_of_one() -> None:
    told = {"rate_gain": 0.02, "resource": "", "change": "x 2"}
    effects = [
        told | {"lever": "watermark", "noise": 0.03},
        told | {"lever": "block_size", "noise": 0.3},
        told | {"lever": "max_num_seqs", "noise": 0.001},
    ]
    plan = {"sensitivity": {"m": {"verdict": "", "effects": effects}}, "notes": []}
    found = [line.strip() for line in answers(plan)]
    assert "no effect beyond noise: watermark" in found
    assert "unclear with so few seeds: block_size" in found


def test_a_plan_without_sensitivities_draws_no_figure_of_them(
    plan: Mapping[str, Any], tmp_path: Path
) -> None:
    bare = {**plan, "sensitivity": {}}
    drawn = write_pngs(PLAN_FIGURES, bare, tmp_path)
    assert [path.stem for path in drawn] == [*PLAN_FIGURES][:-1]
    with pytest.raises(NotShownError, match="no sensitivities"):
        PLAN_FIGURES["tornado"](bare)


def test_intervals_are_named_by_the_confidence_that_they_have(
    plan: Mapping[str, Any],
) -> None:
    """Three seeds give 75 %, however much more was asked for."""
    assert plan["search"]["confidence"] == 0.95
    assert {each["rate"]["confidence"] for each in plan["candidates"]} == {0.75}
    console = Console(file=StringIO(), width=100)
    for part in plan_lines(plan, 100):
        console.print(part)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "75% interval" in printed
    assert "95% interval" not in printed
    texts = [text.get_text() for text in PLAN_FIGURES["capacity_curves"](plan).texts]
    assert any("at 75% confidence" in text for text in texts)


def test_the_answer_names_its_router_and_a_cheaper_one(
    plan: Mapping[str, Any],
) -> None:
    def found(kind: str, replicas: int) -> dict[str, Any]:
        cost = {"cost_per_hour": 4.0 * replicas}
        router = {"kind": kind}
        return {"router": router, "replicas": replicas, "fewest": cost, "alike": None}

    best = min(
        (each for each in plan["candidates"] if each.get("replicas")),
        key=lambda each: each["cost_per_hour"],
    )
    fleets = [*best["fleets"], best["fleets"][0] | {"replicas": 4}]
    routers = [found("round_robin", 4), found("llm_d", 2)]
    routed = best | {"replicas": 4, "fleets": fleets, "routers": routers}
    (verdict,) = verdicts_of({**plan, "candidates": [routed]}).values()
    assert verdict.answer.endswith(
        " behind round_robin; behind llm_d 2 engines do, for 8.00 USD an hour."
    )
    routed["routers"] = routers[:1]
    (verdict,) = verdicts_of({**plan, "candidates": [routed]}).values()
    assert verdict.answer.endswith("within the objectives behind round_robin.")


def test_each_router_that_was_compared_is_on_the_front_figure(
    plan: Mapping[str, Any],
) -> None:
    routers = [{"router": {"kind": kind}} for kind in ("random", "llm_d")]
    first, *others = plan["candidates"]
    points = [
        point | {"router": kind, "on_front": kind == "llm_d"}
        for point in plan["pareto"]["points"]
        if point["candidate"] == first["name"]
        for kind in ("random", "llm_d")
    ]
    routed = {
        **plan,
        "candidates": [first | {"routers": routers}, *others],
        "pareto": plan["pareto"] | {"points": points},
    }
    (axes,) = PLAN_FIGURES["pareto"](routed).axes
    assert {"random", "llm_d"} < set(axes.get_legend_handles_labels()[1])
    shapes = [line.get_marker() for line in axes.lines if len(line.get_xdata()) == 1]  # type: ignore[arg-type]
    assert set(shapes) >= {"o", "D"}
