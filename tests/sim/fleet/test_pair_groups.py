"""Prefill and decode pools of models whose layers make several KV cache groups."""

from __future__ import annotations

from typing import Any

import pytest

from cache.v1.block_tables import BlockTables
from cache.v1.groups.kinds import EngineLimits
from cache.v1.runs.group_tables import GroupRunTables
from cache.v1.specs import (
    KVCacheGroup,
    KVCacheLayout,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)
from sim.cli.conform import _drawn
from sim.config.tables import parse_config
from sim.costs.transfers import pages_by_group
from sim.errors import ConfigError
from sim.hardware.capacity import estimate_capacity
from sim.scheduler.v1.connectors.exchange import Exchange
from sim.simulation.run import Simulation
from tests.sim.build import request_from_spec, spec
from tests.sim.fleet.test_pairs import (
    checked,
    fleet_of,
    is_the_same_stepwise,
    shares_of_calls,
    simulation_of,
)
from tests.sim.fleet.test_run import data_of

GPT_OSS: dict[str, Any] = {
    "model": "openai/gpt-oss-20b",
    "num_gpu_blocks_override": 150,
    "max_model_len": 1024,
}
STATES: dict[str, Any] = {
    "model": "ibm-granite/granite-4.0-h-tiny",
    "num_gpu_blocks_override": 150,
    "max_model_len": 2048,
}


def layout_of(model: str) -> KVCacheLayout:
    capacity = estimate_capacity(model, "h200_sxm", tensor_parallel_size=2)
    assert capacity.plan is not None
    return capacity.plan.layout


def test_a_block_is_read_from_the_tensors_that_layers_of_its_group_share() -> None:
    """gemma-3-27b: 10 full layers, and 52 with windows in groups of 9, 9, 9, 9, 8, 8.

    The tenth tensor is of full attention alone; all others are of several groups, one
    of which has no layer in the ninth.
    """
    layout = layout_of("google/gemma-3-27b-it")
    assert sorted(len(group.layer_names) for group in layout.groups) == [
        *(8, 8, 9, 9, 9, 9, 10)
    ]
    full, *windows = sorted(
        pages_by_group(layout), key=lambda pages: pages.per_block, reverse=True
    )
    assert (full.per_block, [each.per_block for each in windows]) == (10, [9] * 6)
    assert full.page_bytes == 16 * 8 * 128 * 2 * 2  # 8 of 16 heads on a rank, in 16 bit
    one_group = KVCacheLayout(layout.groups[:1], 9, 0, 16, 16, 16)
    length = len(layout.groups[0].layer_names)
    assert [each.per_block for each in pages_by_group(one_group)] == [length]


def test_a_state_is_read_in_four_pieces_from_the_tensors_of_states() -> None:
    """Nemotron Nano 2: 27 states in groups of 4 and one of 3; 4 layers of attention.

    Nobody looks which group has a layer in a tensor: all states are read from all four.
    """
    capacity = estimate_capacity("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "h200_sxm")
    assert capacity.plan is not None
    layout = capacity.plan.layout
    lengths = [len(group.layer_names) for group in layout.groups]
    assert lengths == [*(4, 4, 4, 4, 4, 4, 3), 4]
    *states, attention = pages_by_group(layout)
    assert [each.per_block for each in states] == [4 * 4] * 7
    # 128 heads of 80 with states of 128, and 3 rows of 80 * 128 + 2 * 8 * 128 inputs.
    state_bytes = 128 * 80 * 128 * 4 + 3 * (80 * 128 + 2 * 8 * 128) * 2
    assert {each.block_bytes for each in states} == {4 * state_bytes}
    assert attention.per_block == 4
    assert attention.page_bytes == 1312 * 8 * 128 * 2 * 2


def test_of_a_window_only_its_end_is_offered() -> None:
    """Window 5, blocks of 4, 13 tokens: what the docstring of `Exchange` draws."""
    full = KVCacheLayout.of_one_group(20, 4).groups
    window = KVCacheLayout.of_one_group(20, 4, 5).groups
    assert isinstance(window[0].spec, SlidingWindowSpec)
    layout = KVCacheLayout(full + window, 20, 0, 4, 4, 4)
    limits = EngineLimits(48, 48, 48)
    found = []
    for tables in (
        GroupRunTables(layout, limits, retention_interval=0),
        BlockTables(layout, limits, enable_caching=True),
    ):
        exchange = Exchange(layout, tables)
        producer, consumer = (
            request_from_spec(spec(number, 0.0, 13, 1), 48) for number in range(2)
        )
        tables.begin(producer, 13, tables.find(producer, 13))
        producer.num_computed_tokens = 13
        tables.leave_behind(producer, 13)
        tables.begin(consumer, 13, tables.find(consumer, 13), num_tokens_to_cache=0)
        assert tables.num_missing_blocks(consumer, 13, 13, is_whole=True) == 0
        found.append((exchange.offered(producer), exchange.wanted(consumer, 0)))
        tables.check([producer, consumer])
    # Blocks 5 and 6 lay behind the window, and are free again.
    both = ([1, 2, 3, 4], [0, 7, 8]), ([6, 5, 9, 10], [11, 12])
    assert found == [both, both]


def test_a_load_begins_behind_what_attention_has_wherever_states_are() -> None:
    """Blocks of 4; of a prompt the state at the last end of a block is kept.

    ::

        first   14 tokens: attention has 12 of them, and the state at 12 is kept
        second   8 and 6 of its own: attention has 8 tokens, no state is there
        third   14 and 1: attention and state have 12
    """
    full = KVCacheLayout.of_one_group(20, 4).groups
    state = MambaSpec(
        block_size=4,
        page_size_bytes=0,
        shapes=((1,),),
        dtypes=("bfloat16",),
        mamba_cache_mode=MambaCacheMode.ALIGN,
    )
    layout = KVCacheLayout((*full, KVCacheGroup(("s",), state, 0)), 20, 0, 4, 4, 4)
    limits = EngineLimits(48, 48, 48)
    tables = BlockTables(layout, limits, enable_caching=True, retention_interval=0)
    exchange = Exchange(layout, tables)
    first, second, third = (
        request_from_spec(spec(number, 0.0, length, 1, prompt=prompt), 48)
        for number, (length, prompt) in enumerate(
            [
                (14, ((0, 14),)),
                (14, ((0, 8), (1, 6))),
                (15, ((0, 14), (1, 1))),
            ]
        )
    )
    assert [exchange.num_handed_on(number) for number in (1, 2, 14)] == [1, 1, 13]
    tables.begin(first, 12, tables.find(first, 14))
    tables.end_call()
    assert tables.extend(first, 14, 12)
    tables.end_call()
    first.num_computed_tokens = 14
    assert exchange.offered(first)[1] == tables.group_block_ids(first)[1][-1:]
    found, must_load = tables.find_to_load(second, 14)
    assert (found.num_blocks, must_load) == (2, True)
    assert tables.find(second, 14).num_blocks == 0
    found, must_load = tables.find_to_load(second, 14)
    tables.begin(second, 13, found, num_tokens_to_cache=8)
    attention, states = tables.group_block_ids(second)
    assert states[:3] == [0, 0, 0]
    assert exchange.wanted(second, 8) == (attention[2:], states[3:])
    found, must_load = tables.find_to_load(third, 15)
    assert (found.num_blocks, must_load) == (3, False)
    # The state is free no more: in a load it counts as a block that is taken, too.
    num_free = tables.num_needed_blocks(
        third, 14, found, is_whole=False, num_external_tokens=2
    )
    assert num_free == 1 + 1
    tables.check([first, second])


def test_copies_that_are_held_are_those_of_their_call() -> None:
    """A group without any in a call has some in the next one, by a list of its own."""
    layout = KVCacheLayout.of_one_group(20, 4)
    tables = BlockTables(layout, EngineLimits(48, 48, 48), enable_caching=True)
    (manager,) = tables.managers
    held = manager.end_call()
    block = tables.pool.get_new_blocks(1)[0]
    manager.copies.append((block, block))
    assert held == []


def test_a_lone_request_reads_what_its_windows_reach() -> None:
    """Of 1,000 tokens 63 blocks are of full attention, and 9 of windows of 128."""
    links = {"bytes_per_s": 1e9, "latency_s": 0.01, "descriptor_s": 1e-5}
    engine = GPT_OSS | {"max_model_len": 2048}
    data = data_of(engine, fleet_of(1, 1, links=links), 1)
    data["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "fixed", "tokens": 1000},
        "output_tokens": {"kind": "fixed", "tokens": 3},
    }
    results = Simulation(parse_config(data)).run()
    request, moved = results.requests.iloc[0], results.summary["transfers"]
    num_bytes = (63 + 9) * 12 * 16 * 8 * 64 * 2 * 2  # 12 layers, 8 heads of 64, 16 bit
    assert moved["num_bytes"] == num_bytes
    fixed_s = 0.01 + 1e-5 * (63 + 9) * 12
    assert request["ttft_transfer_s"] == pytest.approx(fixed_s + num_bytes / 1e9)
    assert request["num_transferred_tokens"] == 63 * 16
    assert request["num_cached_tokens"] == 999


@pytest.mark.parametrize("caches", [True, False])
def test_a_lone_request_reads_its_blocks_and_one_state(caches: bool) -> None:
    """Granite 4: 9 groups of 4 states, and 4 layers of attention in blocks of 400.

    999 of 1,000 tokens are computed for the decoder, which reads 3 blocks.
    """
    links = {"bytes_per_s": 1e9, "latency_s": 0.01, "descriptor_s": 1e-5}
    engine = STATES | {"enable_prefix_caching": caches, "async_scheduling": False}
    data = data_of(engine, fleet_of(1, 1, links=links), 1)
    data["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "fixed", "tokens": 1000},
        "output_tokens": {"kind": "fixed", "tokens": 3},
    }
    results = Simulation(parse_config(data)).run()
    request, moved = results.requests.iloc[0], results.summary["transfers"]
    state_bytes = 48 * 64 * 128 * 2 + 3 * (48 * 64 + 2 * 128) * 2
    num_bytes = 3 * 4 * 400 * 4 * 128 * 2 * 2 + 9 * 4 * state_bytes
    assert moved["num_bytes"] == num_bytes
    fixed_s = 0.01 + 1e-5 * (3 * 4 + 9 * 4 * 4)
    assert request["ttft_transfer_s"] == pytest.approx(fixed_s + num_bytes / 1e9)
    assert request["num_transferred_tokens"] == 3 * 400
    assert request["num_cached_tokens"] == 999
    pools = {pool["role"]: pool for pool in results.summary["pools"]}
    assert pools["prefill"]["num_computed_prompt_tokens"] == 999


@pytest.mark.parametrize(
    ("ahead", "engine"),
    [
        (False, STATES),
        (True, STATES),
        pytest.param(False, STATES | {"prefix_match_unit": 16}, marks=pytest.mark.slow),
        pytest.param(
            True, STATES | {"enable_prefix_caching": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_with_states_stepwise_it_is_the_same(
    ahead: bool, engine: dict[str, Any]
) -> None:
    both = engine | {"async_scheduling": ahead}
    results = is_the_same_stepwise(fleet_of(2, 2), both, num_requests=60)
    assert results.summary["transfers"]["num_transfers"] == 60
    assert results.summary["completed"] == 60


@pytest.mark.parametrize(
    ("ahead", "engine"),
    [
        (False, {}),
        (True, {}),
        (True, {"enable_prefix_caching": False}),
        pytest.param(True, {"sliding_window": 40}, marks=pytest.mark.slow),
        pytest.param(False, {"sliding_window": 40}, marks=pytest.mark.slow),
    ],
)
def test_stepwise_it_is_the_same(ahead: bool, engine: dict[str, Any]) -> None:
    base = GPT_OSS
    if "sliding_window" in engine:
        base = {"num_gpu_blocks_override": 70, "max_model_len": 1024}
    both = base | {"async_scheduling": ahead} | engine
    results = is_the_same_stepwise(fleet_of(2, 2), both, num_requests=60)
    moved = results.summary["transfers"]
    assert moved["num_transfers"] == 60
    assert results.summary["completed"] == 60


@pytest.mark.parametrize(
    ("ahead", "engine"), [(True, GPT_OSS), (False, STATES), (True, STATES)]
)
def test_a_decoder_goes_on_beside_what_it_reads(
    ahead: bool, engine: dict[str, Any]
) -> None:
    own = engine | {"async_scheduling": ahead, "num_gpu_blocks_override": 2000}
    calls, together = shares_of_calls(own)
    assert together > 0.5
    assert calls < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_no_block_is_lost(ahead: bool) -> None:
    engine = GPT_OSS | {"async_scheduling": ahead}
    assert checked(simulation_of(fleet_of(2, 1), engine)).summary["completed"] == 90


@pytest.mark.parametrize(
    ("engine", "pool", "line"),
    [
        (
            {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tensor_parallel_size": 2},
            {"tensor_parallel_size": 4},
            "blocks of 576 tokens in p, 320 tokens in d; give all the same tensor_par",
        ),
        (
            STATES,
            {"mamba_ssm_cache_dtype": "float32"},
            "a state of 806400 bytes in p, 1592832 bytes in d; give all the same tens",
        ),
        (
            GPT_OSS,
            {"disable_hybrid_kv_cache_manager": True},
            "KV cache groups of sliding window of 128 and full attention in p, ",
        ),
        (
            GPT_OSS | {"kv_offloading_size": 8},
            {},
            "tiers of prefill and decode pools are known of models with full attention",
        ),
    ],
)
def test_refused(engine: dict[str, Any], pool: dict[str, Any], line: str) -> None:
    fleet = fleet_of(1, 1)
    fleet["pools"][1]["engine"] = pool
    with pytest.raises(ConfigError, match=line) as refused:
        simulation_of(fleet, engine)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("pools", "speculative"),
    [({}, False), ({"prefillers": 0, "decoders": 2}, False), ({}, True)],
)
def test_conform_draws_them(pools: dict[str, int], speculative: bool) -> None:
    workload, *_ = _drawn(
        range(1),
        "0.33.0",
        groups=True,
        offload=False,
        pairs=True,
        pools=pools,
        async_scheduling=False,
        speculative=speculative,
    )
    name = "groups in pools, seed 0" + ", speculative" * speculative
    assert workload.name == name
    (decode, *_) = workload.sides("decode")
    assert ("speculative" in decode.config) == speculative
    assert len(workload.sides("decode")) == (2 if pools else 1)
