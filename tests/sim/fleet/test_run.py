"""Fleets: engines behind a router are what they are alone, and what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.engine.requests import LateRequests
from sim.errors import ConfigError, ResultsError
from sim.fleet.apart import Deal, EnginesApart
from sim.fleet.lookahead import AtArrivals, BetweenScrapes, ByEnds
from sim.fleet.routers import ROUTERS
from sim.fleet.routers.counting import RoundRobin
from sim.results.fleet.ranks import tables_of_rank
from sim.results.folder import RunFolder
from sim.results.tables.parquet import StepsFile
from sim.results.tables.steps import spans_s
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.views.plots.run.fleets import engines_figure, mean_usage
from tests.sim.cli.test_run_command import kvsim
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path

    from sim.results.run import Results

TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 70, "max_model_len": 1024}
GENERATIONS: dict[str, dict[str, Any]] = {
    "v1": TIGHT,
    "v1, scheduling ahead": TIGHT | {"async_scheduling": True},
    "v1, a pipeline": TIGHT | {"pipeline_parallel_size": 2},
    "v1, 0.11": TIGHT | {"engine_version": "0.11"},
    "v0": TIGHT | {"scheduler": "v0"},
    "v0_2": TIGHT | {"scheduler": "v0_2"},
    "cacheflow": TIGHT | {"scheduler": "cacheflow"},
    "hf_fifo": TIGHT | {"scheduler": "hf_fifo"},
    "sglang": {
        "scheduler": "sglang",
        "max_total_tokens": 1120,
        "max_model_len": 1024,
        "schedule_conservativeness": 0.05,
    },
    "gpt-oss": {
        "model": "openai/gpt-oss-20b",
        "num_gpu_blocks_override": 200,
        "max_model_len": 1024,
    },
}
ONE = {"pools": [{"name": "main", "replicas": 1}]}
SESSIONS: dict[str, Any] = {
    "sessions": {
        "kind": "chat",
        "arrivals": {"kind": "poisson", "rate": 8.0},
        "num_sessions": 12,
        "turns": {"kind": "fixed", "number": 3},
        "prompt_tokens": {"kind": "fixed", "tokens": 60},
        "output_tokens": {"kind": "fixed", "tokens": 20},
        "think_s": {"kind": "fixed", "value_s": 0.5},
    },
    "max_concurrent_users": 5,
}


def data_of(
    engine: dict[str, Any],
    fleet: dict[str, Any] | None,
    num_requests: int = 60,
    rate: float = 30.0,
) -> dict[str, Any]:
    data = minimal(**engine)
    data["workload"]["synthetic"] |= {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 400},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 60},
    }
    data["cost"] = {"kind": "roofline"}
    if fleet is not None:
        data["fleet"] = fleet
    return data


def fleet_of(replicas: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {
        "pools": [{"name": "main", "replicas": replicas}],
        "router": {"kind": kind} | arguments,
    }


def tables(results: Results) -> dict[str, Any]:
    return {
        name: getattr(results, name) for name in ("requests", "steps", "preemptions")
    }


@pytest.mark.parametrize("way", ["fast", "stepwise"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_fleet_of_one_is_the_engine(generation: str, way: str) -> None:
    engine, stepwise = GENERATIONS[generation], way == "stepwise"
    alone = Simulation(parse_config(data_of(engine, None)), stepwise=stepwise).run()
    fleet = Simulation(parse_config(data_of(engine, ONE)), stepwise=stepwise).run()
    for name, table in tables(fleet).items():
        assert (table.pop("engine") == 0).all(), name
        assert table.equals(tables(alone)[name]), name
    for key, value in alone.summary.items():
        if key not in {"title", "wall_seconds"}:
            assert fleet.summary[key] == value, key


@pytest.mark.parametrize("kind", ROUTERS)
def test_with_any_router_a_fleet_of_one_is_the_engine(kind: str) -> None:
    alone = Simulation(parse_config(data_of(TIGHT, None))).run()
    fleet = Simulation(parse_config(data_of(TIGHT, fleet_of(1, kind)))).run()
    for name, table in tables(fleet).items():
        assert table.drop(columns="engine").equals(tables(alone)[name]), name


def test_closed_loops_through_a_fleet_of_one() -> None:
    data = data_of(TIGHT, None) | {"workload": SESSIONS}
    alone = Simulation(parse_config(data)).run()
    fleet = Simulation(parse_config(data | {"fleet": fleet_of(1, "llm_d")})).run()
    for name, table in tables(fleet).items():
        assert table.drop(columns="engine").equals(tables(alone)[name]), name


@pytest.mark.parametrize("kind", ROUTERS)
def test_stepwise_it_is_the_same(kind: str) -> None:
    config = parse_config(data_of(TIGHT, fleet_of(3, kind), 90, 200.0))
    fast, slow = (Simulation(config, stepwise=way).run() for way in (False, True))
    assert fast.summary["path"] == "fast"
    for name, table in tables(fast).items():
        order = ["engine", "step"] if name == "steps" else []
        one, other = table, tables(slow)[name]
        if order:
            one, other = (
                each.sort_values(order, ignore_index=True) for each in (one, other)
            )
        assert one.equals(other), name


def sorted_tables(results: Results) -> dict[str, Any]:
    """Return the tables of a run; steps by engine, whichever was taken first."""
    found = tables(results)
    order = ["engine", "step"]
    found["steps"] = found["steps"].sort_values(order, ignore_index=True)
    return found


AT_ONE_INSTANT: dict[str, Any] = {
    "sessions": SESSIONS["sessions"]
    | {
        "arrivals": {"kind": "burst", "burst_size": 10, "interval_s": 1.0},
        "num_sessions": 36,
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 100},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 60},
        "think_s": {"kind": "fixed", "value_s": 0.0},
    },
    "max_concurrent_users": 9,
}


@pytest.mark.parametrize("cost", ["roofline", "constant"])
@pytest.mark.parametrize("kind", ["round_robin", "llm_d", "vllm_dp", "aibrix_prefix"])
def test_what_happens_at_one_instant_has_an_order(kind: str, cost: str) -> None:
    engine = TIGHT | {"async_scheduling": False}
    data = data_of(engine, fleet_of(3, kind)) | {"workload": AT_ONE_INSTANT}
    if cost == "constant":  # steps of all engines end together
        data["cost"] = {"kind": "constant", "step_s": 0.0078125}
    config = parse_config(data)
    fast = sorted_tables(Simulation(config).run())
    slow = sorted_tables(Simulation(config, stepwise=True).run())
    checked = sorted_tables(Simulation(config).run(check_every=1))
    for name, table in fast.items():
        assert table.equals(slow[name]), name
        assert table.equals(checked[name]), name


@pytest.mark.parametrize("generation", ["v1, scheduling ahead", "v0", "sglang"])
def test_checks_change_nothing(generation: str) -> None:
    fleet = fleet_of(3, "sglang_cache_aware")
    data = data_of(GENERATIONS[generation], fleet) | {"seed": 81}
    data["cost"] = {"kind": "constant", "step_s": 0.0078125}
    data["workload"]["synthetic"]["arrivals"] = {"kind": "constant", "rate": 128.0}
    config = parse_config(data)
    plain = sorted_tables(Simulation(config).run())
    checked = sorted_tables(Simulation(config).run(check_every=1))
    for name, table in plain.items():
        assert table.equals(checked[name]), name


def test_first_tokens_are_seen_when_they_are_there() -> None:
    engine = TIGHT | {"async_scheduling": True}
    data = data_of(engine, fleet_of(2, "dynamo_kv"), 90, 5.0) | {"seed": 2}
    fast, slow = (
        Simulation(parse_config(data), stepwise=way).run() for way in (False, True)
    )
    assert fast.requests.equals(slow.requests)


DRAFTS: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}
}


def drafting(fleet: dict[str, Any] | None) -> dict[str, Any]:
    data = data_of(TIGHT | DRAFTS, fleet)
    data["workload"]["acceptance"] = {"kind": "constant", "rate": 0.7}
    return data


def test_engines_of_a_fleet_verify_drafts() -> None:
    alone = Simulation(parse_config(drafting(None))).run()
    fleet = Simulation(parse_config(drafting(ONE))).run()
    for name, table in tables(fleet).items():
        assert table.drop(columns="engine").equals(tables(alone)[name]), name
    for key, value in alone.summary.items():
        if key not in {"title", "wall_seconds"}:
            assert fleet.summary[key] == value, key
    events = [
        {"time_s": 1.0, "kind": "die", "engine": 0},
        {"time_s": 1.1, "kind": "die", "engine": 1},
        {"time_s": 1.2, "kind": "start", "engine": 1},
    ]
    config = parse_config(drafting(fleet_of(3, "least_requests") | {"events": events}))
    three = Simulation(config).run(check_every=1)
    assert three.summary["completed"] == 60
    assert three.summary["num_retried"] > 0
    accepted = three.requests["num_accepted_tokens"].sum()
    assert accepted >= three.summary["spec_decode_accepted_tokens"] * 0.9 > 0


@pytest.mark.parametrize("cost", ["roofline", "constant"])
@pytest.mark.parametrize("kind", ["least_requests", "llm_d", "vllm_dp"])
@pytest.mark.parametrize("num_blocks", [60, 400])
def test_engines_go_on_behind_steps_that_nobody_sees(
    kind: str, cost: str, num_blocks: int
) -> None:
    engine = GENERATIONS["v1"] | {"num_gpu_blocks_override": num_blocks}
    data = data_of(engine, fleet_of(3, kind), 120, 300.0)
    if cost == "constant":  # steps of engines end, and arrivals come, at one instant
        data["cost"] = {"kind": "constant", "step_s": 0.0078125}
        data["workload"]["synthetic"]["arrivals"] = {"kind": "constant", "rate": 128.0}
    config = parse_config(data)
    simulation = Simulation(config)
    assert all(engine.looks_ahead for engine in simulation.engine.engines)
    fast, slow = simulation.run(), Simulation(config, stepwise=True).run()
    for name, table in tables(fast).items():
        one, other = table, tables(slow)[name]
        if name == "steps":
            one, other = (
                each.sort_values(["engine", "step"], ignore_index=True)
                for each in (one, other)
            )
        assert one.equals(other), name


def test_a_dealt_request_is_made_when_its_engine_draws_it() -> None:
    made: list[Any] = []

    def make(row: int) -> Any:
        made.append(row)
        return row

    first, second = Deal(LateRequests(range(5), make), RoundRobin(2).choose).shares(2)
    assert [next(second), next(second)] == made == [1, 3]
    assert list(first) == [0, 2, 4]
    assert list(second) == []


@pytest.mark.parametrize("generation", ["v1", "v1, scheduling ahead", "gpt-oss"])
def test_engines_that_are_run_apart_are_the_same(
    generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(data_of(GENERATIONS[generation], fleet_of(3, "random"), 90))
    slow = Simulation(config, stepwise=True).run()
    for number in (1, 7, 50):
        monkeypatch.setattr("sim.fleet.apart._REQUESTS_AT_ONCE", number)
        simulation = Simulation(config)
        assert isinstance(simulation.engine, EnginesApart)
        fast = simulation.run(check_every=3)
        for name, table in tables(fast).items():
            order = ["engine", "step"] if name == "steps" else []
            one, other = table, tables(slow)[name]
            if order:
                one, other = (
                    each.sort_values(order, ignore_index=True) for each in (one, other)
                )
            assert one.equals(other), name
        assert fast.summary["duration"] == slow.summary["duration"]


@pytest.mark.parametrize("cost", ["roofline", "constant"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("least_requests", {}),
        ("least_requests", {"async_scheduling": True}),
        ("least_requests", GENERATIONS["sglang"]),
        ("session", {"enable_prefix_caching": True}),
        ("llm_d", {}),
        ("llm_d", {"async_scheduling": True}),
        ("llm_d", GENERATIONS["gpt-oss"]),
        ("dynamo_kv", {"enable_prefix_caching": True}),
        ("dynamo_kv", {"async_scheduling": True, "enable_prefix_caching": True}),
    ],
)
def test_engines_are_run_only_as_far_as_the_router_needs(
    kind: str, engine: dict[str, Any], cost: str
) -> None:
    pool = {} if "max_total_tokens" in engine else TIGHT
    engine = pool | {"async_scheduling": False, "max_model_len": 440} | engine
    data = data_of(engine, fleet_of(3, kind), 90, 200.0)
    if cost == "constant":
        data["cost"] = {"kind": "constant", "step_s": 0.0078125}
        data["workload"]["synthetic"]["arrivals"] = {"kind": "constant", "rate": 128.0}
    config = parse_config(data)
    simulation = Simulation(config)
    kinds = {"llm_d": BetweenScrapes, "dynamo_kv": AtArrivals}
    assert type(simulation.engine) is kinds.get(kind, ByEnds)
    fast = simulation.run(check_every=5)
    slow = Simulation(config, stepwise=True).run()
    assert fast.summary["rejected"] == slow.summary["rejected"]
    for name, table in sorted_tables(fast).items():
        assert table.equals(sorted_tables(slow)[name]), name
    assert fast.summary["duration"] == slow.summary["duration"]


def test_engines_that_are_run_apart_stop_when_they_are_asked() -> None:
    simulation = Simulation(parse_config(data_of(TIGHT, fleet_of(3, "random"), 90)))
    results = simulation.run(lambda _: simulation.stop(), progress_every=20)
    assert results.summary["interrupted"]
    assert 0 < results.summary["completed"] < 90


@pytest.mark.parametrize("kind", ["round_robin", "least_requests", "llm_d"])
def test_each_engine_is_one_of_its_own(kind: str) -> None:
    data = data_of(TIGHT, fleet_of(3, kind), 90, 200.0)
    simulation = Simulation(parse_config(data))
    together = simulation.run(check_every=1)
    assert together.summary["num_preemptions"] > 0
    assert together.requests["request_id"].tolist() == list(range(90))
    del data["fleet"]
    for place in range(3):
        own = tables_of_rank(together.recording, place)
        ids = own.request_table["request_id"].tolist()
        if kind == "round_robin":
            assert ids == list(range(place, 90, 3))
        specs = [
            simulation.specs[i]._replace(request_id=number)
            for number, i in enumerate(ids)
        ]
        alone = Simulation(parse_config(data), specs=specs).run()
        for name in ("arrival_s", "first_token_s", "finish_s", "num_preemptions"):
            assert alone.requests[name].tolist() == own.request_table[name].tolist(), (
                name
            )


@pytest.mark.parametrize("where", ["in memory", "as a frame", "on disk"])
def test_engines_read_their_own_steps(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.results.recording.step_log._MOST_ROWS_HELD", 8)
    monkeypatch.setattr("sim.results.recording.step_log._LEAST_CHUNK_ROWS", 8)
    data = data_of(TIGHT, fleet_of(3, "least_requests"), 40, 200.0)
    simulation = Simulation(parse_config(data))
    if where == "on disk":
        kinds = simulation.recorder.step_kinds
        simulation.recorder.sink = StepsFile(tmp_path / "steps.parquet", kinds)
    recording = simulation.run().recording
    if where == "as a frame":
        assert len(recording.steps) == recording.step_table.num_steps
    columns = ["step", "start_s", "num_running"]
    for place, part in enumerate(recording.of_rank):
        own, whole = (
            np.concatenate([[*each.values()] for each in table.batches(columns)], 1)
            for table in (
                part.step_table,
                tables_of_rank(recording, place).step_table,
            )
        )
        assert len(whole[0]) == part.step_table.num_steps > 16
        assert own.tolist() == whole.tolist()


def test_the_least_loaded_engine_is_chosen_at_each_arrival() -> None:
    results = simulate(parse_config(data_of(TIGHT, fleet_of(4, "least_requests"), 90)))
    requests = results.requests
    arrival_s = requests["arrival_s"].to_numpy()
    finish_s = requests["finish_s"].to_numpy()
    engine = requests["engine"].to_numpy()
    for row in range(90):
        in_flight = np.bincount(
            engine[:row][finish_s[:row] >= arrival_s[row]], minlength=4
        )
        assert in_flight[engine[row]] == in_flight.min()


def test_pools_have_gpus_releases_and_arguments_of_their_own() -> None:
    fleet = {
        "pools": [
            {"name": "new", "replicas": 2, "engine": {"gpu": "h100_sxm"}},
            {
                "name": "old",
                "replicas": 1,
                "engine": {"num_gpu_blocks_override": 50, "engine_version": "0.11"},
            },
        ]
    }
    results = simulate(parse_config(data_of(TIGHT, fleet)))
    new, old = results.summary["pools"]
    assert (new["num_requests"], old["num_requests"]) == (40, 20)
    assert (new["num_gpu_blocks"], old["num_gpu_blocks"]) == (70, 50)
    assert new["gpu"] == "h100_sxm" != old["gpu"]
    engines = results.summary["engines"]
    assert [each["pool"] for each in engines] == ["new", "new", "old"]
    assert sum(each["busy_s"] for each in engines) == pytest.approx(
        spans_s(results.steps).sum()
    )
    assert results.summary["scheduling"].startswith("asynchronous scheduling (")
    assert results.summary["scheduling"].endswith("; synchronous scheduling")
    assert results.summary["imbalance"]["requests"] == 1.0


def test_sessions_stay_on_an_engine() -> None:
    data = data_of(TIGHT, fleet_of(3, "session")) | {"workload": SESSIONS}
    results = Simulation(parse_config(data)).run(check_every=1)
    assert results.summary["completed"] == 36
    engines = results.requests.groupby("session_id")["engine"].nunique()
    assert (engines == 1).all()
    assert results.requests["engine"].nunique() > 1


def test_the_command_writes_engines(tmp_path: Path) -> None:
    config = write(tmp_path, data_of(TIGHT, fleet_of(3, "llm_d")))
    out = tmp_path / "out"
    assert kvsim(["run", str(config), "--out", str(out), "--quiet"]) == 0
    assert (out / "figures/engines.png").exists()
    folder = RunFolder(out)
    steps, requests = folder.steps, folder.request_table
    assert set(steps["engine"]) == set(requests["engine"]) == {0, 1, 2}
    assert len(folder.summary["engines"]) == 3
    with pytest.raises(ResultsError, match="3 engines of a fleet"):
        folder.of_one_engine()
    again = parse_config(folder.config)
    assert simulate(again).requests.equals(folder.request_table.frame())


def test_the_map_of_engines_shows_their_mean_usage() -> None:
    results = simulate(parse_config(data_of(TIGHT, fleet_of(3, "random"))))
    summary = results.summary
    edges_s = np.linspace(0.0, summary["duration"], 41)
    usage = mean_usage(results.recording.step_table, 3, edges_s)
    assert usage.shape == (3, 40)
    told = [each["kv_cache_usage_mean"] for each in summary["engines"]]
    assert usage.mean(axis=1) == pytest.approx(told)
    panels = engines_figure(results).axes
    assert panels[0].get_ylabel() == "engine"
    assert [bar.get_width() for bar in panels[1].patches] == pytest.approx(
        [each["num_requests"] / 20 for each in summary["engines"]]
    )


def _pool(**keys: Any) -> dict[str, Any]:
    return {"pools": [{"name": "main", "replicas": 2} | keys]}


@pytest.mark.parametrize(
    ("fleet", "engine", "line"),
    [
        (_pool(replicas=0), {}, "fleet.pools.0.replicas: .* 1, got 0"),
        ({"pools": []}, {}, "fleet.pools: "),
        (_pool(rol="serve"), {}, "pools.0.rol: unknown key; did you mean 'role'"),
        (_pool(role="prefil"), {}, "role: must be one of serve, prefill, decode"),
        (_pool(role="decode"), {}, "role decode needs one with the role prefill"),
        (_pool() | {"autoscaler": {}}, {}, "autoscaler.0.targets: this key is needed"),
        (_pool(engine={"model": "a"}), {}, "engine.model: a router sends any request"),
        (_pool(engine={"gpus": "a"}), {}, "fleet.pools.0.engine.gpus: unknown key"),
        (_pool(engine={"block_size": 0}), {}, "fleet.pools.0.engine.block_size: "),
        (_pool() | {"router": {}}, {}, "router: needs a kind"),
        (_pool(engine=DRAFTS), {}, "as many drafts a step, got 3 of pool .* and 0"),
        (fleet_of(2, "llmd"), {}, "'llmd' is not built; did you mean 'llm_d'"),
        (fleet_of(2, "llm_d", queue=1), {}, "'llm_d' has no such key"),
        (
            {"pools": [{"name": "a", "replicas": 1}, {"name": "a", "replicas": 1}]},
            {},
            "got 'a' twice",
        ),
    ],
)
def test_refused(fleet: dict[str, Any], engine: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        Simulation(parse_config(data_of(TIGHT | engine, fleet)))
    assert "\n" not in str(refused.value)
