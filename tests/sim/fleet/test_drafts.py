"""Prefill and decode pools whose steps verify draft tokens."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.costs.linear import LinearCost
from sim.costs.steps.speculative import ModelDrafter
from sim.errors import ConfigError, SchedulerError
from sim.results.recording.drafts import DraftRecorder
from sim.scheduler.batch import BatchShape
from sim.scheduler.v1.connectors.settings import KVRole, KVTransferSettings
from sim.scheduler.v1.connectors.settings import OffloadSettings as Offload
from sim.scheduler.v1.settings import Settings
from sim.scheduler.v1.speculative_config import SpeculativeConfig, SpeculativeMethod
from sim.simulation.run import Simulation
from sim.studies.conformance import driver_of
from sim.studies.conformance.random_pairs import (
    random_pair_workload,
    random_pools_workload,
)
from sim.views.plots.accessor import figures_of
from tests.sim.fleet.test_pair_groups import GPT_OSS
from tests.sim.fleet.test_pairs import checked, fleet_of, simulation_of
from tests.sim.fleet.test_run import TIGHT, data_of
from tests.sim.scheduler.connectors.test_pairs import SIDE, pair, request, told

EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}
NGRAM = EAGLE | {"method": "ngram"}
ACCEPTED = {"acceptance": {"kind": "constant", "rate": 0.7}}


def pools(prefill: Any, decode: Any) -> dict[str, Any]:
    """Return a fleet with drafts of each pool; None for none."""
    fleet = fleet_of(1, 2)
    for pool, drafts in zip(fleet["pools"], (prefill, decode), strict=True):
        pool["engine"] = {"speculative_config": drafts}
    return fleet


# -- decisions -----------------------------------------------------------------------


def test_blocks_for_drafts_are_neither_handed_on_nor_loaded() -> None:
    side = SIDE | {"speculative": EAGLE}
    lines = list(pair(request(0, 10), prefill=side, decode=side).lines())
    # 10 tokens and 3 of the drafter: four blocks, of which three are computed
    assert lines[0]["bt"] == {"r0": [0, [1, 2, 3, 4]]}
    assert told(lines, "pull") == [(2, "D", [["r0", [1, 2, 3], [1, 2, 3], True]])]
    # the last token again, with empty drafts: 9 + 4 + 3 are four blocks
    assert told(lines, "sched")[1] == (6, "D", [["r0", 4, "n", 9]])
    assert told(lines, "acc")[0] == (6, "D", [["r0", 3, 0]])
    assert (6, "D", {"r0": [3, [4]]}) in told(lines, "bt")


@pytest.mark.parametrize(
    ("method", "num_pulled"), [("eagle", 3), ("draft_model", 2), ("ngram", 2)]
)
def test_a_drafter_of_hidden_states_lacks_the_last_block_of_a_hit(
    method: str, num_pulled: int
) -> None:
    side = SIDE | {"speculative": EAGLE | {"method": method}}
    first, again = request(0, 16), request(0, 16) | {"arrival_step": 20}
    lines = list(pair(first, again, prefill=side, decode=side).lines())
    pulls = [pull for _, _, pulls in told(lines, "pull") for pull in pulls]
    # of four blocks three may be hit, as the last token is computed
    assert [len(pull[1]) for pull in pulls] == [4, num_pulled - 1]


def test_a_load_leaves_room_for_a_step_with_drafts() -> None:
    """16 blocks: 12 for a load and three for its first step leave none to another."""
    side = SIDE | {"speculative": EAGLE | {"num_speculative_tokens": 4}}
    plain = pair(request(0, 46), request(0, 10), decode=SIDE)
    drafting = pair(request(0, 46), request(0, 10), prefill=side, decode=side)
    begun = [
        [time for time, _, _ in told(list(case.lines()), "pull")]
        for case in (plain, drafting)
    ]
    assert begun[0][0] == begun[1][0] == 2
    assert begun[0][-1] < begun[1][-1]


def test_a_prompt_that_leaves_no_room_for_drafts_is_refused() -> None:
    """It would wait for ever, as in the release."""
    drafts = EAGLE | {"num_speculative_tokens": 8}  # a step of 17 tokens, two blocks
    engine = TIGHT | {"num_gpu_blocks_override": 12, "max_model_len": 160}
    for length, is_served in ((144, True), (145, False)):
        data = data_of(engine | {"speculative_config": drafts}, fleet_of(1, 1), 1)
        data["workload"] |= ACCEPTED
        data["workload"]["synthetic"] |= {
            "prompt_tokens": {"kind": "fixed", "tokens": length},
            "output_tokens": {"kind": "fixed", "tokens": 2},
        }
        simulation = Simulation(parse_config(data))
        if is_served:
            assert simulation.run().summary["completed"] == 1
            continue
        with pytest.raises(ConfigError, match="takes 12 free blocks; the cache has 11"):
            simulation.run()


@pytest.mark.parametrize(("budget", "is_served"), [(3, True), (2, False)])
def test_a_budget_below_a_step_with_drafts_is_refused(
    budget: int, is_served: bool
) -> None:
    """The last token of a loaded prompt would wait for ever, as in the release."""
    drafts = NGRAM | {"num_speculative_tokens": 2}
    data = data_of(TIGHT | {"max_num_scheduled_tokens": budget}, fleet_of(1, 1), 2)
    data["fleet"]["pools"][1]["engine"] = {"speculative_config": drafts}
    data["workload"] |= ACCEPTED
    simulation = Simulation(parse_config(data))
    if is_served:
        assert simulation.run().summary["completed"] == 2
    else:
        with pytest.raises(ConfigError, match="3 tokens in all; a step has 2"):
            simulation.run()


def test_a_run_that_served_no_request_is_refused_although_it_stalled() -> None:
    """A decoder refuses what its prefillers computed and still hold."""
    engine = TIGHT | {"model": "Qwen/Qwen3-30B-A3B", "max_num_scheduled_tokens": 2}
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True}
    data = data_of(engine | ranks, fleet_of(1, 1), 8)
    data["fleet"]["pools"][1]["engine"] = {"speculative_config": NGRAM}
    data["workload"] |= ACCEPTED
    with pytest.raises(ConfigError, match="8 of 8 requests were rejected"):
        Simulation(parse_config(data)).run()


def test_an_engine_whose_blocks_alone_are_held_has_not_stalled() -> None:
    """Its prompts were refused by a decoder; nothing waits, and nothing runs."""
    engine = TIGHT | {"model": "Qwen/Qwen3-30B-A3B", "max_num_scheduled_tokens": 2}
    engine |= {"max_model_len": 24}  # prompts of 21 tokens have no room for drafts
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True}
    data = data_of(engine | ranks, fleet_of(1, 1), 8)
    data["fleet"]["pools"][1]["engine"] = {"speculative_config": NGRAM}
    data["workload"] |= ACCEPTED
    data["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "uniform", "low": 16, "high": 21},
        "output_tokens": {"kind": "fixed", "tokens": 1},
    }
    told = Simulation(parse_config(data)).run().summary
    assert told["completed"] > 0
    assert told["completed"] + told["rejected"] == 8
    assert not told["stalled"]
    assert not any("stalled" in line for line in told["warnings"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_pools_prove_themselves(asynchronous: bool) -> None:
    for seed in (3, 11):
        for draw in (random_pair_workload, random_pools_workload):
            workload = draw(
                seed, "0.33.0", async_scheduling=asynchronous, speculative=True
            )
            lines = list(driver_of(workload, check=True).lines())
            assert any(line.get("acc") for line in lines)


# -- runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_of_decoders_shorten_answers(ahead: bool) -> None:
    engine = TIGHT | {"async_scheduling": ahead}
    plain = simulation_of(fleet_of(1, 2), engine, num_requests=40).run().summary
    drafting = engine | {"speculative_config": EAGLE}
    run = simulation_of(fleet_of(1, 2), drafting, num_requests=40, **ACCEPTED)
    results = checked(run)
    summary = results.summary
    assert summary["completed"] == 40
    assert summary["median_tpot_ms"] < 0.7 * plain["median_tpot_ms"]
    assert 1.5 < summary["spec_decode_acceptance_length"] < 4.0
    pulls = results.recording.transfer_table
    assert pulls is not None
    block_bytes = run.pools[0].capacity.block_bytes
    assert block_bytes == 16 * 33 * 4096  # a layer more, for the drafter
    assert summary["transfers"]["num_bytes"] == block_bytes * pulls["num_blocks"].sum()
    # at the decoder each request is verified once with empty drafts, at least
    assert (results.requests["num_drafts"] >= 1).all()
    assert {"drafts", "engines", "pools"} <= figures_of(results)[0].keys()


def test_steps_of_a_slow_engine_last_until_the_next() -> None:
    """Rows of steps that verify drafts had the price of prompts of these tokens."""
    events = [{"time_s": 0.1, "kind": "slow", "engine": 1, "factor": 20.0}]
    engine = TIGHT | {"async_scheduling": False, "speculative_config": EAGLE}
    run = simulation_of(fleet_of(1, 1, events=events), engine, **ACCEPTED)
    for _, steps in run.run().steps.groupby("engine"):
        ends_s = (steps["start_s"] + steps["latency_s"]).to_numpy()
        assert (ends_s[:-1] <= steps["start_s"].to_numpy()[1:] + 1e-9).all()


@pytest.mark.parametrize("ahead", [False, True])
def test_looked_up_drafts_are_a_matter_of_decoders(ahead: bool) -> None:
    engine = TIGHT | {"async_scheduling": ahead}
    run = simulation_of(pools(None, NGRAM), engine, num_requests=40, **ACCEPTED)
    steps = checked(run).steps
    is_decoder = steps["engine"] > 0
    assert steps.loc[is_decoder, "num_drafts"].sum() > 0
    assert steps.loc[~is_decoder, "num_drafts"].sum() == 0
    assert run.pools[0].capacity.block_bytes == run.pools[1].capacity.block_bytes


def test_prefillers_may_draft_another_number() -> None:
    run = simulation_of(
        pools(EAGLE | {"num_speculative_tokens": 1}, EAGLE), num_requests=20, **ACCEPTED
    )
    assert checked(run).summary["completed"] == 20
    assert all(isinstance(each, DraftRecorder) for each in run.recorder.of_rank)


def test_a_drafter_whose_drafts_are_not_used_only_keeps_its_cache() -> None:
    model = LinearCost(1e-9, decode_s=1.0, prefill_token_s=10.0)
    shape = BatchShape(0, 0, 1, 4, 4, 10)
    assert ModelDrafter(model, 0).step(shape).total_s == pytest.approx(40)
    assert ModelDrafter(model, 3).step(shape).total_s == pytest.approx(40 + 1 + 1)
    run = simulation_of(
        fleet_of(1, 1), TIGHT | {"speculative_config": EAGLE}, **ACCEPTED
    )
    passes = [pool.cost_model.describe()["drafter"]["num_passes"] for pool in run.pools]
    assert passes == [1, 3]
    prefill, decode = (pool.cost_model.step(shape).parts for pool in run.pools)
    assert 0 < prefill[3] < decode[3]  # the drafter's output projection


@pytest.mark.parametrize(
    ("prefill", "decode", "line"),
    [
        (None, EAGLE, "need the same drafter, got none in p, eagle3 in d"),
        (EAGLE, EAGLE | {"method": "mtp"}, "got eagle3 in p, mtp in d"),
        (NGRAM, EAGLE, "got none in p, eagle3 in d"),
    ],
)
def test_both_need_the_same_drafter(prefill: Any, decode: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        simulation_of(pools(prefill, decode), **ACCEPTED)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ahead", [False, True])
def test_of_windows_only_the_end_is_moved_beside_drafts(ahead: bool) -> None:
    """Of full attention 13 layers, one is the drafter's; a block 12 tensors of windows.

    64 tokens lack the last block of a hit, which a drafter of hidden states computes
    again: a prompt that is hit as a whole is moved but for what lies before its end.
    """
    engine = GPT_OSS | {"async_scheduling": ahead, "speculative_config": EAGLE}
    run = simulation_of(fleet_of(2, 2), engine, num_requests=60, **ACCEPTED)
    results = checked(run)
    summary, pulls = results.summary, results.recording.transfer_table
    assert pulls is not None
    assert summary["completed"] == 60
    assert summary["spec_decode_acceptance_length"] > 1.5
    prompts = results.requests.set_index("request_id")["num_prompt_tokens"]
    num_pages = 0
    for number, num_tokens in zip(
        pulls["request_id"], pulls["num_tokens"], strict=True
    ):
        num_all = -(-prompts[number] // 16)
        first = num_all - -(-num_tokens // 16)
        num_passed = max(prompts[number] - 127, 0) // 16
        num_of_window = min(num_all - max(num_passed, first), 9)
        num_pages += (num_all - first) * 13 + num_of_window * 12
    num_bytes = num_pages * 16 * 8 * 64 * 2 * 2  # 8 heads of 64, in 16 bit
    assert summary["transfers"]["num_bytes"] == num_bytes


def test_a_tier_is_not_built_beside_drafts() -> None:
    drafts = SpeculativeConfig(SpeculativeMethod.EAGLE, 3)
    more: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "speculative_config": drafts,
    }
    Settings(**more, kv_transfer=KVTransferSettings(KVRole.CONSUMER))
    with pytest.raises(SchedulerError, match="CPU tier is not built beside drafts"):
        Settings(**more, offload=Offload(8))


def test_traffic_needs_to_say_how_many_are_accepted() -> None:
    with pytest.raises(ConfigError, match="how many drafts are accepted"):
        Simulation(simulation_of(pools(None, NGRAM)).config)
