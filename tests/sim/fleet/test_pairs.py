"""Prefill and decode pools: what becomes of prompts, blocks, links and deaths."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.fleet.network import Network
from sim.fleet.pairs import Pairs, side_of
from sim.fleet.pulls import ConsumerSteps, ProducerSteps
from sim.fleet.routers.llm_d import LlmD
from sim.results.summary.rows import summary_rows
from sim.simulation.run import Simulation
from sim.views.plots.accessor import figures_of
from sim.views.plots.run.fleets import engines_figure, has_pools, pools_figure
from tests.sim.cli.test_run_command import kvsim
from tests.sim.fleet.test_events import proven
from tests.sim.fleet.test_run import SESSIONS, TIGHT, data_of, tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sim.results.run import Results
    from sim.scheduler.request import Request

LINKS = {"bytes_per_s": 20e9, "latency_s": 0.002}


def fleet_of(prefill: int = 2, decode: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "pools": [
            {"name": "p", "replicas": prefill, "role": "prefill"},
            {"name": "d", "replicas": decode, "role": "decode"},
        ],
        "router": {"kind": "least_requests"},
        "links": LINKS,
    } | more


def simulation_of(
    fleet: dict[str, Any],
    engine: dict[str, Any] = TIGHT,
    *,
    num_requests: int = 90,
    rate: float = 60.0,
    stepwise: bool = False,
    **workload: Any,
) -> Simulation:
    data = data_of(engine, fleet, num_requests, rate)
    data["workload"] |= workload
    return Simulation(parse_config(data), stepwise=stepwise)


def checked(simulation: Simulation) -> Results:
    """Run with proofs every few steps; blocks must be free, leased or copied then."""
    engines = simulation.engine
    assert isinstance(engines, Pairs)
    results = proven(simulation)
    for place, engine in enumerate(engines.engines):
        scheduler: Any = engine.scheduler
        scheduler.check()
        side = side_of(engine)
        if isinstance(side, ConsumerSteps):
            held = list(scheduler.delayed)  # of requests that left while it read
            assert side.is_dead or len(side.reads) <= len(held)
        else:
            assert isinstance(side, ProducerSteps)
            held = list(scheduler.connector.pairing.held)
            tier = getattr(engine.beside, "tier", None)
            if tier is not None and tier.link.is_busy:
                held = list(scheduler.delayed)  # and those that left while it copied
        num_held = sum(len(scheduler.block_ids(each)) for each in held)
        assert engine.scheduler.cache_usage().num_physical_blocks <= num_held, place
    return results


@pytest.mark.parametrize("ahead", [False, True])
def test_each_request_goes_to_two_engines(ahead: bool) -> None:
    engine = TIGHT | {"async_scheduling": ahead}
    results = checked(simulation_of(fleet_of(), engine))
    summary, requests = results.summary, results.requests
    assert summary["completed"] == 90
    assert requests["request_id"].tolist() == list(range(90))
    assert set(requests["engine"]) == {2, 3}
    assert set(requests["prefill_engine"]) == {0, 1}
    parts = ["queue", "prefill", "transfer", "decode"]
    split = requests[[f"ttft_{part}_s" for part in parts]]
    assert split.sum(axis=1).to_numpy() == pytest.approx(requests["ttft_s"])
    assert (split >= 0).all(axis=None)
    assert (requests["ttft_transfer_s"] >= 0.002).all()
    prefillers = [each for each in summary["engines"] if each["pool"] == "p"]
    assert sum(each["num_prompts"] for each in prefillers) == 90
    assert summary["transfers"]["num_transfers"] == 90
    assert summary["transfers"]["num_expired"] == 0
    means = [summary["ttft_split"][part][f"mean_{part}_ms"] for part in parts]
    assert sum(means) == pytest.approx(summary["mean_ttft_ms"])


def test_the_parts_of_ttft_are_those_of_requests_that_were_served() -> None:
    """As its mean is: not also of those that gave up behind their first token."""
    client = {"timeout_s": 0.6, "max_retries": 0}
    front = {"client_to_queue_s": 0.01, "token_to_client_s": 0.02}
    data = data_of(TIGHT, fleet_of(1, 1), 90, 60.0) | {"front_end": front}
    data["workload"]["client"] = client
    results = Simulation(parse_config(data)).run()
    told, requests = results.summary, results.requests
    gave_up = requests["status"] == "finished_aborted"
    assert requests["first_token_s"][gave_up].notna().sum() > 3
    parts = ["queue", "prefill", "transfer", "decode"]
    means_ms = [told["ttft_split"][part][f"mean_{part}_ms"] for part in parts]
    assert sum(means_ms) + 30.0 == pytest.approx(told["mean_ttft_ms"])
    rows = dict(summary_rows(told))
    assert rows["mean TTFT of"].endswith(" ms, and 30 ms in the front end")


@pytest.mark.parametrize(("given", "ahead"), [(None, True), (False, False)])
def test_left_out_both_schedule_as_released(given: bool | None, ahead: bool) -> None:
    engine = TIGHT | {"async_scheduling": given}
    engines = simulation_of(fleet_of(1, 1), engine).engine.engines
    assert [each.batches is not None for each in engines] == [ahead, ahead]


def test_with_a_step_in_flight_both_hide_their_host() -> None:
    """A first token waits a step longer at the decoder, and all come sooner."""
    light: dict[str, Any] = {"num_requests": 40, "rate": 3.0}
    in_turn, ahead = (
        checked(
            simulation_of(fleet_of(1, 1), TIGHT | {"async_scheduling": each}, **light)
        ).summary
        for each in (False, True)
    )
    assert ahead["num_wasted_tokens"] == 40  # of decoders: prompts end at a limit
    assert ahead["overlapped_s"] > 0
    assert ahead["mean_tpot_ms"] < 0.9 * in_turn["mean_tpot_ms"]
    for part in ("prefill", "transfer"):
        of_both = [run["ttft_split"][part] for run in (in_turn, ahead)]
        assert of_both[1] == pytest.approx(of_both[0], rel=0.02)
    step_ms = ahead["mean_tpot_ms"]
    waits = [run["ttft_split"]["decode"]["mean_decode_ms"] for run in (in_turn, ahead)]
    assert 0 < waits[1] - waits[0] < step_ms


def test_a_lone_request_takes_what_its_parts_take() -> None:
    """A prompt of 10 blocks, whose bytes and descriptors are counted by hand."""
    links = {"bytes_per_s": 1e9, "latency_s": 0.01, "descriptor_s": 1e-5}
    data = data_of(TIGHT, fleet_of(1, 1, links=links), 1)
    data["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "fixed", "tokens": 150},
        "output_tokens": {"kind": "fixed", "tokens": 3},
    }
    simulation = Simulation(parse_config(data))
    pool = simulation.pools[0]
    request = simulation.run().requests.iloc[0]
    num_bytes = 10 * pool.capacity.block_bytes
    fixed_s = 0.01 + 1e-5 * 10 * pool.model.num_hidden_layers
    assert request["ttft_transfer_s"] == pytest.approx(fixed_s + num_bytes / 1e9)
    assert request["num_transferred_tokens"] == 160
    assert request["num_cached_tokens"] == 149  # the last one is computed again
    assert request["num_output_tokens"] == 3


def is_the_same_stepwise(fleet: dict[str, Any], engine: Any, **run: Any) -> Results:
    """Compare a run with one whose requests are looked at one by one; return it."""
    fast, slow = (
        simulation_of(fleet, engine, stepwise=way, **run).run() for way in (False, True)
    )
    check_the_same(fast, slow)
    return fast


def check_the_same(fast: Results, slow: Results) -> None:
    assert (fast.summary["path"], slow.summary["path"]) == ("fast", "stepwise")
    for name, table in tables(fast).items():
        order = ["engine", "step"] if name == "steps" else []
        one, other = table, tables(slow)[name]
        if order:
            one, other = (
                each.sort_values(order, ignore_index=True) for each in (one, other)
            )
        assert one.equals(other), name


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("router", "evictor"),
    [("round_robin", None), ("llm_d", "lfu"), ("sglang_cache_aware", None)],
)
def test_stepwise_it_is_the_same(router: str, evictor: str | None, ahead: bool) -> None:
    fleet = fleet_of(router={"kind": router}, decode_router={"kind": router})
    engine = TIGHT | {"async_scheduling": ahead, "evictor": evictor}
    assert is_the_same_stepwise(fleet, engine).summary["num_preemptions"] > 0


def shares_of_calls(
    engine: dict[str, Any], num_requests: int = 30
) -> tuple[float, float]:
    """Return how many of its steps a decoder is called for, and reads beside others."""
    links = {"bytes_per_s": 1e8, "latency_s": 0.3}
    simulation = simulation_of(
        fleet_of(1, 1, links=links), engine, num_requests=num_requests, rate=5.0
    )
    _, decoder = simulation.engine.engines
    form, called = decoder.scheduler.form, list[float]()

    def count(now_s: float) -> Any:
        called.append(now_s)
        return form(now_s)

    decoder.scheduler.form = count
    results = checked(simulation)
    assert results.summary["completed"] == num_requests
    assert results.recording.transfer_table is not None
    moves = results.recording.transfer_table.arrow.to_pandas()
    begins, ends = moves["begin_s"].to_numpy(), moves["end_s"].to_numpy()
    return len(called) / decoder.num_steps, float(np.mean(begins[1:] < ends[:-1]))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_decoder_goes_on_beside_what_it_reads(ahead: bool) -> None:
    """It is called when a request comes, and when it sees what has come or ended."""
    engine = TIGHT | {"async_scheduling": ahead, "num_gpu_blocks_override": 2000}
    calls, together = shares_of_calls(engine)
    assert together > 0.5
    assert calls < 0.25


@pytest.mark.parametrize("ahead", [False, True])
def test_what_leaves_while_it_is_read_is_counted_until_then(ahead: bool) -> None:
    """Also in stretches of decodes beside it."""
    client = {"client": {"timeout_s": 0.4, "max_retries": 0}}
    fleet = fleet_of(links=LINKS | {"bytes_per_s": 1e8})
    engine = TIGHT | {"async_scheduling": ahead}
    summary = is_the_same_stepwise(fleet, engine, **client).summary
    assert min(summary["aborted"], summary["completed"]) > 0


def test_a_decoder_short_of_blocks_lets_requests_wait() -> None:
    fleet = fleet_of(2, 1)
    results = checked(simulation_of(fleet, num_requests=60, rate=200.0))
    assert results.summary["completed"] == 60
    assert results.summary["num_preemptions"] > 0
    assert results.requests["ttft_queue_s"].max() > 0.5


def test_sessions_wait_for_both_engines() -> None:
    data = data_of(TIGHT, None) | {"workload": SESSIONS, "fleet": fleet_of()}
    results = checked(Simulation(parse_config(data)))
    assert results.summary["completed"] == results.summary["num_requests"] == 36


@pytest.mark.parametrize("order", ["prefill_first", "decode_first"])
@pytest.mark.parametrize("bytes_per_s", [1e8, 2e9])
def test_clients_leave_at_any_stage(order: str, bytes_per_s: float) -> None:
    links = {"bytes_per_s": bytes_per_s}
    data = data_of(
        TIGHT, fleet_of(2, 1, links=links, proxy={"order": order}), 40, 100.0
    )
    data["workload"]["client"] = {"timeout_s": 0.8, "max_retries": 1}
    requests = checked(Simulation(parse_config(data))).requests
    statuses = requests["status"].value_counts()
    assert statuses.sum() == len(requests)
    assert statuses["finished_aborted"] > 20


# -- links ---------------------------------------------------------------------------


def ends_of(
    flows: Sequence[tuple[float, int, int, float]], *bytes_per_s: float
) -> list[float]:
    """Return the ends of transfers that begin at times, with ends and bytes."""
    env = simpy.Environment()
    network = Network(env, bytes_per_s)
    ends_s = [0.0] * len(flows)

    def submit(index: int, begin_s: float, *flow: Any) -> Any:
        yield env.timeout(begin_s)

        def end() -> None:
            ends_s[index] = env.now

        network.begin(*flow, 0.0, end)

    for index, flow in enumerate(flows):
        env.process(submit(index, *flow))
    env.run()
    assert not network.flows
    return ends_s


def test_transfers_share_a_link() -> None:
    two = [(0.0, 0, 1, 10.0), (1.0, 0, 2, 4.0)]
    assert ends_of(two, 2.0, 9.0, 9.0) == pytest.approx([7.0, 5.0])


def test_what_one_end_cannot_use_goes_to_others() -> None:
    """Of a link of 10, one gets the 2 that its decoder takes, the other one 8."""
    two = [(0.0, 0, 1, 2.0), (0.0, 0, 2, 8.0)]
    assert ends_of(two, 10.0, 2.0, 20.0) == pytest.approx([1.0, 1.0])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=8),
)
def test_a_link_is_never_idle_with_work(flows: list[tuple[float, float]]) -> None:
    """The last end is that of any rule that keeps the link busy."""
    ends_s = ends_of([(begin, 0, 1, size) for begin, size in flows], 1.0, 100.0)
    free_s = 0.0
    for begin_s, size in sorted(flows):
        free_s = max(free_s, begin_s) + size
    assert max(ends_s) == pytest.approx(free_s)


def test_a_shared_link_is_processor_sharing() -> None:
    """M/M/1 with processor sharing: a transfer of x takes x / (1 - load) on average."""
    generator = np.random.default_rng(5)
    number, load = 6_000, 0.6
    begins_s = np.cumsum(generator.exponential(1 / load, number))
    sizes = generator.exponential(1.0, number)
    flows = [(b, 0, 1, s) for b, s in zip(begins_s, sizes, strict=True)]
    spans_s = np.array(ends_of(flows, 1.0, 100.0)) - begins_s
    for low, high in ((0.2, 0.6), (0.8, 1.4), (2.0, 4.0)):
        some = (sizes > low) & (sizes < high)
        slowdown = spans_s[some].sum() / sizes[some].sum()
        assert slowdown == pytest.approx(1 / (1 - load), rel=0.1)


# -- deciders ------------------------------------------------------------------------


def test_deciders_leave_prompts_to_decoders() -> None:
    proxy = {"order": "decode_first", "decider": {"kind": "prefix_based"}}
    fleet = fleet_of(proxy=proxy, decode_router={"kind": "llm_d"})
    none = checked(simulation_of(fleet)).summary  # the release's default
    assert (none["num_local_prompts"], none["completed"]) == (90, 90)
    assert none["transfers"]["num_transfers"] == 0
    proxy["decider"] = {"kind": "prefix_based", "non_cached_tokens": 200}
    results = checked(simulation_of(fleet))
    is_remote = results.requests["prefill_engine"] >= 0
    assert (is_remote == (results.requests["num_prompt_tokens"] >= 200)).all()
    assert 0 < is_remote.sum() < 90


@pytest.mark.parametrize(
    ("decider", "is_some"),
    [
        ({"kind": "isl_bounding"}, False),  # nothing of these prompts is cached
        ({"kind": "isl_bounding", "max_share": 1.1}, True),
        ({"kind": "prefill_load", "max_active_tokens": 100}, True),
        ({"kind": "isl_or_load", "max_active_tokens": 1e9}, False),
    ],
)
def test_deciders_of_dynamo(decider: dict[str, Any], is_some: bool) -> None:
    fleet = fleet_of(
        router={"kind": "dynamo_kv"},
        decode_router={"kind": "dynamo_kv", "overlap_score_credit": 0.0},
        proxy={"decider": decider},
    )
    summary = simulation_of(fleet, num_requests=40).run().summary
    assert summary["completed"] == 40
    assert (summary["num_local_prompts"] > 0) is is_some
    assert summary["transfers"]["num_transfers"] == 40 - summary["num_local_prompts"]


def test_figures_of_a_saved_run_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulation_of(fleet_of(), num_requests=20).run().write(tmp_path)
    assert kvsim(["plot", str(tmp_path), "--list", "--json"]) == 0
    assert {"engines", "pools"} < set(json.loads(capsys.readouterr().out)["run"])


def test_figures_of_pools() -> None:
    results = simulation_of(fleet_of(), num_requests=20).run()
    assert has_pools(results)
    usage, transfers, split = pools_figure(results).axes
    assert [text.get_text() for text in usage.get_legend().get_texts()] == [
        "p, 2 engines",
        "d, 2 engines",
    ]
    assert transfers.get_ylabel() == "mean number"
    assert len(split.patches) == 4
    load = engines_figure(results).axes[1]
    assert sum(bar.get_width() for bar in load.patches) == pytest.approx(4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prefiller_hears_of_a_prompt_that_a_decoder_refuses(*, ahead: bool) -> None:
    """0.33's server adds the request and aborts it, so that the connector tells."""
    fleet = fleet_of(1, 1)
    fleet["pools"][1]["engine"] = {"max_model_len": 160}
    engine = TIGHT | {"async_scheduling": ahead}
    lengths = {
        "prompt_tokens": {"kind": "uniform", "low": 100, "high": 200},
        "output_tokens": {"kind": "fixed", "tokens": 3},
    }
    data = data_of(engine, fleet, 40, 20.0)
    data["workload"]["synthetic"] |= lengths
    results = checked(Simulation(parse_config(data)))
    refused = results.summary["rejected"]
    assert 0 < refused < 40
    assert results.summary["completed"] == 40 - refused
    assert results.summary["transfers"]["num_expired"] == 0
    assert results.summary["duration"] < 10  # a lease is 30 s
    check_the_same(results, Simulation(parse_config(data), stepwise=True).run())


@pytest.mark.parametrize("router", ["aibrix_prefix", "dynamo_kv", "llm_d"])
def test_quiet_steps_end_where_leases_are_to_be_renewed(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a router that may look at an engine at any time."""
    renewed_s: list[float] = []
    extend = ProducerSteps.extend

    def noted(self: ProducerSteps, prompt: Request, now_s: float) -> None:
        renewed_s.append(now_s)
        extend(self, prompt, now_s)

    monkeypatch.setattr(ProducerSteps, "extend", noted)
    fleet = fleet_of(
        *(1, 1), decode_router={"kind": router}, connector={"kv_lease_duration": 6}
    )
    small = {"num_gpu_blocks_override": 40, "max_model_len": 600}
    fleet["pools"][1]["engine"] = small | {"max_num_active_seqs": 1}
    engine = {"num_gpu_blocks_override": 400, "async_scheduling": True}
    data = data_of(engine | {"max_model_len": 1024}, fleet, 10, 2.0)
    data["cost"] = {"kind": "constant", "step_s": 0.5}
    found = []
    for stepwise in (False, True):
        renewed_s.clear()
        Simulation(parse_config(data), stepwise=stepwise).run()
        found.append([*renewed_s])
    assert len(found[0]) > 50
    assert found[0] == found[1]


# -- deaths --------------------------------------------------------------------------


def event(time_s: float, kind: str, engine: int, **more: Any) -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, "engine": engine} | more


def slow_links(**more: Any) -> dict[str, Any]:
    return fleet_of(links={"bytes_per_s": 2e8}, **more)


def test_a_run_of_which_every_pull_failed_is_told() -> None:
    """There is no mean of those that did not fail; the line ended in a traceback."""
    fleet = fleet_of(
        *(2, 1), events=[event(2.0, "die", 0)], links={"bytes_per_s": 1e6}
    ) | {"connector": {"kv_load_failure_policy": "recompute"}}
    results = checked(simulation_of(fleet, num_requests=1))
    told = dict(summary_rows(results.summary))["transfers"]
    assert told.startswith("1, 0.0 GB, mean - ms; ")
    assert told.endswith(" 1 failed, 0 leases ended")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefiller_dies_while_others_read(policy: str) -> None:
    events = [event(0.4, "die", 0), event(0.9, "start", 0)]
    connector = {"kv_load_failure_policy": policy}
    results = checked(simulation_of(slow_links(events=events, connector=connector)))
    summary = results.summary
    failed = summary["transfers"]["num_failed"]
    assert failed > 0
    assert summary["completed"] == (90 if policy == "recompute" else 90 - failed)
    assert summary["num_lost"] == summary["aborted"] == 90 - summary["completed"]
    assert summary["unfinished"] == 0
    pulls = results.recording.transfer_table
    assert pulls is not None
    read = pulls.taken(pulls.is_one_of("kind", ["pull"]))
    transfers = summary["transfers"]
    assert transfers["num_bytes"] == read["num_bytes"].sum()
    assert transfers["num_tokens"] == read["num_tokens"].sum()
    assert transfers["num_tokens"] == results.requests["num_transferred_tokens"].sum()
    spans_s = read["end_s"] - read["begin_s"]
    assert transfers["mean_transfer_ms"] == pytest.approx(spans_s.mean() * 1e3)
    reasons = set(results.requests["reason"]) - {""}
    assert all("could not be read" in reason for reason in reasons)


def test_a_decoder_dies_while_it_reads() -> None:
    events = [event(0.4, "die", 3), event(0.9, "start", 3)]
    connector = {"kv_lease_duration": 6}
    results = checked(simulation_of(slow_links(events=events, connector=connector)))
    summary = results.summary
    assert summary["completed"] == 90
    assert summary["num_retried"] > 0
    assert results.requests["request_id"].tolist() == list(range(90))


def test_without_a_decoder_requests_wait_or_are_rejected() -> None:
    gone = [event(0.2, "die", 2), event(0.2, "die", 3)]
    back = [*gone, event(1.0, "start", 2)]
    assert checked(simulation_of(fleet_of(events=back))).summary["completed"] == 90
    summary = checked(simulation_of(fleet_of(events=gone))).summary
    assert summary["num_refused"] + summary["completed"] == 90
    assert summary["num_refused"] > 50


def test_a_prefiller_that_drains_waits_for_its_readers() -> None:
    events = [event(0.4, "drain", 0)]
    results = checked(simulation_of(slow_links(events=events)))
    assert results.summary["completed"] == 90
    pulls = results.recording.transfer_table
    assert pulls is not None
    last_s = pulls["end_s"][pulls["prefill_engine"] == 0].max()
    assert last_s > 0.4
    assert results.summary["up_s"][0] >= last_s


@st.composite
def comings_and_goings(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Events of four engines that die, drain and come back at any time."""
    is_on = [True] * 4
    events = []
    for time_s in sorted(draw(st.lists(st.floats(0.05, 1.5), max_size=6))):
        place = draw(st.integers(0, 3))
        kind = draw(st.sampled_from(["die", "drain"])) if is_on[place] else "start"
        more = {}
        if kind == "die" and draw(st.booleans()):
            more["requests"] = "lose"
        events.append(event(time_s, kind, place, **more))
        is_on[place] = kind == "start"
    return events


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Fleets of which engines die, drain and come back at any time."""
    events = draw(comings_and_goings())
    rate = draw(st.sampled_from([1e8, 1e9, 1e11]))
    policy = draw(st.sampled_from(["fail", "recompute"]))
    order = draw(st.sampled_from(["prefill_first", "decode_first"]))
    return fleet_of(
        events=events,
        links={"bytes_per_s": rate, "handshake_s": 0.01},
        connector={"kv_load_failure_policy": policy, "kv_lease_duration": 6},
        proxy={"order": order},
    )


def test_requests_that_fail_in_one_call_after_another_are_all_told() -> None:
    """The first ones' clients waited on, and gave up what had ended."""
    fleet = fleet_of(
        links={"bytes_per_s": 1e8, "handshake_s": 0.01},
        events=[
            {"time_s": 0.5, "kind": "drain", "engine": 0},
            {"time_s": 0.59375, "kind": "die", "engine": 1},
            {"time_s": 1.0, "kind": "start", "engine": 1},
        ],
        connector={"kv_load_failure_policy": "fail"},
    )
    engine = TIGHT | {
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    client = {"client": {"timeout_s": 0.3}}
    is_the_same_stepwise(fleet, engine, num_requests=40, **client)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(histories(), st.booleans())
def test_no_request_and_no_block_is_lost(fleet: dict[str, Any], ahead: bool) -> None:
    engine = TIGHT | {"async_scheduling": ahead}
    results = checked(simulation_of(fleet, engine, num_requests=40, rate=40.0))
    assert results.requests["request_id"].tolist() == list(range(40))
    summary = results.summary
    assert summary["completed"] + summary["num_lost"] + summary["num_refused"] == 40


@st.composite
def tight_engines(draw: st.DrawFn) -> dict[str, Any]:
    """Engines that are short of blocks, seats or budget."""
    return TIGHT | {
        "num_gpu_blocks_override": draw(st.sampled_from([45, 70, 200])),
        "max_model_len": 512,
        "max_num_seqs": draw(st.sampled_from([4, 64])),
        "max_num_batched_tokens": draw(st.sampled_from([64, 512])),
        "enable_prefix_caching": draw(st.booleans()),
        "evictor": draw(st.sampled_from([None, None, "lfu", "arc"])),
        "async_scheduling": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(histories(), tight_engines(), st.sampled_from([None, 0.3, 2.0]))
def test_in_all_histories_it_is_the_same_stepwise(
    fleet: dict[str, Any], engine: dict[str, Any], timeout_s: float | None
) -> None:
    client = {"client": {"timeout_s": timeout_s, "max_retries": 1}} if timeout_s else {}
    is_the_same_stepwise(fleet, engine, num_requests=40, rate=60.0, **client)


# -- misuse --------------------------------------------------------------------------


def without(key: str) -> dict[str, Any]:
    fleet = fleet_of()
    del fleet[key]
    return fleet


@pytest.mark.parametrize(
    ("fleet", "engine", "line"),
    [
        (without("links"), {}, "links: prefill and decode pools need them, got none"),
        (
            {"pools": fleet_of()["pools"][:1], "links": LINKS},
            {},
            "the role prefill needs one with the role decode",
        ),
        (
            {"pools": [{"name": "a", "replicas": 1}], "links": LINKS},
            {},
            "links: they connect prefill and decode pools, and all pools serve",
        ),
        (
            fleet_of(pools=[*fleet_of()["pools"], {"name": "s", "replicas": 1}]),
            {},
            "those that serve are not built beside",
        ),
        (fleet_of(links={}), {}, "links need either an interconnect, .* got neither"),
        (fleet_of(links={"bytes": 1}), {}, "links.bytes: unknown key; did you mean"),
        (fleet_of(links={"bytes_per_s": 0}), {}, "links.bytes_per_s: "),
        (fleet_of(links={"interconnect": "infini"}), {}, "unknown interconnect"),
        (fleet_of(connector={"kind": "sglang"}), {}, "hand prompts on by nixl, got sg"),
        (
            fleet_of(connector={"num_reserved_decode_tokens": 5}),
            {},
            "connector.num_reserved_decode_tokens: nixl has no such key",
        ),
        (fleet_of(proxy={"order": "both"}), {}, "order: must be one of prefill_first"),
        (
            fleet_of(proxy={"decider": {"kind": "isl_bounding"}}),
            {},
            "isl_bounding asks fleet.decode_router for cached_tokens",
        ),
        (
            fleet_of(
                proxy={"decider": {"kind": "prefix_based"}},
                decode_router={"kind": "llm_d"},
            ),
            {},
            "set fleet.proxy.order to decode_first",
        ),
        (fleet_of(), {"engine_version": "0.11"}, "a pair of engines is known of 0.33"),
        (fleet_of(), {"scheduler": "v0"}, "prefill and decode pools .* got v0"),
        (
            fleet_of(events=[event(1.0, "die", 0)], decode_router={"kind": "vllm_dp"}),
            {},
            "set_ready",
        ),
    ],
)
def test_refused(fleet: dict[str, Any], engine: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        simulation_of(fleet, TIGHT | engine)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_that_no_pool_holds_ends_the_run(asynchronous: bool) -> None:
    """Its lease is not renewed for ever, which is all that would happen."""
    fleet = fleet_of(1, 1)
    fleet["pools"][1]["engine"] = {"num_gpu_blocks_override": 16}
    engine = {"admission_check": False, "async_scheduling": asynchronous}
    told = simulation_of(fleet, TIGHT | engine, num_requests=12).run().summary
    assert told["stalled"]
    assert told["completed"] > 0
    assert told["completed"] + told["unfinished"] == 12
    assert told["transfers"]["num_expired"] > 0
    assert any(line.startswith("the queue stalled: ") for line in told["warnings"])


def test_queues_of_a_prefiller_tell_its_prompts() -> None:
    results = simulation_of(fleet_of(1, 1), num_requests=20).run()
    figures, runs = figures_of(results)
    figure = figures["queues"](runs)
    legend = " ".join(
        text.get_text() for each in figure.legends for text in each.get_texts()
    )
    assert "engine 0: 20 prompts for others, " in legend
    assert "engine 1: completed 20 requests, " in legend


def test_two_routers_that_scrape_let_a_stuck_run_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each took the other's next look for something that may move a request."""
    num_looks, own = itertools.count(), LlmD.hear

    def hear(router: LlmD, loads: Any) -> None:
        assert next(num_looks) < 5_000
        own(router, loads)

    monkeypatch.setattr(LlmD, "hear", hear)
    limits = {"max_model_len": 300, "max_num_batched_tokens": 24}
    engine = TIGHT | limits | {"admission_check": False}
    scraping = {"router": {"kind": "llm_d"}, "decode_router": {"kind": "llm_d"}}
    simulation = simulation_of(
        fleet_of(**scraping),
        engine,
        synthetic=data_of(engine, None, 6)["workload"]["synthetic"]
        | {"prompt_tokens": {"kind": "fixed", "tokens": 400}},
    )
    assert simulation.run().summary["stalled"]
