"""Single operations: blocks, keys, prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cache.block_pool import BlockPool
from cache.tokens import SegmentTokens
from sim.cost import BatchShape
from sim.costs.roofline import RooflineCost
from sim.hardware import load_gpu
from sim.model import load_model

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

NUM_BLOCKS = 1000


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.benchmark(group="micro: 1,000 blocks taken and freed")
def test_take_and_free(benchmark: BenchmarkFixture, caching: bool) -> None:
    pool = BlockPool(4001, enable_caching=caching)

    def cycle() -> None:
        pool.free_blocks(pool.get_new_blocks(NUM_BLOCKS))

    benchmark(cycle)
    pool.check()


@pytest.mark.benchmark(group="micro: 1,000 block keys")
def test_hash_blocks(benchmark: BenchmarkFixture) -> None:
    prompt = tuple((2 * i, 512) for i in range(32))

    def hash_all() -> list[int]:
        hashes: list[int] = []
        SegmentTokens(prompt, 1).extend_block_hashes(hashes, NUM_BLOCKS, 16)
        return hashes

    assert len(benchmark(hash_all)) == NUM_BLOCKS


@pytest.mark.benchmark(group="micro: price of a step")
def test_roofline_step(benchmark: BenchmarkFixture) -> None:
    model = RooflineCost(
        model=load_model("meta-llama/Llama-3.1-8B"), gpu=load_gpu("h200_sxm")
    )
    shape = BatchShape(120, 150_000, 2, 3000, 4000, 5_000_000)
    assert benchmark(model.step, shape).total_s > 0
