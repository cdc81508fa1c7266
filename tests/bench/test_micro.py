"""Single operations: blocks, keys, prices, rows."""

from __future__ import annotations

from itertools import cycle
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cache.cacheflow.manager import BlockSpaceManager
from cache.tokens import SegmentTokens, TokenRuns
from cache.v0.manager import SelfAttnBlockSpaceManager
from cache.v1.block_pool import BlockPool
from cache.v1.id_tables import IdTables
from cache.v1.runs.tables import RunTables
from sim.costs import MeasuredCost, RooflineCost
from sim.costs.pricing import batch_total_of, decode_ends_of
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.results.recording.recorder import Recorder
from sim.results.recording.step_rows import pack_facts, pack_stretch
from sim.scheduler.batch import BatchShape
from sim.scheduler.groups.sequence import Sequence, SequenceGroup
from tests.identity.measured_profile import measured_profile
from tests.oracles.v1_manager import KVCacheManager
from tests.sim.build import request_from_spec, spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_benchmark.fixture import BenchmarkFixture

    from sim.scheduler.request import Request

NUM_BLOCKS = 1000
POOL_BLOCKS = 4001
BLOCK_SIZE = 16
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE

# -- blocks ------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.benchmark(group="micro: 1,000 blocks taken from the pool and freed")
def test_take_and_free(benchmark: BenchmarkFixture, caching: bool) -> None:
    pool = BlockPool(POOL_BLOCKS, enable_caching=caching)

    def take_and_free() -> None:
        pool.free_blocks(pool.get_new_blocks(NUM_BLOCKS))

    benchmark(take_and_free)
    pool.check()


def prompts(num_prompts: int) -> list[Request]:
    """Requests of 1,000 blocks, no two alike, their keys and runs known."""
    requests = [
        request_from_spec(spec(i, 0.0, NUM_TOKENS, 1), 2 * NUM_TOKENS)
        for i in range(num_prompts)
    ]
    for request in requests:
        request.tokens.extend_block_hashes(request.block_hashes, NUM_BLOCKS, BLOCK_SIZE)
    return requests


def in_kv_cache_manager(caching: bool, num_prompts: int) -> Callable[[], int]:
    """V1 as the stepwise path has it."""
    manager = KVCacheManager(
        POOL_BLOCKS, BLOCK_SIZE, enable_caching=caching, unhashed_first=True
    )
    requests = cycle(prompts(num_prompts))

    def begin_and_end() -> int:
        request = next(requests)
        hits = manager.get_computed_blocks(request)
        num_new_tokens = NUM_TOKENS - len(hits) * BLOCK_SIZE
        assert manager.allocate_slots(request, num_new_tokens, hits)
        return manager.free(request)

    return begin_and_end


def in_fast_tables(tables: IdTables | RunTables, num_prompts: int) -> Callable[[], int]:
    """V1 as the fast path has it."""
    requests = cycle(prompts(num_prompts))

    def begin_and_end() -> int:
        request = next(requests)
        tables.begin(request, NUM_TOKENS, tables.find(request, NUM_TOKENS))
        return tables.free(request)

    return begin_and_end


def in_groups(
    manager: SelfAttnBlockSpaceManager | BlockSpaceManager,
) -> Callable[[], int]:
    """The generations before V1."""
    tokens = TokenRuns.from_segments([(0, NUM_TOKENS)])
    sequence = Sequence(0, tokens, BLOCK_SIZE)
    group = SequenceGroup("0", [sequence], 0.0)

    def begin_and_end() -> int:
        manager.allocate(group)
        manager.free(sequence)
        return NUM_BLOCKS

    return begin_and_end


def id_tables(num_prompts: int, *, unhashed_first: bool = True) -> Callable[[], int]:
    tables = IdTables(POOL_BLOCKS, BLOCK_SIZE, unhashed_first=unhashed_first)
    return in_fast_tables(tables, num_prompts)


def run_tables(num_prompts: int) -> Callable[[], int]:
    tables = RunTables(POOL_BLOCKS, BLOCK_SIZE, unhashed_first=True)
    return in_fast_tables(tables, num_prompts)


# More prompts than the pool holds, or one that is found each time.
MANAGERS: dict[str, Callable[[], Callable[[], int]]] = {
    "v1": lambda: in_kv_cache_manager(False, 16),
    "v1, caching": lambda: in_kv_cache_manager(True, 16),
    "v1, caching, found": lambda: in_kv_cache_manager(True, 1),
    "v1 ids, stack": lambda: id_tables(16),
    "v1 ids, queue": lambda: id_tables(16, unhashed_first=False),
    "v1 runs, caching": lambda: run_tables(16),
    "v1 runs, caching, found": lambda: run_tables(1),
    "v0": lambda: in_groups(SelfAttnBlockSpaceManager(BLOCK_SIZE, POOL_BLOCKS, 0)),
    "cacheflow": lambda: in_groups(BlockSpaceManager(BLOCK_SIZE, POOL_BLOCKS, 0)),
}


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.benchmark(group="micro: a table of 1,000 blocks begun and given up")
def test_begin_and_end(benchmark: BenchmarkFixture, manager: str) -> None:
    assert benchmark(MANAGERS[manager]()) == NUM_BLOCKS


@pytest.mark.benchmark(group="micro: 1,000 block keys")
def test_of_32_segments(benchmark: BenchmarkFixture) -> None:
    prompt = tuple((2 * i, 512) for i in range(32))

    def hash_all() -> list[int]:
        hashes: list[int] = []
        SegmentTokens(prompt, 1).extend_block_hashes(hashes, NUM_BLOCKS, BLOCK_SIZE)
        return hashes

    assert len(benchmark(hash_all)) == NUM_BLOCKS


# -- prices ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roofline() -> RooflineCost:
    return RooflineCost(
        model=load_model("meta-llama/Llama-3.1-8B"), gpu=load_gpu("h200_sxm")
    )


DECODES = BatchShape(120, 150_000, 0, 0, 0, 0)
MIXED = BatchShape(120, 150_000, 2, 3000, 4000, 5_000_000)


@pytest.mark.parametrize(
    "shape", [DECODES, MIXED], ids=["decodes by step", "decodes and prefills by step"]
)
@pytest.mark.benchmark(group="micro: price of a step")
def test_roofline_step(
    benchmark: BenchmarkFixture, roofline: RooflineCost, shape: BatchShape
) -> None:
    assert benchmark(roofline.step, shape).total_s > 0


PAST = BatchShape(0, 0, 1, 512, 4608, 2_228_480)
BOTH = PAST._replace(num_decodes=48, num_decode_context_tokens=98_304)
MEASURED_SHAPES = {
    "decodes": DECODES,
    "decodes and prefills": MIXED,
    "a chunk with a past": PAST,
    "that beside decodes": BOTH,
    "swaps": DECODES._replace(num_swapped_in_blocks=7, num_swapped_out_blocks=5),
    "copies": DECODES._replace(num_copied_blocks=3),
}
by_measured_shape = pytest.mark.parametrize("name", MEASURED_SHAPES)


@pytest.fixture(scope="module")
def measured() -> MeasuredCost:
    """One with every optional table."""
    name = "meta-llama/Llama-3.1-8B"
    return MeasuredCost(
        measured_profile(name), model=load_model(name), gpu=load_gpu("h200_sxm")
    )


@by_measured_shape
@pytest.mark.benchmark(group="micro: measured price of a step")
def test_measured_step(
    benchmark: BenchmarkFixture, measured: MeasuredCost, name: str
) -> None:
    assert benchmark(measured.step, MEASURED_SHAPES[name]).total_s > 0


@by_measured_shape
@pytest.mark.benchmark(group="micro: measured price on the fast path")
def test_measured_batch_total(
    benchmark: BenchmarkFixture, measured: MeasuredCost, name: str
) -> None:
    shape = BatchShape(*MEASURED_SHAPES[name][:6])
    total = batch_total_of(measured)
    assert benchmark(total, *shape[:6]) == measured.step(shape).total_s


@pytest.mark.benchmark(group="micro: ends of 100 steps")
def test_ends_of_decodes(benchmark: BenchmarkFixture, roofline: RooflineCost) -> None:
    ends = decode_ends_of(roofline)(DECODES.num_decodes)
    context = DECODES.num_decode_context_tokens
    ends_s = benchmark(ends, context, 100, 0.0, inf)
    assert ends_s[0] == roofline.step(DECODES).total_s


@pytest.mark.benchmark(group="micro: price of 8,192 steps")
def test_by_columns(benchmark: BenchmarkFixture, roofline: RooflineCost) -> None:
    steps = np.arange(8192, dtype=np.int64)
    shapes = np.zeros((steps.size, len(BatchShape._fields)), dtype=np.int64)
    shapes[:, 0] = 1 + steps // 64
    shapes[:, 1] = 1000 * shapes[:, 0] + steps
    # one step in eight has a chunk of its own size
    shapes[::8, 2] = 1
    shapes[::8, 3] = shapes[::8, 4] = 2 + steps[::8] % 2047
    costs = benchmark(roofline.columns, shapes)
    assert costs[-1, 0] == roofline.step(BatchShape(*shapes[-1].tolist())).total_s


# -- rows --------------------------------------------------------------------------

NUM_STEPS = 8192


@pytest.mark.benchmark(group="micro: rows of 8,192 steps")
def test_taken_in_full(benchmark: BenchmarkFixture, roofline: RooflineCost) -> None:
    """Taken in full, one by one."""
    step_s = roofline.step(DECODES).total_s
    usage = (10_000, 10_000, 150_000, 150_000, 0.5, 0.0)

    def record() -> int:
        recorder = Recorder()
        recorder.steps.price_by(roofline)
        for step in range(NUM_STEPS):
            row = pack_facts(step, step * step_s, 120, 0, 0, *DECODES, *usage, 0, 0, 0)
            recorder.steps.packed.append(row)
            recorder.steps.ends_s.append((step + 1) * step_s)
        return recorder.finish(NUM_STEPS * step_s).step_table.num_steps

    assert benchmark(record) == NUM_STEPS


@pytest.mark.parametrize("length", [4, 64], ids="in stretches of {}".format)
@pytest.mark.benchmark(group="micro: rows of 8,192 steps")
def test_quiet_steps(
    benchmark: BenchmarkFixture, roofline: RooflineCost, length: int
) -> None:
    """In stretches of so many."""
    step_s = roofline.step(DECODES).total_s
    decodes = DECODES[:2]

    def record() -> int:
        recorder = Recorder()
        log = recorder.steps
        log.price_by(roofline)
        log.describe_pool(20_000, 16)
        for first in range(0, NUM_STEPS, length):
            start_s = first * step_s
            counts = (10_000, 10_000, 0, length)
            row = pack_stretch(first, start_s, 0, *decodes, *counts)
            log.packed.append(row)
            log.ends_s.extend([start_s + (i + 1) * step_s for i in range(length)])
            log.new_blocks.extend([7] * length)
        return recorder.finish(NUM_STEPS * step_s).step_table.num_steps

    assert benchmark(record) == NUM_STEPS
