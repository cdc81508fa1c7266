"""The reference loop is right: it decides as the product does, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.config.tables import load_config
from sim.simulation.run import Simulation
from tests.bench.loops import AZURE, ONE_STEP, X3, plain_engine
from tests.shared import ROOT, shared

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = (
    "{model: meta-llama/Llama-3.1-8B, gpu: h200_sxm, enable_prefix_caching: false, "
    "async_scheduling: false}"
)
SYNTHETIC = f"""\
workload:
  synthetic:
    num_requests: 300
    arrivals: {{kind: gamma, rate: 40.0, burstiness: 0.25}}
    prompt_tokens: {{kind: lognormal, median: 600, sigma: 1.0, max: 4000}}
    output_tokens: {{kind: lognormal, median: 100, sigma: 1.0, max: 1000}}
engine: {ENGINE}
seed: 7
"""
AMPLE = "engine.num_gpu_blocks_override=20000"
TIGHT = "engine.num_gpu_blocks_override=1200"


def require_same(simulation: Simulation, *, least_preemptions: int) -> None:
    """Run both, and compare times to the last bit."""
    plain = plain_engine(simulation)
    plain.env.run(until=plain.done)
    table = simulation.run().requests
    requests = plain.requests
    assert (table["status"] != "finished_rejected").all()
    assert table["request_id"].tolist() == list(range(len(requests)))
    assert table["first_token_s"].tolist() == [r.first_token_s for r in requests]
    assert table["finish_s"].tolist() == [r.finish_s for r in requests]
    assert table["num_preemptions"].tolist() == [r.num_preemptions for r in requests]
    assert simulation.engine.num_steps == len(plain.rows)
    assert table["num_preemptions"].sum() >= least_preemptions
    assert len(plain.pool.free_block_ids) == plain.num_gpu_blocks - 1
    assert not any(plain.pool.num_references)


@pytest.mark.parametrize("stepwise", [False, True], ids=["fast", "stepwise"])
@pytest.mark.parametrize(("blocks", "least"), [(AMPLE, 0), (TIGHT, 50)])
def test_synthetic(tmp_path: Path, blocks: str, least: int, *, stepwise: bool) -> None:
    path = tmp_path / "synthetic.yaml"
    path.write_text(SYNTHETIC)
    simulation = Simulation(load_config(path, [blocks]), stepwise=stepwise)
    require_same(simulation, least_preemptions=least)


@pytest.mark.parametrize("stepwise", [False, True], ids=["fast", "stepwise"])
@pytest.mark.parametrize(("blocks", "least"), [(AMPLE, 0), (TIGHT, 50)])
def test_azure(blocks: str, least: int, *, stepwise: bool) -> None:
    config = load_config(
        ROOT / "examples" / "azure_conv.yaml",
        [
            f"workload.trace.path={shared(AZURE)}",
            "workload.trace.limit=400",
            ONE_STEP,
            X3,
            "engine.gpu=a100_sxm",
            "engine.max_num_seqs=64",
            blocks,
        ],
    )
    simulation = Simulation(config, stepwise=stepwise)
    require_same(simulation, least_preemptions=least)
