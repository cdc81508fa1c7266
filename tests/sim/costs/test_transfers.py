"""Swaps and copies: formulas by hand, what they keep, and what a run makes of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.costs import RooflineCost
from sim.costs.transfers import (
    VARIANTS,
    Batch,
    ByPageSize,
    CopyKernel,
    Loop,
    Pages,
    outlasting_s,
    pages_of,
)
from sim.errors import ConfigError
from sim.hardware.gpus import GPUS
from sim.hardware.models.bundled import load_model
from sim.scheduler.generation import SwapRule
from sim.scheduler.generations import GENERATIONS
from sim.simulation.simulate import simulate
from tests.sim.config.test_config import minimal
from tests.sim.costs.test_costs import EMPTY, H200, LLAMA_8B, ROUND, TINY, bare, decodes

PAGES = Pages(per_block=64, page_bytes=32768.0)
COUNTS = st.integers(1, 4096)
SECONDS = st.floats(0.0, 1.0)
FACTORS = st.floats(1.0, 3.0)


def test_a_loop_waits_for_its_calls_or_for_the_link():
    calls = Loop(PAGES, fixed_s=2e-5, call_s=4e-6, bytes_per_s=1e12)
    assert calls.at(10)[:3] == (2e-5 + 640 * 4e-6, 640 * 4e-6, True)
    assert calls.at(10).begin_s == 0.0  # the first call copies
    link = Loop(PAGES, fixed_s=2e-5, call_s=4e-6, bytes_per_s=1e9)
    assert link.at(10)[:3] == (2e-5 + 640 * 32768 / 1e9, 640 * 4e-6, True)


def test_a_batch_is_described_and_then_copied():
    batch = Batch(PAGES, 2e-5, descriptor_s=5e-7, dma_s=1e-7, bytes_per_s=5e10)
    for num in range(1, 157):  # to the last bit: the sum of both
        host_s = 2e-5 + 5e-7 * (64 * num)
        device_s = 2e-5 + 64 * 32768.0 * num / 5e10
        assert batch.at(num)[:3] == (host_s + device_s, host_s, True)
    host_s = 2e-5 + 640 * 5e-7
    slow = replace(batch, dma_s=1e-6)
    assert slow.at(10).total_s == pytest.approx(host_s + 2e-5 + 640e-6)


def test_a_long_batch_is_described_beside_its_copy():
    batch = Batch(PAGES, 2e-5, descriptor_s=5e-7, dma_s=1e-7, bytes_per_s=5e10)
    num = 64 * 500  # 22,000 of them are described beside the copy
    copy_s = num * 32768 / 5e10
    moved = batch.at(500)
    total_s, host_s, *_ = moved
    assert host_s == pytest.approx(2e-5 + num * 5e-7)
    # the copy takes the link's time, wherever it is described
    assert moved.begin_s == pytest.approx(2e-5 + 5e-3)
    assert moved.copy_s == pytest.approx(2e-5 + copy_s)
    assert total_s == pytest.approx(2e-5 + 5e-3 + 2e-5 + copy_s)
    # a copy that is quicker waits for the descriptions
    quick = replace(batch, bytes_per_s=1e13)
    assert quick.at(500).total_s == pytest.approx(host_s + 2e-5)


def test_a_kernel_takes_the_link_and_no_host():
    assert CopyKernel(PAGES, 2e-5, 1e10).at(3)[:3] == (
        2e-5 + 3 * 64 * 32768 / 1e10,
        0.0,
        True,
    )


def test_small_pages_in_numbers_go_by_the_kernel():
    small, other = CopyKernel(PAGES, 1.0, 1e10), Loop(PAGES, 2.0, 0.0, 1e10)
    page = Pages(8, 28 * 1024 - 1)
    assert ByPageSize(page, small, other).at(2) == small.at(2)
    assert ByPageSize(page, small, other).at(1) == other.at(1)  # 8 pieces
    assert ByPageSize(Pages(8, 28 * 1024), small, other).at(2) == other.at(2)


@pytest.mark.parametrize(
    ("layout", "per_block"), [("separate", 64), ("joined", 32), ("cross_layer", 1)]
)
def test_a_layout_cuts_the_same_bytes(layout, per_block):
    pages = pages_of(LLAMA_8B, layout, 2 * 2**20)
    assert (pages.per_block, pages.block_bytes) == (per_block, 2 * 2**20)


def test_a_latent_has_no_halves():
    latent = replace(TINY, kv_lora_rank=128, qk_rope_head_dim=32, v_head_dim=64)
    assert pages_of(latent, "separate", 4096.0).per_block == latent.num_hidden_layers


# -- beside a step ------------------------------------------------------------------


def test_a_transfer_beside_a_step_by_hand():
    # 3 s of a transfer twice as slow beside a step of 10 s, itself 1.5 times slower:
    # after 6 s it is done and the step has come to 4 s; 6 more, 12 in all
    assert outlasting_s(10.0, 3.0, 1.5, 2.0) == pytest.approx(2.0)
    # the other way round: after 6 s the step of 4 is done, and 3 of 12 s moved; 15
    assert outlasting_s(4.0, 12.0, 1.5, 2.0) == pytest.approx(11.0)
    assert outlasting_s(4.0, 12.0, 1.0, 1.0) == 8.0
    assert outlasting_s(12.0, 4.0, 1.0, 1.0) == 0.0
    assert outlasting_s(0.0, 4.0, 1.5, 2.0) == 4.0


@given(SECONDS, SECONDS, FACTORS, FACTORS)
def test_beside_lies_between_together_and_one_after_the_other(gpu_s, moved_s, f, g):
    added_s = outlasting_s(gpu_s, moved_s, f, g)
    assert added_s >= max(gpu_s, moved_s) - gpu_s - 1e-12
    assert added_s <= gpu_s * (f - 1.0) + moved_s * g + 1e-12
    if 1.0 / f + 1.0 / g >= 1.0:  # else they had better wait for each other
        assert added_s <= moved_s + 1e-12


@given(SECONDS, SECONDS, SECONDS, FACTORS, FACTORS)
def test_a_longer_transfer_never_adds_less(gpu_s, moved_s, more_s, f, g):
    longer_s = outlasting_s(gpu_s, moved_s + more_s, f, g)
    assert longer_s >= outlasting_s(gpu_s, moved_s, f, g) - 1e-12


@given(COUNTS, COUNTS, SECONDS, st.sampled_from(VARIANTS), st.booleans())
def test_overlap_without_interference_is_never_slower(
    loaded, stored, gpu_s, variant, joined
):
    roofline = RooflineCost(
        model=LLAMA_8B,
        gpu=H200,
        swap_variant=variant,
        swap_layout="joined" if joined else None,
        swap_step_factor=1.0,
    )
    serial = roofline.swapping()
    beside = replace(serial, overlap=True)
    serial_s = serial.exposed_s(loaded, stored, gpu_s)
    assert beside.exposed_s(loaded, stored, gpu_s) <= serial_s + 1e-12
    assert serial_s == serial.moved(loaded, stored).total_s
    assert beside.exposed_s(loaded, stored, 0.0) == pytest.approx(serial_s)


@given(
    st.sampled_from(VARIANTS),
    st.sampled_from(["separate", "joined", "cross_layer"]),
    COUNTS,
    st.integers(0, 4096),
)
def test_more_blocks_never_cost_less(variant, layout, count, more):
    cost = RooflineCost(
        model=LLAMA_8B, gpu=H200, swap_variant=variant, swap_layout=layout
    )
    for load in (True, False):
        transfer = cost.transfer(variant, load=load)
        few, many = transfer.at(count), transfer.at(count + more)
        assert 0.0 < few.total_s <= many.total_s
        assert 0.0 <= few.host_s <= few.total_s


# -- in a cost model ----------------------------------------------------------------


def test_a_direction_pays_its_start_once():
    one = bare(swap_fixed_s=1e-3).step(EMPTY._replace(num_swapped_in_blocks=1))
    many = bare(swap_fixed_s=1e-3).step(EMPTY._replace(num_swapped_in_blocks=100))
    both = EMPTY._replace(num_swapped_in_blocks=1, num_swapped_out_blocks=1)
    block_s = 16 * 2 * 2 * 2 * 64 * 2 / 1e10
    assert one.swap_s == pytest.approx(1e-3 + block_s)
    assert many.swap_s == pytest.approx(1e-3 + 100 * block_s)
    assert bare(swap_fixed_s=1e-3).step(both).swap_s == pytest.approx(2 * one.swap_s)


def test_copies_pay_their_start_once():
    copies = EMPTY._replace(num_copied_blocks=5)
    block_s = 2 * 16 * 2 * 2 * 2 * 64 * 2 / 1e12
    found = bare(copy_fixed_s=1e-4).step(copies).copy_s
    assert found == pytest.approx(1e-4 + 5 * block_s)
    assert bare(copy_fixed_s=1e-4).step(EMPTY).copy_s == 0.0


def test_the_engines_own_way_is_overridden_by_key():
    rule = SwapRule("batch", "joined", overlap=True)
    plain = RooflineCost(model=LLAMA_8B, gpu=H200, swap_rule=rule)
    assert plain.describe()["swap"] == {
        "variant": "batch",
        "layout": "joined",
        "overlap": True,
    }
    other = replace(plain, swap_variant="loop", swap_overlap=False)
    assert other.swapping_rule() == SwapRule("loop", "joined", overlap=False)


def test_a_transfer_hides_behind_a_long_step():
    shape = decodes(64, 2048)._replace(num_swapped_out_blocks=20)
    cost = RooflineCost(model=LLAMA_8B, gpu=H200, swap_variant="batch")
    serial = cost.step(shape)
    beside = replace(cost, swap_overlap=True).step(shape)
    moved = cost.transfer("batch", load=False).at(20)
    assert serial.swap_s == moved.total_s
    rest_s = moved.total_s - moved.host_s
    assert beside.swap_s == pytest.approx(moved.host_s + rest_s * (1 - 1 / 1.02))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"swap_variant": "dma"}, "swap_variant.*loop, batch, kernel.*null"),
        ({"swap_layout": "split"}, "swap_layout.*separate, joined, cross_layer"),
        ({"swap_step_factor": 0.5}, "swap_step_factor.*>= 1.*0.5"),
        ({"swap_transfer_factor": float("nan")}, "swap_transfer_factor"),
    ],
)
def test_bad_ways_to_swap_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        RooflineCost(model=TINY, gpu=ROUND, **keys)


# -- against what others published ---------------------------------------------------


def gigabytes_per_s(gpu, variant, num_blocks, **keywords):
    cost = RooflineCost(model=LLAMA_8B, gpu=GPUS[gpu], **keywords)
    moved = cost.transfer(variant, load=False).at(num_blocks)
    return num_blocks * cost.block_pages().block_bytes / moved.total_s / 1e9


def test_published_transfers():
    # vLLM pull request 38460, H100, 64 pages a block of 32 KiB, 64 blocks
    seconds = {
        variant: RooflineCost(model=LLAMA_8B, gpu=GPUS["h100_sxm"])
        .transfer(variant, load=False)
        .at(64)
        .total_s
        for variant in ("loop", "batch")
    }
    assert seconds["loop"] == pytest.approx(16_358e-6, rel=0.02)
    assert seconds["batch"] == pytest.approx(4_519e-6, rel=0.1)
    # 42212: 28 KiB in 10,000 pieces at 27.5 GB/s; pages of 8 KiB: 12 to 15 GB/s
    ten_thousand, more = (
        gigabytes_per_s("h100_sxm", "batch", number, tensor_parallel_size=4)
        for number in (156, 500)
    )
    assert 12.0 < ten_thousand < 15.0
    assert more == pytest.approx(15.0, rel=0.1)
    # 11531, A100 40 GB, 1,250 pages: 12.5 GB/s by a kernel. By the loop 3.1, which
    # takes calls of 10.5 us if its pieces were 32 KiB: an older host, stated in README
    kernel = gigabytes_per_s("a100_sxm_40gb", "kernel", 1250)
    assert kernel == pytest.approx(12.5, rel=0.2)
    older = gigabytes_per_s("a100_sxm_40gb", "loop", 1250, swap_call_s=10.5e-6)
    assert older == pytest.approx(3.1, rel=0.02)


# -- in a run -----------------------------------------------------------------------


def swapped(generation="v0", **cost):
    data = minimal(
        scheduler=generation,
        num_gpu_blocks_override=40,
        max_model_len=200,
        max_num_seqs=8,
        preemption_mode="swap",
    )
    data["cost"] = {"kind": "roofline", **cost}
    data["workload"]["synthetic"] |= {
        "num_requests": 30,
        "arrivals": {"kind": "poisson", "rate": 100.0},
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 120},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
    }
    return simulate(parse_config(data))


def swap_share_s(results):
    return float(results.steps["swap_s"].sum())


@pytest.mark.parametrize("generation", ["cacheflow", "v0_2", "v0"])
def test_generations_before_v1_swap_by_the_loop(generation):
    plain, loop = swapped(generation), swapped(generation, swap_variant="loop")
    assert plain.steps["num_swapped_out_blocks"].sum() > 0
    assert plain.steps.equals(loop.steps)
    assert GENERATIONS[generation].swap == SwapRule()


def test_variants_and_overlap_act_in_a_run():
    loop, batch = swapped(), swapped(swap_variant="batch")
    beside = swapped(swap_overlap=True, swap_step_factor=1.0)
    joined = swapped(swap_layout="joined")
    assert swap_share_s(loop) > swap_share_s(batch) > 0.0
    assert swap_share_s(loop) > swap_share_s(beside) > 0.0
    assert swap_share_s(loop) > swap_share_s(joined)


def test_the_rule_is_the_engines_to_say():
    with pytest.raises(ConfigError, match="swap_rule"):
        swapped(swap_rule={"variant": "loop"})


# -- beside what was published --------------------------------------------------------

H100 = RooflineCost(
    model=LLAMA_8B, gpu=GPUS["h100_sxm"], swap_variant="batch", swap_layout="joined"
).swapping()
"""Copies of vLLM's native offloading on an H100, Llama-3.1-8B: 64 KiB a piece."""


def rate_of(page_kib: int, num_pages: int) -> float:
    """Return GB/s of one batched call, submission and all."""
    store = H100.store
    assert isinstance(store, Batch)
    moved = replace(store, pages=Pages(1, page_kib * 1024)).at(num_pages)
    return page_kib * 1024 * num_pages / moved.total_s / 1e9


@pytest.mark.parametrize(
    ("page_kib", "num_pages", "published"),
    [
        # vLLM blog, 2026-01-08: "about 50 GB/s", blocks of 2 MB
        (2048, 1_000, 50.0),
        # vLLM pull request 42212
        (24, 10_000, 25.8),
        (28, 10_000, 27.5),
        (28, 50_000, 39.9),
        (28, 100_000, 44.1),
        (64, 10_000, 38.8),
        (64, 50_000, 51.4),
        (64, 100_000, 51.8),
        # vLLM pull request 38460
        (32, 4_096, 4_096 * 32 * 1.024e-6 / 4.519e-3),
        (32, 10_240, 10_240 * 32 * 1.024e-6 / 10.24e-3),
    ],
)
def test_copies_take_what_was_published(page_kib, num_pages, published):
    assert rate_of(page_kib, num_pages) == pytest.approx(published, rel=0.15)


def test_small_loads_go_by_the_kernel_as_the_engine_has_it():
    # Published for the copy engine below 28 KiB: 4 to 7 GB/s, which the engine avoids.
    load = H100.load
    assert isinstance(load, ByPageSize)
    pages = Pages(1, 16 * 1024)
    assert replace(load, pages=pages).takes_small(50_000)
    kernel = replace(load.small, pages=pages).at(50_000)
    assert 16 * 1024 * 50_000 / kernel.total_s / 1e9 > 4 * 6.3


def test_pages_of_a_block_by_layout() -> None:
    llama, deepseek = "meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3"
    found = {
        (name, layout): pages_of(load_model(name), layout, 6400)
        for name in (llama, deepseek)
        for layout in ("separate", "joined", "cross_layer")
    }
    assert found == {
        (llama, "separate"): Pages(64, 100),
        (llama, "joined"): Pages(32, 200),
        (llama, "cross_layer"): Pages(1, 6400),
        (deepseek, "separate"): Pages(61, 6400 / 61),
        (deepseek, "joined"): Pages(61, 6400 / 61),
        (deepseek, "cross_layer"): Pages(1, 6400),
    }
