"""Plans over fleets: what a router is worth, and fleets that a plan names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.fleet.routers import ROUTERS
from sim.results.summary.objectives import parse_objectives
from sim.studies.planning.answer.configurations import flags_of_fleet, router_flags
from sim.studies.planning.answer.verdict import verdicts_of
from sim.studies.planning.phases.named_fleets import expanded
from sim.studies.planning.search.trial import Trial, perform
from tests.sim.studies.planning.plans import small, solved

if TYPE_CHECKING:
    from pathlib import Path

BURSTY: dict[str, Any] = {
    "synthetic": {
        "num_requests": 400,
        "arrivals": {"kind": "poisson", "rate": 10.0},
        "prompt_tokens": {"kind": "fixed", "tokens": 16},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
        "rate_scale": 12.0,
    }
}


def only(data: dict[str, Any]) -> dict[str, Any]:
    (found,) = data["candidates"]
    return found


@pytest.mark.slow
def test_replicas_behind_a_router_that_looks_are_fewer_or_quicker(
    tmp_path: Path,
) -> None:
    replicas = {"routers": ["random", {"kind": "least_requests"}], "spare": 0}
    data = solved(small(workload=BURSTY, replicas=replicas), tmp_path).data
    random, least = only(data)["routers"]
    assert [each["router"]["kind"] for each in (random, least)] == [
        "random",
        "least_requests",
    ]
    assert random["replicas"] == only(data)["replicas"] > 1
    assert least["replicas"] <= random["replicas"]
    waits = [
        each["alike"]["values"]["p99_ttft_ms"]["value"] for each in (random, least)
    ]
    assert waits[1] < waits[0]
    assert random["alike"]["replicas"] == least["alike"]["replicas"]
    points = {(p["router"], p["replicas"]): p for p in data["pareto"]["points"]}
    assert set(points) == {
        ("random", random["replicas"]),
        ("least_requests", random["replicas"]),
        ("least_requests", least["replicas"]),
    }
    assert not points["random", random["replicas"]]["on_front"]
    (verdict,) = verdicts_of(data).values()
    assert verdict.routers[0].startswith(f"Behind random {random['replicas']} replicas")
    assert "Behind least_requests" in verdict.routers[1]
    assert verdict.router.endswith("--policy random")


def test_a_fleet_behind_round_robin_is_the_split_of_before() -> None:
    """The same engines get the same requests: nothing connects them."""
    plan = small(workload=BURSTY)
    run = {
        "workload": {"synthetic": BURSTY["synthetic"] | {"rate_scale": 4.0}},
        "engine": plan["engine"] | {"gpu": "h200_sxm"},
        "cost": plan["cost"],
        "seed": 3,
    }
    trial = Trial(run, parse_objectives({"p99_ttft_ms": 100}), 0.1)
    pools = [{"name": "main", "replicas": 3}]
    fleet = {"pools": pools, "router": {"kind": "round_robin"}}
    split = perform(Trial(run, trial.objectives, 0.1, num_replicas=3, by="round_robin"))
    routed = perform(Trial(run, trial.objectives, 0.1, num_replicas=3, fleet=fleet))
    assert routed.values == split.values
    assert routed.margin == split.margin
    assert routed.tokens_per_s == pytest.approx(split.tokens_per_s, rel=0.02)


@pytest.mark.slow
def test_fleets_that_a_plan_names_are_run_and_priced(tmp_path: Path) -> None:
    fleets = [
        {
            "name": "mixed",
            "pools": [
                {"name": "new", "replicas": [1, 7]},
                {"name": "old", "replicas": [0, 1], "engine": {"gpu": "h100_sxm"}},
            ],
            "router": ["random", "least_requests"],
        },
        {
            "name": "apart",
            "pools": [
                {"name": "prefill", "role": "prefill", "replicas": 1},
                {"name": "decode", "role": "decode", "replicas": [2]},
            ],
            "links": {"interconnect": "infiniband_ndr"},
        },
    ]
    data = solved(small(workload=BURSTY, fleets=fleets), tmp_path).data
    found = {each["name"]: each for each in data["fleets"]}
    assert len(found) == 9
    both = found["mixed: 7 new + 1 old behind least_requests"]
    assert both["cost_per_hour"] == 7 * 4.0 + 3.0
    assert both["num_gpus"] == 8
    assert both["seeds_that_hold"] == both["num_seeds"] == 3
    assert both["serves"]
    assert set(both["serve_commands"]) == {"new", "old"}
    assert "least-request" in both["router_flags"]
    few = found["mixed: 1 new behind random"]
    assert not few["serves"]
    apart = found["apart: 1 prefill + 2 decode behind round_robin"]
    assert apart["cost_per_hour"] == 12.0
    assert apart["router_flags"] == (
        "vllm-router --vllm-pd-disaggregation --prefill URL... --decode URL... "
        "--prefill-policy round_robin --decode-policy round_robin"
    )
    lines = verdicts_of(data)[only(data)["model"]].fleets
    assert len(lines) == 9
    assert lines[0].endswith(".")
    assert "does not serve the traffic (it holds in " in lines[-1]
    (limit,) = (each["limit"] for each in data["objectives"])
    missed = few["values"][data["objectives"][0]["name"]]["value"]
    assert missed > limit
    told = f"{data['objectives'][0]['name']} {missed:,.0f}."
    assert any(told in line for line in lines if "1 new behind random" in line)
    costs = [each["cost_per_hour"] for each in found.values() if each["serves"]]
    assert f"{min(costs):,.2f} USD an hour" in lines[0]


def test_names_say_what_fleets_are() -> None:
    table = {
        "pools": [{"name": "a", "replicas": [1, 2]}, {"name": "b"}],
        "router": {"kind": "llm_d", "queue_weight": 1.0},
        "decode_router": ["random"],
    }
    assert [name for name, _ in expanded(table)] == [
        "fleet: 1 a + 1 b behind llm_d, random",
        "fleet: 2 a + 1 b behind llm_d, random",
    ]


@pytest.mark.parametrize(
    ("scheduler", "table", "line"),
    [
        (
            "v1",
            {"router": {"kind": "sglang_cache_aware"}},
            "vllm-router --vllm-pd-disaggregation --prefill URL... --decode URL... "
            "--prefill-policy cache_aware --decode-policy round_robin",
        ),
        (
            "sglang",
            {"router": {"kind": "random"}, "decode_router": {"kind": "power_of_two"}},
            "python -m sglang_router.launch_router --pd-disaggregation --prefill URL "
            "PORT... --decode URL... --prefill-policy random --decode-policy "
            "power_of_two",
        ),
        (
            "v1",
            {
                "router": {"kind": "least_requests"},
                "decode_router": {"kind": "random"},
            },
            "a proxy that takes each request to both; before prefillers: the AIBrix "
            "gateway, with the header routing-strategy: least-request; before "
            "decoders: python -m sglang_router.launch_router --worker-urls URL... "
            "--policy random",
        ),
    ],
)
def test_prefill_and_decode_apart_take_a_router_that_knows_both(
    scheduler: str, table: dict[str, Any], line: str
) -> None:
    """A plain one would send each request to a prefiller or to a decoder."""
    pools = [
        {"name": "prefill", "role": "prefill", "replicas": 1},
        {"name": "decode", "role": "decode", "replicas": 2},
    ]
    fleet = {"pools": pools, "links": {"bytes_per_s": 5e10}} | table
    data = small()["engine"] | {"scheduler": scheduler, "gpu": "h100_sxm"}
    config = parse_config(
        {"workload": small()["workload"], "engine": data, "fleet": fleet}
    )
    assert flags_of_fleet(config) == line


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_router_says_how_the_real_one_is_started(kind: str) -> None:
    flags = router_flags({"kind": kind}, 4)
    assert "\n" not in flags
    assert "class of your own" not in flags
    assert "4" in flags or kind != "vllm_dp"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"fleets": [{"name": "a"}]}, "fleets.0.pools: give a list of pools"),
        ({"fleets": [{"pools": [{}]}]}, "fleets.0.pools: each needs a name"),
        (
            {"fleets": [{"pools": [{"name": "a", "engine": {"gpu": "l4"}}]}]},
            "no price for this GPU",
        ),
        ({"replicas": {"routers": ["llmd"]}}, "'llmd' is not built; did you mean"),
    ],
)
def test_refused(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        solved(small(workload=BURSTY, **changes), tmp_path)
    assert "\n" not in str(refused.value)


def test_a_plan_of_one_engine_says_that_a_router_has_no_choice(tmp_path: Path) -> None:
    routers = {"routers": ["random", "least_requests"], "num_seeds": 2}
    workload = small()["workload"]
    workload["synthetic"]["rate_scale"] = 1.0
    data = solved(small(workload=workload, replicas=routers), tmp_path).data
    assert only(data)["replicas"] == 1
    (line,) = verdicts_of(data)[only(data)["model"]].routers
    assert line.startswith("One engine serves the traffic, and a router has no choice")
