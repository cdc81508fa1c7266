"""Runs of a real vLLM 0.15.1 on H100s, one of a mixture of experts, three on ranks.

Published are the engine's arguments, the KV blocks and how the traffic was made, so
that traffic of the same kind can be drawn. Latencies are those of a client over HTTP;
what lies between is taken from one of the runs, of Llama-2-7B, and judged on the
others. Nothing else is fitted to any.
"""

from __future__ import annotations

import pytest

from sim.simulation.simulate import simulate
from tests.truth.runs import STAGE_RUNS, StageRun

pytestmark = pytest.mark.slow

MOST_PCT = {"ttft": 9.0, "tpot": 3.0, "e2el": 3.0}


@pytest.mark.parametrize("graphs", [None, "release"])
@pytest.mark.parametrize("run", STAGE_RUNS, ids=lambda run: run.name)
def test_scheduling_ahead(run: StageRun, graphs: str | None, tmp_path) -> None:
    more = {"cudagraph_capture_sizes": graphs}
    config = run.config(
        tmp_path, {"kind": "roofline"}, async_scheduling=True, more=more
    )
    for name, errors in run.errors(simulate(config)).items():
        assert max(map(abs, errors)) <= MOST_PCT[name], (name, errors)


@pytest.mark.parametrize("run", STAGE_RUNS, ids=lambda run: run.name)
def test_efficiencies_of_all_gpus_are_too_slow_for_this_one(
    run: StageRun, tmp_path
) -> None:
    own, common = (
        simulate(
            run.config(
                tmp_path,
                {"kind": "roofline", "efficiencies": efficiencies},
                async_scheduling=True,
            )
        )
        for efficiencies in ("chip", "common")
    )
    for of_chip, of_all in zip(
        run.errors(own)["tpot"], run.errors(common)["tpot"], strict=True
    ):
        assert of_chip < of_all <= 10.0


@pytest.mark.parametrize("run", STAGE_RUNS, ids=lambda run: run.name)
def test_one_step_at_a_time_the_host_is_added(run: StageRun, tmp_path) -> None:
    config = run.config(tmp_path, {"kind": "roofline"}, async_scheduling=False)
    for error in run.errors(simulate(config))["tpot"]:
        assert 5.0 < error <= 35.0
