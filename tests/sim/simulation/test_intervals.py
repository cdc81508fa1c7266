"""Intervals of latencies: the same run with every step at its bounds."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.costs.base import BOUNDS
from sim.costs.measured import MeasuredCost
from sim.costs.measured.profile import read_profile
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.at_bound import AtBound
from sim.simulation.intervals import (
    INTERRUPTED,
    NO_BOUNDS,
    NOT_ASKED,
    NUMBERS,
    OFF,
    intervals,
)
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate, with_intervals
from tests.identity.compare import compare
from tests.sim.config.test_config import minimal
from tests.sim.config.test_config import write as write_config
from tests.sim.costs.test_costs import LLAMA_8B
from tests.sim.costs.test_measured import entry
from tests.sim.costs.test_measured import write as write_profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.config.tables import RunConfig
    from sim.costs.base import Bound, CostModel
    from sim.simulation.pools import Pool
    from sim.simulation.progress import Progress

CONSTANT = """
from sim.costs.base import StepCost

class Mine:
    def __init__(self, lo: float = 0.5, hi: float = 3.0):
        self.lo, self.hi = lo, hi
    def step(self, shape):
        return StepCost(0.25, lo_s=0.25 * self.lo, hi_s=0.25 * self.hi)
    def describe(self):
        return {}
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_profile(tmp_path_factory.mktemp("p") / "p.json", entry(LLAMA_8B))


def measured(profile: str, **engine: Any) -> RunConfig:
    """A run with preemptions, and prompts in chunks."""
    small = {
        "num_gpu_blocks_override": 45,
        "max_model_len": 200,
        "max_num_batched_tokens": 64,
    }
    data = minimal(**small | engine)
    data["workload"]["synthetic"] |= {
        "num_requests": 40,
        "arrivals": {"kind": "poisson", "rate": 60.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 100},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    data["cost"] = {"kind": "measured", "profile": profile}
    return parse_config(data)


def of_mine(tmp_path: Path, text: str = CONSTANT, **keys: Any) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(text)
    data = minimal()
    data["workload"]["synthetic"]["arrivals"] = {"kind": "constant", "rate": 0.01}
    data["cost"] = {"kind": f"{tmp_path / 'mine.py'}:Mine"}
    return data | keys


def test_alone_on_the_engine_latencies_are_steps(tmp_path: Path) -> None:
    summary = simulate(parse_config(of_mine(tmp_path))).summary
    assert summary["cost_intervals_reason"] is None
    for name, steps in (("ttft", 1), ("tpot", 1), ("e2el", 3)):
        for statistic in ("mean", "median", "p50", "p90", "p95", "p99"):
            key = f"{statistic}_{name}_ms"
            assert summary[key] == pytest.approx(250 * steps)
            assert summary[f"{key}_interval"] == pytest.approx(
                [125 * steps, 750 * steps]
            )
    assert summary["extrapolated_share"] == 0
    assert summary["profile"] is None


def test_bounds_are_recorded_and_default_to_the_latency(tmp_path: Path) -> None:
    steps = simulate(parse_config(of_mine(tmp_path))).steps
    assert (steps["latency_lo_s"] == 0.125).all()
    assert (steps["latency_hi_s"] == 0.75).all()
    plain = CONSTANT.replace(", lo_s=0.25 * self.lo, hi_s=0.25 * self.hi", "")
    results = simulate(parse_config(of_mine(tmp_path, plain)))
    assert (results.steps["latency_lo_s"] == 0.25).all()
    assert (results.steps["latency_hi_s"] == 0.25).all()
    assert results.summary["cost_intervals_reason"] == NO_BOUNDS


def test_every_key_is_there_and_null_where_there_are_none(tmp_path: Path) -> None:
    for config, reason in (
        (minimal(), NO_BOUNDS),
        (of_mine(tmp_path, cost_intervals=False), OFF),
    ):
        summary = simulate(parse_config(config)).summary
        assert summary["cost_intervals_reason"] == reason
        assert {summary[f"{name}_interval"] for name in NUMBERS} == {None}
    alone = Simulation(parse_config(of_mine(tmp_path))).run().summary
    assert alone["cost_intervals_reason"] == NOT_ASKED
    assert list(alone) == list(summary)


def test_queues_and_preemptions_move_as_well(profile: str) -> None:
    config = measured(profile)
    results = simulate(config)
    summary = results.summary
    assert summary["num_preemptions"] > 0
    assert summary["profile"] == read_profile(Path(profile)).id
    assert 0 < summary["extrapolated_share"] < 1
    steps = results.steps
    assert (steps["latency_lo_s"] < steps["latency_s"]).all()
    assert (steps["latency_s"] < steps["latency_hi_s"]).all()
    assert set(steps["extrapolated"]) == {0, 1}
    for name in NUMBERS:
        lo, hi = summary[f"{name}_interval"]
        assert lo <= summary[name] <= hi
        assert lo < hi
    # Waiting multiplies: a step's widest bound is 19 % here, the mean TTFT moves more.
    widest = (steps["latency_hi_s"] / steps["latency_s"]).max()
    assert summary["mean_ttft_ms_interval"][1] > widest * summary["mean_ttft_ms"]


@pytest.mark.parametrize("scheduler", ["v1", "v0", "cacheflow"])
def test_the_runs_at_the_bounds_are_whole_runs(profile: str, scheduler: str) -> None:
    """`with_intervals` reports the figures of full runs with `AtBound`."""
    config = measured(profile, scheduler=scheduler)
    if scheduler != "v1":
        config = measured(
            profile, scheduler=scheduler, max_num_batched_tokens=256, max_num_seqs=16
        )
    summary = simulate(config).summary
    numbers = [summary, *(_full(config, bound) for bound in BOUNDS)]
    for name in NUMBERS:
        values = [each[name] for each in numbers]
        assert summary[f"{name}_interval"] == [min(values), max(values)]


def _full(config: RunConfig, bound: Bound) -> Mapping[str, Any]:
    class Whole(Simulation):
        def _make_cost_model(self, pool: Pool) -> CostModel:
            return AtBound(super()._make_cost_model(pool), bound)

    return Whole(config, stepwise=True).run().summary


def test_both_paths_record_the_same_bounds(profile: str) -> None:
    compared = compare(measured(profile))
    assert compared.chosen.path == "fast"
    assert not compared.differences
    steps = compared.chosen.tables["steps"]
    assert {"latency_lo_s", "latency_hi_s", "extrapolated"} <= set(steps)
    on_both = [
        with_intervals(simulation, simulation.run()).summary
        for stepwise in (False, True)
        for simulation in [Simulation(measured(profile), stepwise=stepwise)]
    ]
    assert [s["path"] for s in on_both] == ["fast", "stepwise"]
    for name in NUMBERS:
        assert on_both[0][f"{name}_interval"] == on_both[1][f"{name}_interval"]


def test_an_interval_spans_the_central_run() -> None:
    at_bounds = [dict.fromkeys(NUMBERS, 3.0), dict.fromkeys(NUMBERS, 4.0)]
    found = intervals(dict.fromkeys(NUMBERS, 2.0), at_bounds)
    assert found["mean_ttft_ms_interval"] == [2.0, 4.0]
    # Nothing was measured: a single token has no TPOT.
    found = intervals(dict.fromkeys(NUMBERS), at_bounds)
    assert found["mean_ttft_ms_interval"] is None


def test_progress_counts_both_runs_as_one(profile: str) -> None:
    simulation = Simulation(measured(profile))
    told: list[Progress] = []
    results = simulation.run()
    with_intervals(simulation, results, told.append, progress_every=5)
    assert {each.num_requests for each in told} == {80}
    assert [each.bound for each in told] == sorted(
        (each.bound for each in told), reverse=False, key=lambda b: b != "lo"
    )
    done = [each.num_done for each in told]
    assert done == sorted(done)
    assert 70 < done[-1] <= 80


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C as the second run at a bound begins."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    original, calls = Simulation.run_requests, iter(range(1, 100))

    def wrapped(run: Simulation) -> Any:
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return original(run)

    monkeypatch.setattr(Simulation, "run_requests", wrapped)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_at_a_bound_keeps_the_run(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, measured(profile).model_dump(exclude_unset=True))
    out = tmp_path / "out"
    assert kvsim(["run", str(path), "--out", str(out), "--no-figures"]) == 130
    summary = json.loads((out / "summary.json").read_text())
    assert summary["cost_intervals_reason"] == INTERRUPTED
    assert summary["completed"] == 40
    assert summary["interrupted"] is False
    assert summary["mean_ttft_ms_interval"] is None
    assert "interrupted; what was finished is in" in capsys.readouterr().err


def test_the_terminal_and_the_files_say_it(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, measured(profile).model_dump(exclude_unset=True))
    out = tmp_path / "out"
    arguments = ["run", str(path), "--out", str(out), "--no-figures", "--overwrite"]
    assert kvsim(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    summary = json.loads((out / "summary.json").read_text())
    lo, hi = summary["mean_ttft_ms_interval"]
    assert f"kernel bounds TTFT mean {lo:,.1f} to {hi:,.1f} ms, TPOT mean" in printed
    assert f"{summary['extrapolated_share']:.2%} of busy time extrapolated" in printed
    seconds = json.loads((out / "run.json").read_text())["wall_seconds"]
    assert list(seconds) == ["loop", "intervals", "command"]
    assert 0 < seconds["intervals"] < seconds["command"]
    assert kvsim([*arguments, "--set", "cost_intervals=false"]) == 0
    printed = capsys.readouterr().out
    assert "TTFT mean" not in printed
    assert "of busy time extrapolated" in printed
    summary = json.loads((out / "summary.json").read_text())
    assert summary["cost_intervals_reason"] == OFF


def test_a_bound_without_length_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONSTANT.replace("* self.lo", "* (-1 if shape.num_decodes else 1)")
    path = write_config(tmp_path, of_mine(tmp_path, text))
    out = tmp_path / "out"
    assert kvsim(["run", str(path), "--out", str(out), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "lo_s and hi_s must lie around 0.25 and above 0, got -" in error
    assert not out.exists()


def test_unkept_steps_change_no_row_of_a_request(profile: str) -> None:
    kept = Simulation(measured(profile))
    kept.run()
    unkept = kept.at_bound("lo")
    assert isinstance(kept.cost_model, HostAhead)
    assert isinstance(kept.cost_model.model, MeasuredCost)
    assert unkept.run_requests().num_rows == 40
    assert unkept.recorder.sink.close().num_steps == 0
    assert not unkept.recorder.steps.packed
    assert np.isfinite(unkept.env.now)
