"""A step waits for its scheduler, 15 us a request, unless another step hides it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import RunConfig, parse_config
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from sim.scheduler.generation import SCHEDULE_REQUEST_S
from sim.simulation.assemble import make_cost_model
from sim.simulation.simulate import simulate

if TYPE_CHECKING:
    from sim.costs.base import CostModel

SYNC, V0 = {"engine_version": "0.12"}, {"scheduler": "v0", "max_model_len": 4096}


def run_config(engine: dict[str, Any], cost: dict[str, Any]) -> RunConfig:
    tokens = {"kind": "fixed", "tokens": 8}
    synthetic = {
        "num_requests": 20,
        "arrivals": {"kind": "poisson", "rate": 1e6},
        "prompt_tokens": tokens,
        "output_tokens": tokens,
    }
    return parse_config(
        {
            "workload": {"synthetic": synthetic},
            "engine": {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"} | engine,
            "cost": {"kind": "roofline"} | cost,
        }
    )


def cost_model(engine: dict[str, Any], cost: dict[str, Any]) -> CostModel:
    config = run_config(engine, cost)
    return make_cost_model(
        config, load_model(config.engine.model), load_gpu("h100_sxm")
    )


@pytest.mark.parametrize(
    ("engine", "given_s", "added_s"),
    [
        (SYNC, None, SCHEDULE_REQUEST_S),
        ({"async_scheduling": False}, None, SCHEDULE_REQUEST_S),
        (SYNC, 2e-6, 2e-6),
        ({}, None, 0.0),  # ahead
        (SYNC | {"pipeline_parallel_size": 2}, None, 0.0),  # beside other batches
        (V0, None, 0.0),  # not known
        (V0, 40e-6, 40e-6),
    ],
)
def test_a_step_waits_for_its_scheduler_where_nothing_hides_it(
    engine: dict[str, Any], given_s: float | None, added_s: float
) -> None:
    given = {} if given_s is None else {"schedule_request_s": given_s}
    ours, without = (
        cost_model(engine, cost) for cost in (given, {"schedule_request_s": 0.0})
    )
    for num in (1, 64):
        shape = BatchShape(num, 100 * num, 0, 0, 0, 0)
        more_s = ours.step(shape).host_s - without.step(shape).host_s
        assert more_s == pytest.approx(added_s * num, abs=1e-12)


@pytest.mark.parametrize(
    ("engine", "cost", "source"),
    [
        (SYNC, {}, "timed on one core"),
        (SYNC, {"schedule_request_s": 1e-6}, "given"),
        (V0, {}, "no public figure"),
    ],
)
def test_the_summary_says_how_it_is_known(
    engine: dict[str, Any], cost: dict[str, Any], source: str
) -> None:
    told = simulate(run_config(engine, cost)).summary["cost"]
    assert source in told["parameters"]["schedule_request_s"]["source"]


def test_what_steps_hide_is_told_once() -> None:
    told = simulate(run_config({}, {"schedule_request_s": 9e-6})).summary["cost"]
    assert "schedule_request_s" not in told["parameters"]
    assert told["hidden"]["schedule_request_s"]["value"] == 9e-6


def test_a_negative_one_is_refused() -> None:
    with pytest.raises(Exception, match="schedule_request_s"):
        cost_model(SYNC, {"schedule_request_s": -1e-6})
