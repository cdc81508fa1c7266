"""V1 engines, some of which compute prompts that others read."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.v1.specs import KVCacheLayout
from sim.engine.group_sampling import sampler_for
from sim.errors import ConfigError, SchedulerError
from sim.scheduler.v1.connectors.base import TransferReport
from sim.scheduler.v1.connectors.exchange import Exchange
from sim.scheduler.v1.connectors.pulling import ConsumerConnector
from sim.scheduler.v1.connectors.settings import KVRole, KVTransferSettings
from sim.scheduler.v1.connectors.settings import OffloadSettings as Offload
from sim.scheduler.v1.settings import Settings
from sim.studies.conformance import PairDriver, driver_of
from sim.studies.conformance.conform import Comparison, Coverage
from sim.studies.conformance.driver import make_scheduler, requests_of
from sim.studies.conformance.random_pairs import (
    random_pair_workload,
    random_pools_workload,
)
from sim.studies.conformance.random_v1 import as_workload
from sim.studies.conformance.shrink import shrunk
from tests.sim.build import request_from_spec, spec

if TYPE_CHECKING:
    from sim.scheduler.log.lines import Line
    from sim.studies.conformance import DecisionWorkload

SIDE = {
    "block_size": 4,
    "num_gpu_blocks": 17,  # 16 are usable
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 48,
    "scheduler_reserve_full_isl": True,
}


def pair(
    *requests: dict[str, Any], prefill: Any = SIDE, decode: Any = SIDE, **more: Any
) -> PairDriver:
    raw = [
        {"id": f"r{index}", "out_seed": 100 + index} | request
        for index, request in enumerate(requests)
    ]
    pace = {"route_delay": 1, "pull": [2, 2], "kv_lease_duration": 12} | more
    config = {"prefill": prefill, "decode": decode, "pd": pace}
    driver = driver_of(as_workload("case", "0.33.0", config, raw), check=True)
    assert isinstance(driver, PairDriver)
    return driver


def request(step: int, length: int, output_len: int = 3, **more: Any) -> dict[str, Any]:
    prompt = [[step + 1, length]]
    return {"arrival_step": step, "prompt": prompt, "output_len": output_len} | more


def told(lines: list[Line], key: str) -> list[tuple[int, str, Any]]:
    return [(line["t"], line["e"], line[key]) for line in lines if line.get(key)]


def test_a_consumer_says_six_times_a_lease_what_it_awaits() -> None:
    exchange = Exchange(KVCacheLayout.of_one_group(9, 4), None)
    consumer = ConsumerConnector(KVTransferSettings(KVRole.CONSUMER, 30), exchange)
    assert consumer.next_heartbeat_s == inf
    consumer.awaited[request_from_spec(spec(0, 0.0, 4, 1), 48)] = None
    assert consumer.next_heartbeat_s == 5.0


def test_a_prompt_is_computed_read_and_decoded() -> None:
    case = pair(request(0, 10))
    lines = list(case.lines())
    assert told(lines, "send") == [(1, "P", [["r0", 12]])]
    assert told(lines, "pull") == [(2, "D", [["r0", [1, 2, 3], [1, 2, 3], True]])]
    assert told(lines, "recv") == [(5, "D", ["r0"])]  # 2 + 3 blocks // 2
    assert told(lines, "sent") == [(6, "P", ["r0"])]
    assert told(lines, "sched")[1] == (6, "D", [["r0", 1, "n", 9]])
    assert told(lines, "fin") == [(0, "P", ["r0"]), (8, "D", ["r0"])]
    assert (case.ending, case.num_preemptions) == ("done", 0)


def test_blocks_that_nobody_reads_are_freed_when_the_lease_ends() -> None:
    lines = list(pair(request(0, 10), lost=["r0"]).lines())
    assert told(lines, "expired") == told(lines, "sent") == [(12, "P", ["r0"])]
    assert lines[-1]["free_end"] == [16]
    assert {line["e"] for line in lines} == {"P"}


def test_heartbeats_extend_leases_of_what_is_still_wanted() -> None:
    lines = list(pair(request(0, 10), pull=[30, 0]).lines())
    assert [t for t, *_ in told(lines, "heartbeat")] == list(range(2, 33, 2))
    assert not told(lines, "expired")
    assert told(lines, "sent") == [(33, "P", ["r0"])]


def test_a_failed_pull_is_computed_anew_or_ends_the_request() -> None:
    failing = {"fail_pulls": [0]}
    lines = list(
        pair(request(0, 10), **failing, kv_load_failure_policy="recompute").lines()
    )
    assert told(lines, "bad") == [(5, "D", ["r0"])]
    assert told(lines, "sched")[1] == (6, "D", [["r0", 10, "n", 0]])
    assert told(lines, "expired")  # it was never told that they are read
    lines = list(pair(request(0, 10), **failing).lines())
    assert told(lines, "errors") == [(5, "D", ["r0"])]
    assert not [t for t, engine, _ in told(lines, "sched") if engine == "D"]


TIERED = SIDE | {
    "enable_prefix_caching": False,
    "offload": {"cpu_chunks": 8, "offload_prompt_only": False},
    "worker": {"load": [2, 0]},
}


def test_a_prefiller_loads_from_its_tier_what_it_has_stored_for_others() -> None:
    same = request(20, 10) | {"prompt": [[1, 10]]}
    lines = list(pair(request(0, 10), same, prefill=TIERED).lines())
    assert told(lines, "store")[0] == (0, "P", [[0, "r0", 0, [1, 2], [0, 1]]])
    assert told(lines, "load") == [(20, "P", [[1, "r1", 0, [3, 2], [0, 1]]])]
    assert told(lines, "loaded") == [(22, "P", ["r1"])]
    assert (23, "P", [["r1", 2, "n", 8]]) in told(lines, "sched")  # the rest of it
    assert [pull[2][0][3] for pull in told(lines, "pull")] == [True, True]
    assert [t for t, *_ in told(lines, "sent")] == [6, 28]


@pytest.mark.parametrize("first", [True, False])
def test_a_decoder_reads_its_tier_or_the_prefiller_by_their_order(first: bool) -> None:
    """A hit in the tier costs the rest of the pull: the prefiller may let go."""
    same = request(20, 10) | {"prompt": [[1, 10]]}
    case = pair(request(0, 10), same, decode=TIERED, asks_tier_first=first)
    lines = list(case.lines())
    looks = [(t, look) for t, engine, look in told(lines, "look") if engine == "D"]
    assert looks[-1] == (22, [["r1", 0, 8 if first else 10]])
    waits = [pull[2][0][3] for pull in told(lines, "pull")]
    assert waits == [True, not first]
    last = [each for each in told(lines, "sched") if each[2][0][0] == "r1"][1]
    if first:
        assert told(lines, "load") == [(22, "D", [[2, "r1", 0, [3, 2], [0, 1]]])]
        assert told(lines, "sent")[-1] == (23, "P", ["r1"])  # at once
        assert last == (25, "D", [["r1", 2, "n", 8]])
    else:
        assert not told(lines, "load")
        assert last == (26, "D", [["r1", 1, "n", 9]])


def test_a_tier_that_is_not_sure_yet_holds_back_what_could_be_pulled() -> None:
    """The first request's chunks are being written when the second one is there."""
    same = request(6, 10) | {"prompt": [[1, 10]]}
    slow = TIERED | {"worker": {"store": [9, 0]}}
    lines = list(pair(request(0, 10), same, decode=slow).lines())
    looks = [look for _, engine, look in told(lines, "look") if engine == "D"]
    assert ["r1", 0, None] in [each for look in looks for each in look]
    assert len(told(lines, "pull")) == 2


def test_a_prompt_of_one_token_is_looked_up_again_once_it_is_read() -> None:
    """None of it is computed then, as its last token is computed for the output."""
    lines = list(pair(request(0, 1)).lines())
    assert told(lines, "recv") == [(4, "D", ["r0"])]
    looks = [each for each in told(lines, "look") if each[1] == "D"]
    assert looks == [(2, "D", [["r0", 0, 1]]), (5, "D", [["r0", 0, 0]])]
    assert told(lines, "sched")[1] == (5, "D", [["r0", 1, "n", 0]])
    assert told(lines, "bt")[-1] == (2, "D", {"r0": [0, [1]]})  # the same block


def test_what_is_aborted_before_its_pull_lets_the_producer_go() -> None:
    lines = list(
        pair(request(0, 40), request(0, 40), request(0, 20, abort_step=5)).lines()
    )
    pulls = [each for *_, pulls in told(lines, "pull") for each in pulls]
    assert [each[0] for each in pulls if not each[3]] == ["r2"]
    assert not told(lines, "expired")


def test_a_proxy_sends_prompts_and_requests_on_in_turn() -> None:
    requests = [request(0, 8) for _ in range(4)]
    lines = list(pair(*requests, prefill=[SIDE] * 3, decode=[SIDE] * 2).lines())
    fins = {(e, *names) for _, e, names in told(lines, "fin") if e[0] == "P"}
    assert fins == {("P0", "r0", "r3"), ("P1", "r1"), ("P2", "r2")}
    pulls = [
        (e, name, source) for _, e, [*_, (name, *_, source)] in told(lines, "pull")
    ]
    assert pulls == [("D0", "r2", "P2"), ("D1", "r3", "P0")]
    assert told(lines, "heartbeat")[0] == (2, "D0", {"P0": ["r0"], "P2": ["r2"]})


def test_a_decoder_that_is_chosen_first_counts_what_is_on_its_way() -> None:
    """Requests that are lost, or aborted on their way, count no longer."""
    requests = [request(0, 8, abort_step=3 if i == 2 else None) for i in range(3)]
    first = {"order": "decode_first", "decode_router": "least_requests"}
    case = pair(
        *(*requests, request(4, 8), request(4, 8)),
        **(first | {"decode": [SIDE] * 3, "route_delay": 9, "lost": ["r1"]}),
    )
    lines = list(case.lines())
    pulled = {e: p for *_, e, pulls in told(lines, "pull") for p in [pulls[0][0]]}
    assert len(pulled) == 3  # each has one of r0, r3, r4
    assert sorted(pulled.values()) == ["r0", "r3", "r4"]


def test_a_lease_ends_while_others_are_read() -> None:
    """One decoder reads for long; the other one never hears of its request."""
    side = SIDE | {"num_gpu_blocks": 33}
    lines = list(
        pair(
            *(request(0, 12), request(0, 12), request(0, 12)),
            **{"decode": [side] * 2, "pull": [40, 0], "lost": ["r1"]},
        ).lines()
    )
    assert told(lines, "expired") == [(12, "P", ["r1"])]
    assert told(lines, "recv") == [(42, "D0", ["r0"]), (42, "D1", ["r2"])]
    assert told(lines, "sent")[1:] == [(43, "P", ["r0", "r2"])]


def test_a_decoder_computes_a_prompt_that_is_not_to_be_read() -> None:
    lines = list(pair(request(3, 10, remote_prefill=False), request(3, 10)).lines())
    assert told(lines, "sched")[0] == (3, "P", [["r1", 10, "n", 0]])
    assert told(lines, "sched")[1] == (3, "D", [["r0", 10, "n", 0]])
    assert [name for *_, [(name, *_)] in told(lines, "pull")] == ["r1"]


@st.composite
def cases(draw: st.DrawFn) -> PairDriver:
    steps = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=10)))
    requests = [
        request(step, draw(st.integers(1, 40)), draw(st.integers(1, 6)))
        | (
            {"abort_step": step + draw(st.integers(0, 20))}
            if draw(st.booleans())
            else {}
        )
        for step in steps
    ]
    sides = st.lists(st.just(SIDE), min_size=1, max_size=3)
    return pair(
        *requests,
        prefill=draw(sides),
        decode=draw(sides),
        order=draw(st.sampled_from(["prefill_first", "decode_first"])),
        decode_router=draw(st.sampled_from(["round_robin", "least_requests"])),
        route_delay=draw(st.integers(0, 3)),
        pull=[draw(st.integers(0, 8)), draw(st.integers(0, 3))],
        kv_lease_duration=draw(st.integers(6, 20)),
        lost=[f"r{index}" for index in draw(st.sets(st.integers(0, 9), max_size=2))],
        fail_pulls=sorted(draw(st.sets(st.integers(0, 9), max_size=3))),
        kv_load_failure_policy=draw(st.sampled_from(["fail", "recompute"])),
    )


@given(cases())
@settings(max_examples=60)
def test_no_block_is_lost_between_engines(case: PairDriver) -> None:
    lines = list(case.lines())
    last = {line["e"]: line for line in lines}
    assert all(line["free_end"] == [16] for line in last.values())
    held = [name for *_, sends in told(lines, "send") for name, _ in sends]
    gone = [name for *_, names in told(lines, "sent") for name in names]
    assert sorted(held) == sorted(gone)


def test_a_run_that_ends_with_an_error_is_covered() -> None:
    """Its last line is of no engine, but of the driver."""
    workload = random_pair_workload(0, "0.33.0")
    error = {"t": 9, "error": "step 9: the engine would preempt a for ever"}
    lines = [{"t": 8, "e": "D", "preempt": ["a"]}, error]
    coverage = Coverage()
    coverage.add(workload, Comparison(None, lines))
    assert coverage.workloads_with["preempted decodes"] == 1


def test_random_pairs_reach_the_rules_of_pairs() -> None:
    coverage = Coverage()
    for seed in range(24):
        workload = random_pair_workload(seed, "0.33.0", async_scheduling=seed % 2 > 0)
        lines = list(driver_of(workload, check=True).lines())
        coverage.add(workload, Comparison(None, lines))
    met = coverage.workloads_with
    missing = {
        *("pulls", "pulls of nothing", "failed pulls", "failed requests"),
        *("expired leases", "heartbeats", "preempted decodes", "late frees"),
        *("wasted tokens", "aborts", "prefix hits", "preemptions"),
    } - (+met).keys()
    assert not missing


def test_a_pair_that_differs_is_made_small() -> None:
    """Keys of either engine, and of the way between them, are left out."""
    whole = random_pair_workload(3, "0.33.0")

    def pulls_late(workload: DecisionWorkload) -> bool:
        lines = list(driver_of(workload).lines())
        return any(each["t"] > 20 for each in lines if each.get("pull"))

    assert pulls_late(whole)
    small = shrunk(whole, pulls_late)
    assert len(small.requests) == 1
    pace, decode = small.config["pd"], small.config["decode"]
    assert not pace.keys() & {"lost", "fail_pulls"}
    assert decode["policy"] == "fcfs"
    assert not decode["enable_prefix_caching"]


def test_pools_that_differ_are_made_small() -> None:
    """Engines are left out, too."""
    whole = random_pools_workload(3, "0.33.0", prefillers=3, decoders=2)

    def pulls(workload: DecisionWorkload) -> bool:
        return any(line.get("pull") for line in driver_of(workload).lines())

    small = shrunk(whole, pulls)
    assert len(small.requests) == len(small.config["prefill"]) == 1
    assert len(small.config["decode"]) == 1
    assert not small.config["pd"].keys() & {"router", "decode_router", "order"}


def test_mistakes_are_a_line() -> None:
    short = SIDE | {"max_model_len": 40}
    with pytest.raises(ConfigError, match="need the same max_model_len, got 40 and 48"):
        pair(request(0, 8), decode=[SIDE, short])
    with pytest.raises(ConfigError, match="need the same block_size, got 4 and 8"):
        pair(request(0, 8), decode=SIDE | {"block_size": 8})
    config = {"prefill": SIDE, "pd": {}}
    with pytest.raises(ConfigError, match=r"config.decode: a pair needs this engine"):
        as_workload("case", "0.33.0", config, []).sides("decode")
    one = KVTransferSettings(KVRole.PRODUCER)
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "max_model_len": 8}
    back = Offload(num_chunks=1, write_policy="write_back")
    with pytest.raises(SchedulerError, match="of a pair stores what is computed, got"):
        Settings(**limits, kv_transfer=one, offload=back)
    with pytest.raises(
        SchedulerError, match=r"a pair of engines is known of 0\.33 only"
    ):
        Settings(**limits, kv_transfer=one, engine_version="0.32")
    with pytest.raises(SchedulerError, match="kv_load_failure_policy must be one of"):
        KVTransferSettings(KVRole.CONSUMER, kv_load_failure_policy="retry")


def test_a_last_one_that_gives_itself_up_beside_a_load_is_not_the_end() -> None:
    """Ten blocks: seven are of a prompt that has been read, and wait for their turn."""
    config = {
        **{"block_size": 8, "num_gpu_blocks": 11, "max_num_seqs": 1},
        **{"max_num_batched_tokens": 64, "max_model_len": 64},
        "enable_prefix_caching": False,
        "kv_transfer": {"kv_role": "kv_consumer"},
    }
    raw = [
        {"id": name, "arrival_step": 0, "prompt": [[seed, length]], "output_len": 40}
        | {"out_seed": 7}
        for seed, (name, length) in enumerate((("own", 13), ("read", 50)), 100)
    ]
    workload = as_workload("gives up", "0.33.0", config, raw)
    scheduler = make_scheduler(workload)
    sample = sampler_for(scheduler)
    own, read = requests_of(workload).values()
    read.kv_transfer_params = {"do_remote_prefill": True, "remote_block_ids": ([1],)}
    scheduler.add_request(read)
    for step in range(40):
        output = scheduler.schedule(float(step))
        if step == 0:
            scheduler.add_request(own)
        scheduler.update(sample(output, step, float(step)))
        scheduler.receive(TransferReport(moved=[read] if step == 3 else []))
        if output.preemptions:
            break
    assert (output.scheduled, output.stuck) == ([], False)
    assert scheduler.schedule(41.0).scheduled == [read]
