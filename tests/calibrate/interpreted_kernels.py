"""Triton kernels on the CPU, in the interpreter, against high precision.

Not collected by name: `test_triton_kernels` runs this file in a process of its own,
since the interpreter must be chosen before triton is imported.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from calibrate.gpu import tuning
from calibrate.gpu.attention import Engines
from calibrate.kernels import reference, triton_copy
from calibrate.kernels.triton_decode import (
    DecodeShape,
    DecodeWorkspace,
    paged_decode,
    plan_decode,
)
from calibrate.kernels.triton_mixed import MixedShape, paged_mixed, plan_mixed
from calibrate.kernels.triton_support import interpreted
from calibrate.replay.executor import TorchExecutor
from calibrate.replay.log import Query, Step
from calibrate.replay.setup import tiny_executor
from tests.calibrate.bench_device import TINY, cpu_device, small_points
from tests.calibrate.cpu_timers import CpuTimers
from tests.calibrate.paged import Shape, poisoned_out, random_batch, tolerance
from tests.calibrate.replays import facts

if TYPE_CHECKING:
    from calibrate.kernels.paged import PagedBatch

torch.set_num_threads(1)

CPU = torch.device("cpu")
RAGGED = (0, 1, 7, 33, 300, 16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def shapes() -> list[object]:
    """Return every ratio, block size and head size; each of them once for every day."""
    cases: list[object] = []
    layouts = list(itertools.product((8, 16, 32), (64, 128)))
    for group, number in itertools.product(range(1, 9), range(len(layouts))):
        block_size, head_dim = layouts[number]
        dtype = DTYPES[(group + number) % 3]
        shape = Shape(group, 1 + group % 2, head_dim, block_size, dtype)
        name = f"{group}to1-block{block_size}-head{head_dim}-{dtype}"
        daily = number == group % len(layouts)
        marks = () if daily else pytest.mark.slow
        cases.append(pytest.param(shape, id=name, marks=marks))
    return cases


def test_the_interpreter_is_on() -> None:
    assert interpreted()


def check(shape: Shape, batch: PagedBatch, out: torch.Tensor) -> None:
    expected = reference.paged_attention(batch, torch.float32)
    assert reference.worst_row_error(out, expected) < tolerance(shape.dtype)


def check_decode(shape: Shape, lens: tuple[int, ...], num_programs: int) -> int:
    batch = random_batch(shape, [1] * len(lens), lens)
    cpu = batch.query.device
    plan = plan_decode(batch.context_lens, shape.num_kv_heads, num_programs, cpu)
    out = poisoned_out(batch)
    paged_decode(out, batch, plan, DecodeWorkspace(batch.query, plan))
    check(shape, batch, out)
    return plan.num_items


@pytest.mark.parametrize("shape", shapes())
def test_decode_in_splits(shape: Shape) -> None:
    # 300 tokens in two splits of 256, nothing for the empty, one for each of the rest
    assert check_decode(shape, RAGGED, 4096) == 6


@pytest.mark.parametrize("lens", [(0, 0), (1,), (64, 65, 63), (256,)])
def test_decode_in_one_piece(lens: tuple[int, ...]) -> None:
    assert check_decode(Shape(4, 2, 64, 16, torch.float16), lens, 1) == len(lens)


def test_one_long_sequence_makes_no_work_for_short_ones() -> None:
    """Programs and partial results follow the sum of the contexts, not the longest."""
    lens = (5, 40, 1500, 0, 7)
    assert check_decode(Shape(2, 1, 64, 16, torch.float32), lens, 10**6) == 9


def test_decode_of_heads_that_are_no_power_of_two() -> None:
    assert check_decode(Shape(3, 2, 80, 16, torch.float32), (70, 0, 5), 8) == 3


def test_decode_reads_eight_bits() -> None:
    shape = Shape(4, 1, 64, 16, torch.float32)
    exact = random_batch(shape, [1, 1], [40, 9])
    key, value = (
        torch.nan_to_num(cache).to(torch.float8_e4m3fn)
        for cache in (exact.key_cache, exact.value_cache)
    )
    batch = replace(exact, key_cache=key, value_cache=value)
    plan = plan_decode(batch.context_lens, 1, 8, batch.query.device)
    out = poisoned_out(batch)
    paged_decode(out, batch, plan, DecodeWorkspace(batch.query, plan))
    check(shape, batch, out)


def check_mixed(shape: Shape, query_lens: list[int], past_lens: list[int]) -> None:
    lens = [past + query for past, query in zip(past_lens, query_lens, strict=True)]
    batch = random_batch(shape, query_lens, lens, seed=1)
    out = poisoned_out(batch)
    paged_mixed(out, batch, plan_mixed(batch))
    check(shape, batch, out)


@pytest.mark.parametrize("shape", shapes())
def test_prefills_and_decodes_together(shape: Shape) -> None:
    # a decode, a chunk with a past, one that takes no part, a whole prompt, an empty
    check_mixed(shape, [1, 35, 0, 70, 0, 1], [90, 61, 20, 0, 0, 0])


def test_tiles_with_the_most_keys_begin_first() -> None:
    shape = Shape(4, 1, 64, 16, torch.float32)
    batch = random_batch(shape, [1, 70, 40], [200, 70, 140])
    plan = plan_mixed(batch)
    assert plan.tile_seqs.tolist() == [0, 2, 2, 1, 1, 1]
    assert plan.tile_firsts.tolist() == [0, 32, 0, 64, 32, 0]


def test_prefill_of_heads_of_256() -> None:
    check_mixed(Shape(2, 1, 256, 16, torch.float32), [37, 1], [20, 70])


def test_a_batch_of_decodes_alone() -> None:
    check_mixed(Shape(8, 1, 64, 16, torch.float32), [1, 1, 1], [0, 63, 64])


def test_shapes_of_programs_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that cannot run are noted, the others timed and put in order."""
    wrong = DecodeShape(tile=48)  # no power of two
    shapes = [(DecodeShape(32), 2), (wrong, 2), (DecodeShape(64), 4)]
    monkeypatch.setattr(tuning, "decode_shapes", lambda: iter(shapes))
    chunks = [MixedShape(64, 32, 4), MixedShape(32, 64, 4)]
    monkeypatch.setattr(tuning, "mixed_shapes", lambda: iter(chunks))
    batch = random_batch(Shape(2, 1, 64, 16, torch.float16), [1, 1], [40, 3])
    decodes = tuning.decode_trials(CpuTimers(), [batch, batch], 4)
    assert [bool(trial.note) for trial in decodes] == [False, True, False]
    mixed = tuning.mixed_trials(CpuTimers(), [batch])
    assert [trial.note for trial in mixed] == ["", ""]
    assert all(trial.seconds > 0 for trial in (*decodes, *mixed))
    point = tuning.points()[0]
    lines = tuning.report(point, decodes, 2)
    assert lines[0] == "decode_attention (1, 128, 128)"
    assert sum("TB/s" in line for line in lines) == 2
    assert "1 could not run, such as DecodeShape(tile=48" in lines[3]


def test_an_empty_batch_launches_nothing() -> None:
    check_mixed(Shape(2, 1, 64, 8, torch.float32), [0, 0], [0, 5])
    assert check_decode(Shape(2, 1, 64, 8, torch.float32), (), 8) == 0


def pool(num_blocks: int, block_size: int, heads: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    size = (3, 2, num_blocks, block_size, heads, 64)
    return torch.randn(size, generator=rng).to(torch.bfloat16)


@pytest.mark.parametrize(("block_size", "heads"), [(16, 1), (8, 3), (32, 2)])
def test_blocks_are_copied_in_every_layer(block_size: int, heads: int) -> None:
    got = pool(9, block_size, heads, 0)
    expected = got.clone()
    pairs = torch.tensor([[4, 0], [8, 2], [4, 7]])
    expected[:, :, pairs[:, 1]] = got[:, :, pairs[:, 0]]
    triton_copy.copy_blocks(got, pairs)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("programs", [1, 5, 1000])
def test_pages_are_swapped(programs: int) -> None:
    source, target = pool(6, 16, 1, 1), pool(9, 16, 1, 2)
    expected = target.clone()
    pairs = torch.tensor([[5, 0], [0, 8], [3, 3], [3, 1]])
    expected[:, :, pairs[:, 1]] = source[:, :, pairs[:, 0]]
    triton_copy.swap_pages(source, target, pairs, programs)
    assert torch.equal(target, expected)


def test_no_pairs_copy_nothing() -> None:
    source = pool(4, 8, 1, 3)
    before = source.clone()
    none = torch.empty((0, 2), dtype=torch.int64)
    triton_copy.copy_blocks(source, none)
    triton_copy.swap_pages(source, source, none, 4)
    assert torch.equal(source, before)


def test_a_page_of_odd_bytes_is_refused() -> None:
    odd = torch.zeros((1, 2, 4, 1, 1, 3), dtype=torch.float16)
    with pytest.raises(ValueError, match="multiple of 4 bytes; got pages of 6"):
        triton_copy.page_words(odd)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("operation", "variant"),
    [
        pytest.param("decode_attention", "split_kv", marks=SLOW),
        pytest.param("prefill_attention", "mixed", marks=SLOW),
        pytest.param("mixed_attention", "mixed", marks=SLOW),
        ("swap", "kernel"),
        ("copy_blocks", "kernel"),
    ],
)
def test_the_device_binds_and_checks_them(operation: str, variant: str) -> None:
    device = cpu_device("triton")
    for point in small_points(operation, variant):
        check = device.check(TINY, point.curve, "triton")
        assert check.passed, check


@pytest.mark.parametrize(
    "contexts", [pytest.param((5, 40, 17), marks=pytest.mark.slow), (300, 3, 600)]
)
def test_a_padded_batch_of_decodes_gives_what_its_sequences_give(
    contexts: tuple[int, ...],
) -> None:
    """A graph of decodes, its splits and rows padded, twice over other inputs."""
    here = facts(num_gpu_blocks=256, max_model_len=2048)
    plain = tiny_executor(here, 0)
    pool = plain.pool
    pool.normal_(generator=torch.Generator().manual_seed(1))
    variants = {"decode_attention": "split_kv", "mixed_attention": "sdpa"}
    engines = Engines(CPU, 3, None)
    graphs = TorchExecutor(plain.stack, plain.moves, engines, variants, True)
    for shift in (0, 1):
        lens = contexts[shift:] + contexts[:shift]
        step = decodes_of(lens, seed=shift)
        tokens = [np.array([7 + place]) for place in range(len(lens))]
        expected = plain.logits(step, tokens)
        pool[:, :, -1] = float("nan")  # nobody reads where padded rows write
        got = graphs.logits(step, tokens)
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 1e-5
    ((shape, _),) = graphs._decodes.items()  # one for both orders
    assert shape.num_seqs == 4
    assert shape.single == (max(contexts) <= shape.split_len)


def decodes_of(contexts: tuple[int, ...], seed: int) -> Step:
    """A step of decodes over random blocks."""
    blocks = iter(np.random.default_rng(seed).permutation(256).tolist())
    queries = tuple(
        Query(str(n), str(n), 1, context, tuple(islice(blocks, -(-context // 16))))
        for n, context in enumerate(contexts)
    )
    return Step(seed, 0.0, 0.0, queries, (), (), (), ())
