"""Prefill and decode pools with a tier: bytes and loads by hand, and the GPU's port."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.fleet.network import Network
from sim.results.recording.transfers import transfer_rows
from sim.scheduler.v1.connectors.base import JobKind
from sim.simulation.run import Simulation
from sim.views.plots.run.tables import Tables
from sim.views.plots.run.tiers import by_source, tier_ttft
from tests.shared import shared
from tests.sim.fleet.test_pairs import (
    check_the_same,
    checked,
    event,
    fleet_of,
    histories,
    is_the_same_stepwise,
    simulation_of,
    tight_engines,
)
from tests.sim.fleet.test_run import SESSIONS, TIGHT, data_of

if TYPE_CHECKING:
    from sim.results.run import Results

TIER: dict[str, Any] = {
    "kv_offloading_size": 1.0,
    "kv_offloading_link": {"load_bytes_per_s": 5e10, "store_bytes_per_s": 5e10},
}


def tiered(*pools: int, tier: dict[str, Any] = TIER, **more: Any) -> dict[str, Any]:
    """Return two prefillers and two decoders, of which some pools have a tier."""
    fleet = fleet_of(**more)
    for place in pools:
        fleet["pools"][place]["engine"] = tier
    return fleet


def sessions_of(fleet: dict[str, Any], **engine: Any) -> Simulation:
    """Return conversations, whose turns repeat what came before."""
    data = data_of(TIGHT | engine, None) | {"workload": SESSIONS, "fleet": fleet}
    return Simulation(parse_config(data))


def copies_of(results: Results, *kinds: str) -> dict[str, Any]:
    table = results.recording.transfer_table
    assert table is not None
    return dict(table.taken(np.isin(table["kind"], kinds)))


# -- who loads what --------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_prefillers_load_prompts_from_their_tier(ahead: bool) -> None:
    off = {"enable_prefix_caching": False, "async_scheduling": ahead}
    results = checked(sessions_of(tiered(0), **off))
    summary = results.summary
    assert summary["completed"] == 36
    stores, loads = copies_of(results, "store"), copies_of(results, "load")
    assert set(stores["engine"]) == set(loads["engine"]) == {0, 1}
    assert summary["stored_blocks"] == stores["num_blocks"].sum() > 0
    assert summary["loaded_blocks"] == loads["num_blocks"].sum() > 0
    assert len(copies_of(results, "pull")["engine"]) == 36
    assert summary["transfers"]["num_transfers"] == 36
    loaded = results.requests["num_loaded_tokens"]  # at prefillers, which have no rows
    assert loaded.sum() == loads["num_tokens"].sum()
    num_tokens = results.requests["num_prompt_tokens"].sum()
    prefill, _ = summary["pools"]
    assert prefill["num_computed_prompt_tokens"] == num_tokens - loaded.sum()


def test_what_prefillers_find_they_do_not_compute() -> None:
    results = sessions_of(fleet_of(), async_scheduling=False).run()
    num_tokens = results.requests["num_prompt_tokens"].sum()
    steps = results.steps
    computed = steps[steps["engine"] < 2].groupby("engine")["num_prefill_tokens"].sum()
    assert 0 < computed.sum() < num_tokens
    told = [
        each["num_computed_prompt_tokens"] for each in results.summary["engines"][:2]
    ]
    assert told == computed.tolist()


def test_figures_tell_loads_from_what_decoders_read() -> None:
    """A decoder's row has all of its prompt found, wherever it came from."""
    results = sessions_of(tiered(0), enable_prefix_caching=False).run()
    requests, summary = results.requests, results.summary
    loaded = requests["num_loaded_tokens"].sum()
    sources = by_source(requests)
    assert [*sources] == ["found on a GPU or computed", "loaded from the host"]
    assert sources["loaded from the host"].sum() == loaded
    assert sum(map(sum, sources.values())) == requests["num_prompt_tokens"].sum()
    figure = tier_ttft(Tables.of(results))
    assert f"{summary['loaded_blocks']:,} blocks loaded" in figure.texts[0].get_text()
    assert loaded < summary["external_prefix_cache_hits"]
    assert dict(transfer_rows(summary))["CPU tier"].startswith(
        f"{summary['loaded_blocks']:,} blocks loaded; "
    )


@pytest.mark.parametrize("first", [False, True])
def test_decoders_pull_or_load_by_the_order_of_their_connectors(first: bool) -> None:
    off = {"enable_prefix_caching": False}
    whole = TIER | {
        "kv_transfer_config": {
            "kv_connector_extra_config": {"offload_prompt_only": False}
        }
    }
    fleet = tiered(
        1,
        tier=whole,
        connector={"asks_tier_first": first},
        decode_router={"kind": "session"},
    )
    results = checked(sessions_of(fleet, **off))
    requests = results.requests
    assert results.summary["completed"] == 36
    is_read = requests["num_transferred_tokens"] > 0
    is_loaded = requests["num_loaded_tokens"] > 0
    assert not (is_read & is_loaded).any()
    if first:
        assert 0 < is_loaded.sum() < 36
        assert results.summary["transfers"]["num_transfers"] == is_read.sum()
        assert (is_read | is_loaded).all()
    else:
        assert is_read.all()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_prompts_whose_load_fails_end_or_are_computed(policy: str) -> None:
    link = TIER["kv_offloading_link"] | {"load_failure_rate": 0.5}
    fleet = tiered(
        0,
        tier=TIER | {"kv_offloading_link": link},
        connector={"kv_load_failure_policy": policy},
    )
    data = data_of(TIGHT | {"enable_prefix_caching": False}, fleet, 60, 20.0)
    data["workload"]["synthetic"]["prefixes"] = {
        "kind": "system_prompts",
        "num_groups": 2,
        "tokens": {"kind": "fixed", "tokens": 160},
    }
    results = checked(Simulation(parse_config(data)))
    summary = results.summary
    assert results.requests["request_id"].tolist() == list(range(60))
    if policy == "recompute":
        assert summary["completed"] == 60
    else:
        assert 0 < summary["aborted"] == 60 - summary["completed"]
        reasons = set(results.requests["reason"]) - {""}
        assert all("could not be read" in reason for reason in reasons)


def test_a_trace_by_hand() -> None:
    """Mooncake's conversations one after the other: nothing is cached but in the tier.

    Each prompt loads the whole blocks of its longest prefix that came before, stores
    its other whole ones, and all of its blocks are read.
    """
    path = shared("traces/mooncake_fast25_conversation.jsonl")
    limit = 120
    lines = path.read_text().splitlines()[:limit]
    trace = [json.loads(line) for line in lines]
    data: dict[str, Any] = {
        "workload": {
            "trace": {
                "kind": "mooncake",
                "path": str(path),
                "limit": limit,
                "rate_scale": 0.02,
                "spread_arrivals": True,
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "block_size": 16,
            "enable_prefix_caching": False,
        },
        "cost": {"kind": "roofline"},
        "fleet": fleet_of(1, 1, links={"interconnect": "infiniband_ndr"}),
        "seed": 0,
    }
    data["fleet"]["pools"][0]["engine"] = {"kv_offloading_size": 2000}
    simulation = Simulation(parse_config(data))
    block_bytes = simulation.pools[0].capacity.block_bytes
    summary = simulation.run().summary
    seen: list[dict[str, Any]] = []
    loaded = stored = pulled = 0
    for line in trace:
        num_tokens = line["input_length"]
        common = max((_num_common(line, other) for other in seen), default=0)
        loaded += common // 16
        stored += num_tokens // 16 - common // 16
        pulled += -(-num_tokens // 16)
        seen.append(line)
    assert summary["completed"] == limit
    assert loaded > 3000
    assert summary["loaded_bytes"] == loaded * block_bytes
    engines: Any = simulation.engine
    tier = engines.engines[0].scheduler.connector.offloading.tier
    assert tier.num_used_chunks == stored
    # What the last prompt stores may not be reported any more.
    last = trace[-1]["input_length"] // 16
    assert 0 <= stored - summary["stored_bytes"] // block_bytes < last
    assert summary["transfers"]["num_bytes"] == pulled * block_bytes


def _num_common(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return the leading tokens that two lines of the trace have in common."""
    number: int = 0
    for left, right in zip(one["hash_ids"], other["hash_ids"], strict=False):
        if left != right:
            break
        number += 512
    lengths: list[int] = [one["input_length"], other["input_length"]]
    return min(number, *lengths)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_is_let_go_that_a_decoder_refuses_amid_quiet_steps(
    *, ahead: bool
) -> None:
    """The next call tells of a refused request, whatever ended before."""
    small = {"max_model_len": 160}
    fleet = tiered(1, tier=TIER | small)
    data = data_of(TIGHT | {"async_scheduling": ahead}, fleet, 60, 12.0)
    data["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "uniform", "low": 60, "high": 240},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 60},
    }
    results = checked(Simulation(parse_config(data)))
    assert 0 < results.summary["rejected"] < 60
    assert results.summary["transfers"]["num_expired"] == 0
    assert results.summary["duration"] < 20  # a lease is 30 s
    check_the_same(results, Simulation(parse_config(data), stepwise=True).run())


# -- the port --------------------------------------------------------------------------


def end_of(taken: list[tuple[float, float, float]], num_bytes: float = 10.0) -> float:
    """Return when a transfer of an engine ends, of whose link others have a part.

    The link has 2 bytes a second; what is taken, from when and until when.
    """
    env = simpy.Environment()
    network = Network(env, [2.0, 9.0])
    ends_s = []
    network.begin(0, 1, num_bytes, 0.0, lambda: ends_s.append(env.now))
    for rate, begin_s, end_s in taken:
        network.take("out", 0, rate, begin_s, end_s)
    env.run()
    return ends_s[0] if ends_s else float("inf")


def test_copies_come_before_transfers() -> None:
    assert end_of([]) == 5.0
    assert end_of([(2.0, 1.0, 4.0)]) == 8.0  # it stands still
    assert end_of([(9.0, 1.0, 4.0)]) == 8.0  # as fast as the port: no debt is left
    assert end_of([(1.5, 0.0, 4.0)]) == pytest.approx(4.0 + 8.0 / 2.0)
    assert end_of([(2.0, 0.0, np.inf)]) == np.inf
    later = [(2.0, 1.0, np.inf), (2.0, 2.0, 3.0)]  # until they are said to end
    assert end_of(later) == 7.0
    assert end_of([(2.0, 1.0, 4.0), (0.0, 2.0, 2.0)]) == 6.0


def test_what_a_dead_engine_took_is_given_back() -> None:
    env = simpy.Environment()
    network = Network(env, [2.0, 9.0])
    ends_s = []
    network.begin(0, 1, 10.0, 0.0, lambda: ends_s.append(env.now))
    network.take("out", 0, 2.0, 0.0, np.inf)
    network.take("out", 0, 2.0, 7.0, np.inf)  # which will not come
    env.run(3.0)
    network.give_back(0)
    env.run()
    assert ends_s == [8.0]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 5), st.floats(0, 3)), max_size=6),
    st.floats(0.1, 20.0),
)
def test_a_port_is_never_wider_than_it_is(
    spans: list[tuple[float, float, float]], num_bytes: float
) -> None:
    taken, now_s = [], 0.0
    for rate, gap_s, length_s in spans:
        taken.append((rate, now_s + gap_s, now_s + gap_s + length_s))
        now_s += gap_s + length_s
    end_s = end_of(taken, num_bytes)
    gone = sum(
        min(rate, 2.0) * max(min(until_s, end_s) - begin_s, 0.0)
        for rate, begin_s, until_s in taken
    )
    assert num_bytes + gone == pytest.approx(2.0 * end_s)


def test_a_taking_without_an_end_that_has_yet_to_begin_is_ended() -> None:
    """Steps ahead tell of copies before they begin, and of their end before that."""
    env = simpy.Environment()
    network = Network(env, [1e9])
    network.take("out", 0, 1e9, 1.0, inf)
    assert network.is_taken("out", 0)
    network.take("out", 0, 1e9, 1.5, 1.2)
    env.run(until=2.0)
    assert not network.is_taken("out", 0)


def test_a_store_that_ends_while_its_engine_waits_gives_the_port_back() -> None:
    """Of conversations at a slow link, ahead; it was taken for ever, and none ended."""
    fleet = fleet_of(1, 1, links={"bytes_per_s": 1e8, "latency_s": 1e-3})
    extra = {"store_threshold": 2, "sync_load_budget_bytes": 10_000_000}
    engine = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "tensor_parallel_size": 4,
        "num_gpu_blocks_override": 2000,
        "kv_offloading_size": 0.5,
        "kv_transfer_config": {"kv_connector_extra_config": extra},
    }
    sessions = {
        "kind": "chat",
        "num_sessions": 20,
        "arrivals": {"kind": "poisson", "rate": 5},
        "turns": {"kind": "uniform", "low": 1, "high": 4},
        "prompt_tokens": {"kind": "uniform", "low": 81, "high": 1216},
        "output_tokens": {"kind": "fixed", "tokens": 1},
        "think_s": {"kind": "fixed", "value_s": 0.03},
    }
    data = {
        "workload": {"sessions": sessions, "max_tokens": 1},
        "engine": engine,
        "fleet": fleet,
        "cost": {"kind": "roofline"},
        "seed": 3,
    }
    summary = Simulation(parse_config(data)).run().summary
    assert summary["completed"] == summary["num_requests"]
    assert summary["duration"] < 60.0


def test_pulls_wait_for_stores_where_both_share_the_port() -> None:
    """The other way round nothing changes: copies, and steps, are as without pulls."""
    slow = TIER | {"kv_offloading_link": {"store_bytes_per_s": 1e9}}
    shared_port, apart = (
        checked(simulation_of(tiered(0, tier=slow, links={"bytes_per_s": 1e9, **more})))
        for more in ({}, {"shares_gpu_port": False})
    )
    means = [
        each.summary["transfers"]["mean_transfer_ms"] for each in (shared_port, apart)
    ]
    assert means[0] > 1.2 * means[1]
    for results in (shared_port, apart):
        assert results.summary["completed"] == 90
        copies = copies_of(results, "store")
        spans_s = copies["end_s"] - copies["begin_s"]
        alone_s = copies["num_bytes"] / 1e9
        assert (spans_s > 0.99 * alone_s).all()
    pulls = copies_of(shared_port, "pull")
    assert (pulls["num_bytes"] / (pulls["end_s"] - pulls["begin_s"])).max() < 1.001e9


def test_links_between_gpus_have_lanes_of_their_own() -> None:
    """NVLink and xGMI do not go through the port to the host."""
    assert port_of("nvlink4") is None
    rates = port_of("infiniband_ndr").bytes_per_s
    assert rates == pytest.approx({"out": 5e10, "in": 5e10})


def test_copies_that_take_no_time_leave_the_port_to_others() -> None:
    free = {"kv_offloading_size": 1.0}
    data = data_of(TIGHT, tiered(0, tier=free))
    data["cost"] = {"kind": "linear", "base_s": 0.01}  # swapped_block_s is 0
    engines: Any = Simulation(parse_config(data)).engine
    rates = engines.engines[0].beside.port.bytes_per_s
    assert rates == {"out": 0.0, "in": 0.0}
    assert checked(Simulation(parse_config(data))).summary["stored_blocks"] > 0


def port_of(interconnect: str) -> Any:
    simulation = simulation_of(tiered(0, links={"interconnect": interconnect}))
    engines: Any = simulation.engine
    return engines.engines[0].beside.port


# -- both paths, deaths ---------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pools", [(0,), (1,), (0, 1)])
def test_stepwise_it_is_the_same(pools: tuple[int, ...], ahead: bool) -> None:
    connector = {"asks_tier_first": 1 in pools}
    slow = TIER | {"kv_offloading_link": {"store_bytes_per_s": 2e9}}
    fleet = tiered(*pools, tier=slow, connector=connector)
    engine = TIGHT | {"async_scheduling": ahead}
    is_the_same_stepwise(fleet, engine, num_requests=50)


def test_a_tier_is_gone_when_the_last_quiet_step_has_ended() -> None:
    """A decoder drains with decodes alone, which are written down at once."""
    events = [event(0.68, "drain", 2), event(0.8, "drain", 3), event(1.24, "start", 3)]
    engine = TIGHT | {
        "num_gpu_blocks_override": 45,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "async_scheduling": True,
    }
    fleet = tiered(1, events=events, links={"bytes_per_s": 1e9, "handshake_s": 0.01})
    is_the_same_stepwise(fleet, engine, num_requests=40)


def test_a_step_in_which_a_port_is_taken_is_looked_up_from() -> None:
    """In chunks: what a step's stores take is set at events, which have an order."""
    link = {"kv_offloading_link": {"store_bytes_per_s": 2e9}}
    engine = TIGHT | {
        "num_gpu_blocks_override": 45,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    fleet = tiered(0, tier=TIER | link, links={"bytes_per_s": 1e8})
    is_the_same_stepwise(fleet, engine, num_requests=40)


def test_a_prefiller_dies_while_it_stores() -> None:
    slow = TIER | {"kv_offloading_link": {"store_bytes_per_s": 2e8}}
    events = [event(0.4, "die", 0), event(0.9, "start", 0)]
    connector = {"kv_load_failure_policy": "recompute"}
    fleet = tiered(0, 1, tier=slow, events=events, connector=connector)
    assert checked(simulation_of(fleet)).summary["completed"] == 90


def test_clients_leave_while_a_prefiller_loads() -> None:
    """The run ends before the last load does, which holds blocks until then."""
    slow = TIER | {"kv_offloading_link": {"load_bytes_per_s": 1e7}}
    data = data_of(TIGHT | {"enable_prefix_caching": False}, None)
    data["workload"] = SESSIONS | {"client": {"timeout_s": 0.4, "max_retries": 0}}
    simulation = Simulation(parse_config(data | {"fleet": tiered(0, tier=slow)}))
    assert checked(simulation).summary["aborted"] > 0
    engines: Any = simulation.engine
    prefillers = [each.scheduler for each in engines.engines[:2]]
    assert any(each.delayed for each in prefillers)


def test_a_prefiller_dies_while_it_loads() -> None:
    """Nothing tells an engine that is gone of the end of its loads."""
    slow = TIER | {"kv_offloading_link": {"load_bytes_per_s": 1e7}}
    events = [event(1.3, "die", 0)]
    fleet = tiered(0, tier=slow, events=events, router={"kind": "session"})
    simulation = sessions_of(fleet, enable_prefix_caching=False)
    assert checked(simulation).summary["completed"] == 36
    engines: Any = simulation.engine
    dead = engines.engines[0]
    assert dead.beside.tier.link.is_copying(JobKind.LOAD)
    assert len(dead.scheduler.delayed) == 2


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    histories(),
    tight_engines(),
    st.sampled_from([(0,), (1,), (0, 1)]),
    st.sampled_from([1e8, 2e9, 5e10]),
    st.booleans(),
)
def test_in_all_histories_it_is_the_same_stepwise(
    fleet: dict[str, Any],
    engine: dict[str, Any],
    pools: tuple[int, ...],
    rate: float,
    first: bool,
) -> None:
    link = {"store_bytes_per_s": rate, "load_bytes_per_s": rate}
    for place in pools:
        fleet["pools"][place]["engine"] = TIER | {"kv_offloading_link": link}
    fleet["connector"]["asks_tier_first"] = first and 1 in pools
    checked(simulation_of(fleet, engine, num_requests=40, rate=60.0))
    is_the_same_stepwise(fleet, engine, num_requests=40, rate=60.0)


# -- misuse ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        (
            tiered(0, connector={"asks_tier_first": True}),
            "fleet.connector.asks_tier_first: .* none has a tier; give a decode pool",
        ),
        (
            tiered(links={"bytes_per_s": 1e9, "shares_gpu_port": True}),
            "fleet.links.shares_gpu_port: .* no pool has one; give one kv_offloading",
        ),
        (
            tiered(
                0,
                tier=TIER
                | {"kv_transfer_config": {"kv_load_failure_policy": "recompute"}},
            ),
            "fleet.connector.kv_load_failure_policy: .* pool p says recompute; give it",
        ),
        (
            tiered(
                0,
                tier=TIER
                | {
                    "kv_transfer_config": {
                        "kv_connector_extra_config": {"write_policy": "write_back"}
                    }
                },
            ),
            "the tier of an engine of a pair stores what is computed, got write_policy",
        ),
        (
            tiered(0, tier=TIER | {"data_parallel_size": 2}),
            "KV offloading with data_parallel_size above 1 is not built",
        ),
    ],
)
def test_refused(fleet: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulation_of(fleet)
