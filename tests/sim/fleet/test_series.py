"""Fleets over time: replicas, what they have, what they cost; and how it is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.config.tables import load_config, parse_config
from sim.errors import ConfigError
from sim.results.fleet.series import absences, state_spans, times_of
from sim.results.fleet.summary import fleet_rows
from sim.results.folder import RunFolder
from sim.results.tables.steps import spans_s
from sim.simulation.run import Simulation
from sim.views.plots.accessor import figures_of
from sim.views.plots.run.fleets import engines_figure, replicas_figure
from tests.shared import ROOT
from tests.sim.fleet.test_autoscaler import simulation_of as scaled
from tests.sim.fleet.test_events import EVENTS, event
from tests.sim.fleet.test_events import simulation_of as eventful
from tests.sim.fleet.test_run import GENERATIONS, TIGHT, data_of, fleet_of

if TYPE_CHECKING:
    from pathlib import Path

    from sim.results.run import Results


def table_of(results: Results) -> Any:
    table = results.recording.fleet_table
    assert table is not None
    return table.frame()


@given(st.floats(0.0, 1e7))
def test_times_are_round_and_not_too_many(duration_s: float) -> None:
    times_s = times_of(duration_s)
    assert 1 <= len(times_s) <= 1000
    assert times_s[0] == 0.0
    assert times_s[-1] < duration_s or len(times_s) == 1
    if duration_s > 0.01:
        assert len(times_s) >= 400  # 1, 2, 5, 10
        step_s = float(f"{times_s[1]:.6g}")
        assert times_s == pytest.approx(np.arange(len(times_s)) * step_s)
        assert step_s / 10 ** np.floor(np.log10(step_s) + 1e-9) == pytest.approx(
            round(step_s / 10 ** np.floor(np.log10(step_s) + 1e-9))
        )


def test_times_of_a_run_of_whatever_length() -> None:
    """A class of a user's may price steps as it likes."""
    for exponent in (12, 15, 16, 297, 307):
        times_s = times_of(10.0**exponent)
        assert 400 <= len(times_s) <= 1000
        assert np.isfinite(times_s).all()


def test_states_follow_each_other_and_absences_join() -> None:
    changes = [(1.0, 1, "off"), (2.0, 1, "starting"), (5.0, 1, "ready"), (7.0, 0, "dy")]
    spans = state_spans(changes, 2, 10.0)
    assert spans == [
        [(0.0, 7.0, "ready"), (7.0, 10.0, "dy")],
        [
            (0.0, 1.0, "ready"),
            (1.0, 2.0, "off"),
            (2.0, 5.0, "starting"),
            (5.0, 10.0, "ready"),
        ],
    ]
    assert absences(spans) == [[], [[1.0, 5.0]]]


@pytest.mark.parametrize("generation", ["v1", "v1, scheduling ahead", "v0"])
def test_requests_in_the_table_are_those_of_the_steps(generation: str) -> None:
    fleet = {
        "pools": [{"name": "new", "replicas": 2}, {"name": "old", "replicas": 1}],
        "router": {"kind": "least_requests"},
    }
    results = Simulation(
        parse_config(data_of(GENERATIONS[generation], fleet, 90, 200.0))
    ).run()
    table, steps = table_of(results), results.steps
    assert table["num_waiting"].max() > 0
    end_s = steps["start_s"] + spans_s(steps)
    for time_s in table["time_s"].unique()[::25]:
        on = steps[(steps["start_s"] <= time_s) & (time_s < end_s)]
        on = on.sort_values("step").groupby("engine").tail(1)
        for pool, engines in (("new", (0, 1)), ("old", (2,))):
            own = on[on["engine"].isin(engines)]
            (row,) = table[(table["time_s"] == time_s) & (table["pool"] == pool)].iloc
            assert row["num_running"] == own["num_running"].sum()
            assert row["num_waiting"] == own["num_waiting"].sum()
            assert row["num_ready"] == len(engines)
            assert row["num_starting"] == row["num_draining"] == row["num_held"] == 0


@pytest.mark.parametrize(
    ("engine", "lengths", "left"),
    [
        ({"num_gpu_blocks_override": 20}, (100, 500), {"waiting"}),
        (
            {"max_model_len": 300, "max_num_batched_tokens": 24},
            (400, 400),
            {"running", "waiting"},
        ),
    ],
)
def test_what_is_left_at_stuck_replicas_is_in_the_table(
    engine: dict[str, Any], lengths: tuple[int, int], left: set[str]
) -> None:
    """Between steps, and so for good, an engine had neither kind of request."""
    limits = {"admission_check": False, "async_scheduling": False} | engine
    data = data_of(GENERATIONS["v1"] | limits, None, 20, 60.0)
    low, high = lengths
    prompts = {"kind": "uniform", "low": low, "high": high}
    data["workload"]["synthetic"]["prompt_tokens"] = prompts
    autoscaler = {"targets": {"requests_in_flight": 4}, "max_replicas": 3}
    data["fleet"] = fleet_of(1, "round_robin") | {"autoscaler": autoscaler}
    results = Simulation(parse_config(data)).run()
    assert results.summary["stalled"]
    requests, last = results.requests, table_of(results).iloc[-1]
    unfinished = requests[requests["finish_s"].isna()]
    assert set(unfinished["status"]) == left
    for status in ("running", "waiting"):
        assert last[f"num_{status}"] == (unfinished["status"] == status).sum()
    assert last["num_held"] == 0


def test_replicas_in_the_table_are_those_that_held_gpus() -> None:
    for simulation in (scaled(), eventful(EVENTS)):
        results = simulation.run()
        table, summary = table_of(results), results.summary
        there = table[["num_ready", "num_starting", "num_draining"]].sum(axis=1)
        step_s = table["time_s"].iloc[1]
        held_s = float(there.sum()) * step_s
        # One that comes or goes does so between two rows.
        assert held_s == pytest.approx(sum(summary["up_s"]), abs=20 * step_s)
        assert summary["gpu_hours"] == pytest.approx(sum(summary["up_s"]) / 3600)
        assert summary["pools"][0]["gpu_hours"] == summary["gpu_hours"]


def test_requests_before_a_dead_fleet_are_held() -> None:
    events = [event(0.5, "die", each) for each in range(3)] + [event(1.0, "start", 2)]
    table = table_of(eventful(events).run())
    during = table[table["time_s"].between(0.6, 0.99)]["num_held"]
    assert (during.diff().dropna() >= 0).all()
    assert during.iloc[-1] > 10
    assert (table[table["time_s"] >= 1.0]["num_held"] == 0).all()
    assert (table[table["time_s"].between(0.6, 0.99)]["num_ready"] == 0).all()


def test_prompts_that_are_read_are_in_the_table() -> None:
    fleet = {
        "pools": [
            {"name": "prefill", "replicas": 1, "role": "prefill"},
            {"name": "decode", "replicas": 1, "role": "decode"},
        ],
        "links": {"bytes_per_s": 2e7},
    }
    results = Simulation(parse_config(data_of(TIGHT, fleet, 60, 60.0))).run()
    table = table_of(results)
    moving = table.groupby("pool")["num_transfers"].mean()
    assert moving["prefill"] == 0
    assert moving["decode"] == pytest.approx(
        results.summary["transfers"]["num_in_flight_mean"], rel=0.05
    )
    assert table[table["pool"] == "prefill"]["num_running"].max() > 0


def test_gpus_cost_what_they_are_held() -> None:
    fleet = fleet_of(2, "random") | {
        "prices": {"per_gpu_hour": {"h100_sxm": 3.0, "a100_sxm": 2.0}}
    }
    fleet["pools"].append({"name": "old", "replicas": 1, "engine": {"gpu": "a100_sxm"}})
    data = data_of(TIGHT | {"gpu": "h100_sxm"}, fleet)
    summary = Simulation(parse_config(data)).run().summary
    hours = summary["duration"] / 3600
    assert summary["gpu_hours"] == pytest.approx(3 * hours)
    assert [each["cost"] for each in summary["pools"]] == pytest.approx(
        [2 * 3.0 * hours, 2.0 * hours]
    )
    assert summary["cost_of_gpus"] == pytest.approx(8.0 * hours)
    told = dict(fleet_rows(summary))["GPU hours"]
    assert told == f"{3 * hours:.4g} h, {8 * hours:,.2f} USD"
    del fleet["prices"]["per_gpu_hour"]["a100_sxm"]
    with pytest.raises(ConfigError, match="no price for the GPU of pool old; add one"):
        parse_config(data)


def test_prices_may_be_a_file() -> None:
    given = ["fleet.prices=examples/prices.yaml"]
    config = load_config(ROOT / "examples/fleet_death.yaml", given)
    assert config.fleet is not None
    assert config.fleet.prices is not None
    assert config.fleet.prices.per_gpu_hour["h100_sxm"] == 3.0
    with pytest.raises(ConfigError, match=r"no file 'nowhere\.yaml'"):
        load_config(ROOT / "examples/fleet_death.yaml", ["fleet.prices=nowhere.yaml"])


def test_the_table_is_written_and_read(tmp_path: Path) -> None:
    results = scaled().run()
    results.write(tmp_path)
    found = RunFolder(tmp_path).fleet_table
    assert found is not None
    assert found.frame().equals(table_of(results))


def test_engines_that_are_not_there_are_hatched_and_replicas_drawn() -> None:
    results = eventful(EVENTS).run()
    absent = [each.get("absent_s", []) for each in results.summary["engines"]]
    assert [len(each) for each in absent] == [1, 1, 0]
    assert absent[1][0][1] == 1.2
    panel = engines_figure(results).axes[0]
    hatched = [bars for bars in panel.collections if bars.get_hatch()]
    assert sum(len(bars.get_paths()) for bars in hatched) == 2
    assert "replicas" in figures_of(results)[0]
    traffic, replicas, requests = replicas_figure(results).axes
    arrived = traffic.patches[0].get_data()
    assert (arrived.values * np.diff(arrived.edges)).sum() == pytest.approx(120)
    ready = replicas.patches[0].get_data().values
    assert (ready.max(), ready.min()) == (3, 1)
    assert requests.get_legend() is not None
    plain = Simulation(parse_config(data_of(TIGHT, fleet_of(3, "random")))).run()
    assert "replicas" not in figures_of(plain)[0]
    pools = [
        {"name": role, "replicas": 1, "role": role} for role in ("prefill", "decode")
    ]
    apart = fleet_of(1, "random") | {"pools": pools, "links": {"bytes_per_s": 1e10}}
    pair = Simulation(parse_config(data_of(TIGHT, apart))).run()
    assert "pools" in figures_of(pair)[0]
    assert "replicas" not in figures_of(pair)[0]
