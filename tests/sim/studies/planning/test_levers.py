"""Changes that a plan tries: each makes its resource larger, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from sim.simulation.assemble import make_cost_model
from sim.studies.planning.phases.candidates import candidates_of
from sim.studies.planning.phases.sensitivity import levers_of
from sim.studies.planning.spec import parse_plan
from tests.sim.studies.planning.plans import small

MODEL = "meta-llama/Llama-3.1-8B"
PROMPTS = BatchShape(0, 0, 4, 4096, 4096, 4 * 1024 * 1025 // 2)


@pytest.mark.parametrize("gpu", ["h200_sxm", "l40s", "rtx_4090"])
@pytest.mark.parametrize("fitted", [{}, {"link_bytes_per_s": 1e10}])
def test_a_faster_link_shortens_collectives_alone(
    gpu: str, fitted: dict[str, Any]
) -> None:
    plan = small(
        candidates={"gpu": [gpu], "tensor_parallel_size": [2]},
        prices={"per_gpu_hour": {gpu: 1.0}},
        cost={"kind": "roofline", **fitted},
    )
    (candidate,) = candidates_of(parse_plan(plan))
    (lever,) = (
        each for each in levers_of(candidate, {}) if each.resource == "interconnect"
    )
    before, after = (
        make_cost_model(parse_config(run), load_model(MODEL), load_gpu(gpu)).step(
            PROMPTS
        )
        for run in (dict(candidate.run), lever.apply(candidate.run))
    )
    assert 0.9 < after.allreduce_s / before.allreduce_s < 0.97
    assert after.gemm_s == before.gemm_s
    assert after.host_s == before.host_s


def test_one_gpu_has_no_link_to_make_faster() -> None:
    (candidate,) = candidates_of(parse_plan(small(cost={"kind": "roofline"})))
    assert all(each.resource != "interconnect" for each in levers_of(candidate, {}))


def test_whole_prompts_of_sglang_have_another_limit_to_relax() -> None:
    engine = {"scheduler": "sglang", "chunked_prefill_size": -1, "page_size": 16}
    engine |= {"model": MODEL}
    (candidate,) = candidates_of(parse_plan(small(engine=engine)))
    budget = {
        each.change: each.overrides
        for each in levers_of(candidate, {})
        if each.name == "max_prefill_tokens"
    }
    assert budget["x 0.5 (8,192)"] == {"engine.max_prefill_tokens": 8192}
    for each in levers_of(candidate, {}):
        parse_config(each.apply(candidate.run))
