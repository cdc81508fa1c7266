"""A hundred steps of decodes: scheduled, priced, recorded, sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.costs.roofline import RooflineCost
from sim.engine.clock import Clock
from sim.engine.loop import Engine
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.results.recording.recorder import Recorder
from sim.scheduler.v1 import V1Scheduler
from tests.sim.build import request_from_spec, spec

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

FIRST_STEP = 10
NUM_STEPS = 100
COST = RooflineCost(
    model=load_model("meta-llama/Llama-3.1-8B"), gpu=load_gpu("h200_sxm")
)


def make_engine(path: str, num_running: int, *, caching: bool) -> Engine:
    """An engine with requests that have all arrived, and that none ends early."""
    settings: dict[str, Any] = {
        "num_gpu_blocks": 40_000,
        "block_size": 16,
        "max_num_batched_tokens": 1 << 20,
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "enable_prefix_caching": caching,
    }
    env, recorder = Clock(), Recorder()
    scheduler = V1Scheduler(**settings)
    engine = Engine(env, scheduler, COST, recorder, stepwise=path == "stepwise")
    for i in range(num_running):
        engine.submit(request_from_spec(spec(i, 0.0, 1000 + i, 2000), 8192))
    return engine


def end_of_step(num_steps: int, num_running: int) -> float:
    """Return when so many steps have been taken, in seconds."""
    engine = make_engine("stepwise", num_running, caching=False)
    engine.observe(num_steps, lambda it: setattr(it, "stop_requested", True))
    engine.env.run(until=engine.done)
    return float(engine.env.now)


@pytest.mark.parametrize("path", ["stepwise", "fast"])
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize("num_running", [8, 64, 256])
@pytest.mark.benchmark(group="step: 100 steps of decodes")
def test_decode_steps(
    benchmark: BenchmarkFixture, num_running: int, caching: bool, path: str
) -> None:
    begin_s = end_of_step(FIRST_STEP, num_running)
    end_s = end_of_step(FIRST_STEP + NUM_STEPS, num_running)
    engines: list[Engine] = []

    def decoding() -> tuple[tuple[Engine], dict[str, object]]:
        engine = make_engine(path, num_running, caching=caching)
        engine.env.run(until=begin_s)
        engines[:] = [engine]
        return (engine,), {}

    def decode(engine: Engine) -> None:
        engine.env.run(until=end_s)

    benchmark.extra_info["num_steps"] = NUM_STEPS
    benchmark.pedantic(decode, setup=decoding, rounds=20, warmup_rounds=1)
    assert engines[0].scheduler.num_running == num_running
    engines[0].scheduler.check()
