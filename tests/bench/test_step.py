"""One engine step: a batch of decodes, scheduled and sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.generation import sample
from sim.scheduler.v1 import V1Scheduler
from tests.sim.build import request_from_spec, spec

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

NUM_STEPS = 100


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize("num_running", [8, 64, 256])
@pytest.mark.benchmark(group="step: 100 steps of decodes")
def test_decode_steps(
    benchmark: BenchmarkFixture, num_running: int, caching: bool
) -> None:
    def running() -> tuple[tuple[V1Scheduler], dict[str, object]]:
        scheduler = V1Scheduler(
            40_000,
            16,
            max_num_batched_tokens=256 * 1024,
            max_num_seqs=256,
            max_model_len=8192,
            enable_prefix_caching=caching,
        )
        for i in range(num_running):
            request = request_from_spec(spec(i, 0.0, 1000 + i, 2000), 8192)
            scheduler.add_request(request)
        sample(scheduler.schedule(0.0), 0, 1.0)
        return (scheduler,), {}

    def decode(scheduler: V1Scheduler) -> None:
        for step in range(1, NUM_STEPS + 1):
            scheduler.update(sample(scheduler.schedule(0.0), step, 1.0))

    benchmark.pedantic(decode, setup=running, rounds=5, warmup_rounds=1)
