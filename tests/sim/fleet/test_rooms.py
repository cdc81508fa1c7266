"""SGLang's prefill and decode pools: slots before prompts, sends, deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config.tables import load_config, parse_config
from sim.costs.steps.ahead import HostAhead
from sim.errors import ConfigError
from sim.fleet.engines import Engines
from sim.fleet.rooms import SenderSteps, meeting_of
from sim.scheduler.batch import EMPTY_SHAPE, BatchShape
from sim.scheduler.request import RequestStatus
from sim.scheduler.sglang.decode import DecodeScheduler
from sim.scheduler.sglang.prefill import PrefillScheduler
from sim.scheduler.sglang.requests import Mode
from sim.scheduler.sglang.rooms import Room
from sim.scheduler.sglang.settings import Disaggregation, Settings
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.shared import ROOT
from tests.sim.build import request_from_spec, spec
from tests.sim.fleet.test_pairs import comings_and_goings, event, fleet_of
from tests.sim.fleet.test_run import SESSIONS, data_of

if TYPE_CHECKING:
    from sim.results.run import Results
    from sim.scheduler.request import Request

TIGHT: dict[str, Any] = {
    "scheduler": "sglang",
    "max_total_tokens": 2400,
    "max_model_len": 1024,
}
LIMITS = {"max_total_num_tokens": 2400, "max_running_requests": 8, "context_len": 2000}


def decoder(reserve: int = 512, **more: Any) -> DecodeScheduler:
    side = Disaggregation("decode", reserve)
    return DecodeScheduler(Settings(**LIMITS | more, kv_transfer=side))


def arriving(number: int, num_prompt: int, num_outputs: int = 50) -> Request:
    request = request_from_spec(
        spec(number, 0.0, num_prompt, num_outputs), num_prompt + num_outputs
    )
    request.kv_transfer_params = {"bootstrap_room": Room(0.0)}
    return request


def room_of(request: Request) -> Room:
    parameters: Any = request.kv_transfer_params
    room: Room = parameters["bootstrap_room"]
    return room


# -- rules, by their source -----------------------------------------------------------


def test_slots_are_given_while_reserves_hold() -> None:
    """2,400 less 100 + 512 three times leaves 564, which 612 do not fit into."""
    scheduler = decoder()
    requests = [arriving(number, 100) for number in range(5)]
    for request in requests:
        scheduler.add_request(request)
    assert scheduler.rests(0.0)
    assert scheduler.allocated == requests[:3]
    assert [room_of(each).is_allocated for each in requests] == [True] * 3 + [False] * 2
    assert scheduler.cache_usage().num_physical_blocks == 300
    assert requests[0].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert scheduler.rests(1.0)  # 2,100 free, 3 x 512 of them kept
    assert len(scheduler.allocated) == 3
    scheduler.check()


def test_the_first_that_does_not_fit_holds_up_the_others() -> None:
    scheduler = decoder()
    requests = [arriving(0, 1500), arriving(1, 1500), arriving(2, 10)]
    for request in requests:
        scheduler.add_request(request)
    assert scheduler.rests(0.0)
    assert scheduler.allocated == requests[:1]


def test_a_request_must_come_to_its_limit_if_all_others_leave() -> None:
    """Of 2,400 a prompt of 1,000 that may write 1,400 fits, but not beside another."""
    scheduler = decoder(0, context_len=4000)
    first, second = arriving(0, 10, 10), arriving(1, 1000, 1400)
    scheduler.add_request(first)
    scheduler.add_request(second)
    assert scheduler.rests(0.0)
    assert scheduler.allocated == [first]
    scheduler.abort(first)
    assert scheduler.rests(0.0)
    assert scheduler.allocated == [first, second]


def test_what_never_fits_is_refused() -> None:
    assert decoder().admission_error(arriving(0, 1888)) is None
    error = decoder().admission_error(arriving(0, 1889))
    assert error is not None
    assert "a prompt of 1889 tokens never fits the decoder: with 512" in error


def test_slots_wait_for_the_handshake_and_for_no_other() -> None:
    scheduler = decoder()
    late, soon = arriving(0, 10), arriving(1, 10)
    room_of(late).met_s = 1.0
    for request in (late, soon):
        scheduler.add_request(request)
    assert scheduler.rests(0.5)
    assert scheduler.allocated == [soon]
    assert scheduler.rests(1.0)
    assert scheduler.allocated == [soon, late]


def step(scheduler: DecodeScheduler, now_s: float) -> Any:
    """Take a step; return its batch, all of which got a token that may get one."""
    output = scheduler.schedule(now_s)
    delivery = scheduler.deliver(output)
    for request in delivery.requests:
        request.num_tokens += 1
    scheduler.update([])
    return output


def test_a_prebuilt_batch_brings_first_tokens_and_computes_nothing() -> None:
    scheduler = decoder()
    request = arriving(0, 100)
    scheduler.add_request(request)
    assert scheduler.rests(0.0)
    room_of(request).has_arrived = True
    assert not scheduler.rests(1.0)
    output = step(scheduler, 1.0)
    assert (output.mode.value, output.shape) == ("prebuilt", EMPTY_SHAPE)
    assert request.num_output_tokens == 1
    output = step(scheduler, 2.0)
    assert output.shape == BatchShape(1, 101, 0, 0, 0, 0)
    assert request.num_output_tokens == 2
    assert scheduler.cache_usage().num_physical_blocks == 101


def test_no_more_run_than_may() -> None:
    scheduler = decoder(0, max_running_requests=2)
    requests = [arriving(number, 10) for number in range(4)]
    for request in requests:
        scheduler.add_request(request)
        room_of(request).has_arrived = True
    assert not scheduler.rests(0.0)  # twice as many rows as may run besides
    assert scheduler.joined == requests
    assert step(scheduler, 0.0).scheduled == requests[:2]
    assert step(scheduler, 1.0).scheduled == requests[:2]
    assert scheduler.num_waiting == 2


def test_a_retraction_is_a_copy_to_the_host() -> None:
    """Four of 20 tokens fill 100 after five more each: one goes, and comes back."""
    scheduler = decoder(0, max_total_num_tokens=100)
    requests = [arriving(number, 20, 20) for number in range(4)]
    for request in requests:
        scheduler.add_request(request)
        room_of(request).has_arrived = True
    assert not scheduler.rests(0.0)
    assert scheduler.joined == requests
    for now_s in range(6):
        assert not step(scheduler, float(now_s)).preemptions
    output = step(scheduler, 6.0)
    (preemption,) = output.preemptions
    victim = preemption.request
    assert (preemption.mode.value, preemption.num_tokens_lost) == ("swap", 0)
    assert preemption.num_blocks_moved == output.shape.num_swapped_out_blocks == 25
    assert (victim.status, victim.num_tokens) == (RequestStatus.SWAPPED, 26)
    assert (scheduler.num_running, scheduler.num_swapped) == (3, 1)
    newcomer = arriving(4, 1, 1)
    scheduler.add_request(newcomer)
    step(scheduler, 7.0)
    assert not room_of(newcomer).is_allocated  # the one that was retracted is first
    scheduler.abort(next(each for each in requests if each is not victim))
    step(scheduler, 8.0)  # which gives it its last token
    output = step(scheduler, 9.0)
    assert output.mode.value == "prebuilt"
    assert output.shape == EMPTY_SHAPE._replace(num_swapped_in_blocks=25)
    assert (victim.status, victim.num_tokens) == (RequestStatus.RUNNING, 26)
    assert room_of(newcomer).is_allocated
    step(scheduler, 10.0)
    assert victim.num_tokens == 27
    scheduler.check()


def test_a_prompt_is_sent_by_whole_pages_and_held_until_then() -> None:
    side = Disaggregation("prefill")
    limits = LIMITS | {"page_size": 16, "chunked_prefill_size": 48}
    scheduler = PrefillScheduler(Settings(**limits, kv_transfer=side))
    prompt = arriving(0, 100, 1)
    scheduler.add_request(prompt)
    assert scheduler.rests()
    room_of(prompt).is_allocated = True
    assert not scheduler.rests()
    for now_s in (0.0, 1.0, 2.0):
        delivery = scheduler.deliver(scheduler.schedule(now_s))
        for request in delivery.requests:
            request.num_tokens += 1
            request.move_to(RequestStatus.FINISHED_STOPPED)
        scheduler.update(delivery.requests)
    sent = [(send.num_pages, send.is_last) for send in scheduler.sends]
    assert sent == [(3, False), (3, False), (1, True)]
    assert list(scheduler.in_flight) == [prompt]
    assert scheduler.num_running == scheduler.num_waiting == 0
    scheduler.check()
    assert scheduler.cache_usage().num_physical_blocks == 7
    scheduler.release([prompt])
    assert scheduler.cache_usage().num_physical_blocks == 0
    assert scheduler.tree is not None
    assert scheduler.tree.num_evictable_tokens == 96
    scheduler.check()


# -- a step ahead ----------------------------------------------------------------------


def tokens_of(scheduler: Any, output: Any) -> list[Request]:
    """Let a batch that was in flight end; return what got a token."""
    requests: list[Request] = scheduler.deliver(output).requests
    ended: list[Request] = []
    for request in requests:
        request.num_tokens += 1
        if request.num_tokens == request.oracle_num_tokens:
            request.move_to(RequestStatus.FINISHED_STOPPED)
            ended.append(request)
    scheduler.update(ended)
    return requests


def test_decodes_are_formed_before_first_tokens_are_told() -> None:
    """One that ends with its first token has a slot of the next batch, in vain."""
    scheduler = decoder(0, overlap=True)
    requests = [arriving(0, 10, 5), arriving(1, 20, 1)]
    for request in requests:
        scheduler.add_request(request)
        room_of(request).has_arrived = True
    assert not scheduler.rests(0.0)
    prebuilt = scheduler.schedule(0.0)
    assert (prebuilt.mode, prebuilt.shape) == (Mode.PREBUILT, EMPTY_SHAPE)
    decodes = scheduler.schedule(1.0)
    assert decodes.shape == BatchShape(2, 32, 0, 0, 0, 0)
    assert tokens_of(scheduler, prebuilt) == requests
    assert scheduler.cache_usage().num_physical_blocks == 11
    later = scheduler.schedule(2.0)
    assert later.shape == BatchShape(1, 12, 0, 0, 0, 0)
    assert tokens_of(scheduler, decodes) == requests[:1]
    assert scheduler.num_wasted_tokens == 1
    scheduler.check()


def test_a_first_token_counts_before_it_is_told() -> None:
    """Both have one output, so that the longer prompt goes; its token is told."""
    scheduler = decoder(0, max_total_num_tokens=41, overlap=True)
    short, long = arriving(0, 10, 20), arriving(1, 30, 1)
    for request in (short, long):
        scheduler.add_request(request)
        room_of(request).has_arrived = True
    assert not scheduler.rests(0.0)
    prebuilt = scheduler.schedule(0.0)
    decodes = scheduler.schedule(1.0)
    (preemption,) = decodes.preemptions
    assert (preemption.request, preemption.num_blocks_moved) == (long, 30)
    assert tokens_of(scheduler, prebuilt) == [short, long]
    assert long.status is RequestStatus.FINISHED_STOPPED  # which it was with that token
    assert (scheduler.num_running, scheduler.num_swapped) == (1, 0)
    scheduler.check()


def test_a_token_in_flight_of_what_is_retracted_is_computed_again() -> None:
    """Four of 20 and six decodes fill 104; the outputs of the sixth are under way."""
    scheduler = decoder(0, max_total_num_tokens=104, overlap=True)
    requests = [arriving(number, 20, 20) for number in range(4)]
    for request in requests:
        scheduler.add_request(request)
        room_of(request).has_arrived = True
    assert not scheduler.rests(0.0)
    in_flight = scheduler.schedule(0.0)
    for now_s in range(1, 7):
        output = scheduler.schedule(float(now_s))
        assert not output.preemptions
        assert tokens_of(scheduler, in_flight) == requests
        in_flight = output
    output = scheduler.schedule(7.0)
    (preemption,) = output.preemptions
    victim = preemption.request
    assert (victim.num_output_tokens, preemption.num_blocks_moved) == (6, 25)
    assert victim not in tokens_of(scheduler, in_flight)
    assert victim.num_output_tokens == 6
    scheduler.check()


def test_a_chunk_is_sent_when_its_batch_has_ended() -> None:
    side = Disaggregation("prefill")
    limits = LIMITS | {"page_size": 16, "chunked_prefill_size": 48, "overlap": True}
    scheduler = PrefillScheduler(Settings(**limits, kv_transfer=side))
    prompt = arriving(0, 100, 1)
    room_of(prompt).is_allocated = True
    scheduler.add_request(prompt)
    assert not scheduler.rests()
    sent: list[list[tuple[int, bool]]] = []
    in_flight = scheduler.schedule(0.0)
    for now_s in (1.0, 2.0):
        output = scheduler.schedule(now_s)
        assert not tokens_of(scheduler, in_flight)
        in_flight = output
        sent.append([(send.num_pages, send.is_last) for send in scheduler.sends])
    assert scheduler.rests()  # nothing is left to form
    assert tokens_of(scheduler, in_flight) == [prompt]
    sent.append([(send.num_pages, send.is_last) for send in scheduler.sends])
    assert sent[-1] == [(3, False), (3, False), (1, True)]
    assert [len(each) for each in sent] == [1, 2, 3]
    assert scheduler.in_flight.keys() == {prompt}
    scheduler.check()


# -- runs ------------------------------------------------------------------------------


def simulation_of(
    fleet: dict[str, Any],
    engine: dict[str, Any] = TIGHT,
    num_requests: int = 60,
    rate: float = 60.0,
    **workload: Any,
) -> Simulation:
    data = data_of(engine, fleet, num_requests, rate)
    data["workload"] |= {"max_tokens": 60} | workload
    return Simulation(parse_config(data))


def checked(simulation: Simulation) -> Results:
    """Run with proofs every few steps; nothing may be held at the end."""
    engines = simulation.engine
    assert isinstance(engines, Engines)
    results = simulation.run(check_every=3)
    for engine in engines.engines:
        scheduler: Any = engine.scheduler
        side: Any = engine.beside
        scheduler.check()
        if not side.is_dead:  # some were withdrawn in the very last step
            last = {*scheduler._ending, *getattr(scheduler, "_failed", ())}
            last.add(scheduler._dropping)
            in_flight = getattr(scheduler, "in_flight", {})
            last |= {
                in_flight[each] for each in in_flight if meeting_of(each).is_closed
            }
            assert scheduler.holdings.holders.keys() <= last
            assert not isinstance(side, SenderSteps) or not any(side._lots.values())
    assert not results.summary["stalled"]
    return results


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_lone_request_takes_what_its_parts_take(*, is_ahead: bool) -> None:
    """A prompt of five chunks, of which the last 44 tokens go when it is computed.

    A step ahead the first token comes when the host has prepared the step behind it:
    nothing runs meanwhile, so that the host is not hidden.
    """
    links = {"bytes_per_s": 2e10, "latency_s": 1e-4, "handshake_s": 0.02}
    engine = TIGHT | {"max_num_batched_tokens": 64, "async_scheduling": is_ahead}
    data = data_of(engine, fleet_of(1, 1, links=links))
    data["workload"]["synthetic"] |= {
        "num_requests": 1,
        "prompt_tokens": {"kind": "fixed", "tokens": 300},
        "output_tokens": {"kind": "fixed", "tokens": 3},
    }
    simulation = Simulation(parse_config(data))
    results = checked(simulation)
    request, pool = results.requests.iloc[0], simulation.pools[0]
    model = simulation.cost_model
    fixed_s, empty_s = 1e-4, model.step(EMPTY_SHAPE).total_s
    host_s = model.split(empty_s, 1)[0] if isinstance(model, HostAhead) else 0.0
    last_s = fixed_s + 44 * pool.capacity.block_bytes / 2e10
    assert request["ttft_queue_s"] == pytest.approx(0.02)  # until they have met
    assert request["ttft_transfer_s"] == pytest.approx(last_s)
    assert request["ttft_decode_s"] == pytest.approx(empty_s + host_s)
    assert request["num_transferred_tokens"] == 300
    assert request["num_output_tokens"] == 3
    pulls = results.recording.transfer_table
    assert pulls is not None
    shape = BatchShape(0, 0, 1, 64, 64, 64 * 65 // 2)
    first_s = model.step(shape).total_s + (host_s - empty_s) * is_ahead
    assert pulls["begin_s"][0] == pytest.approx(request["arrival_s"] + 0.02 + first_s)


def test_each_request_goes_to_two_engines() -> None:
    results = checked(simulation_of(fleet_of(router={"kind": "sglang_cache_aware"})))
    summary, requests = results.summary, results.requests
    assert summary["completed"] == 60
    assert requests["request_id"].tolist() == list(range(60))
    assert set(requests["engine"]) == {2, 3}
    assert set(requests["prefill_engine"]) == {0, 1}
    assert "leases" not in str(results)
    parts = ["queue", "prefill", "transfer", "decode"]
    split = requests[[f"ttft_{part}_s" for part in parts]]
    assert split.sum(axis=1).to_numpy() == pytest.approx(requests["ttft_s"])
    assert (split > -1e-12).all(axis=None)
    assert np.array_equal(
        requests["num_transferred_tokens"], requests["num_prompt_tokens"]
    )
    prefillers = [each for each in summary["engines"] if each["pool"] == "p"]
    assert sum(each["num_prompts"] for each in prefillers) == 60


def test_prompts_that_share_a_prefix_are_sent_whole() -> None:
    data = data_of(TIGHT | {"max_total_tokens": 9000}, fleet_of(1, 1))
    data["workload"] = SESSIONS
    results = checked(Simulation(parse_config(data)))
    assert results.summary["completed"] == results.summary["num_requests"] == 36
    requests = results.requests
    assert requests["num_cached_tokens"].sum() > 0  # the prefiller's
    assert np.array_equal(
        requests["num_transferred_tokens"], requests["num_prompt_tokens"]
    )


def test_a_decoder_that_is_short_copies_and_recomputes_nothing() -> None:
    engine = TIGHT | {"max_total_tokens": 400}
    fleet = fleet_of(connector={"num_reserved_decode_tokens": 8})
    data = data_of(engine, fleet, 60, 300.0)
    data["workload"]["max_tokens"] = 60
    data["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": 30},
        "output_tokens": {"kind": "uniform", "low": 30, "high": 60},
    }
    summary = checked(Simulation(parse_config(data))).summary
    assert summary["num_preemptions_swap"] == summary["num_preemptions"] > 0
    assert summary["swapped_in_blocks"] == summary["swapped_out_blocks"] > 0
    assert summary["recomputed_tokens"] == 0
    assert summary["completed"] == 60


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Fleets of which engines die, drain and come back, and clients that leave."""
    events = draw(comings_and_goings())
    reserve = draw(st.sampled_from([64, 200, 512]))
    fleet = fleet_of(
        events=events,
        links={
            "bytes_per_s": draw(st.sampled_from([1e8, 1e9, 1e11])),
            "handshake_s": draw(st.sampled_from([0.0, 0.01])),
        },
        connector={"num_reserved_decode_tokens": reserve},
        router={"kind": draw(st.sampled_from(["round_robin", "llm_d"]))},
    )
    engine = TIGHT | {
        "max_total_tokens": draw(st.sampled_from([800, 1120, 2400])),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "max_num_seqs": draw(st.sampled_from([4, 16, 64])),
        "max_num_batched_tokens": draw(st.sampled_from([64, 512])),
        "async_scheduling": draw(st.booleans()),
        "engine_version": draw(st.sampled_from(["0.5.9", "0.5.19", "0.5.23"])),
    }
    return fleet, engine, draw(st.sampled_from([0.0, 0.3, 3.0]))


def is_conserved(case: tuple[dict[str, Any], dict[str, Any], float]) -> None:
    fleet, engine, timeout_s = case
    more: dict[str, Any] = {}
    if timeout_s:
        more = {"client": {"timeout_s": timeout_s, "max_retries": 1}}
    results = checked(simulation_of(fleet, engine, 40, 40.0, **more))
    requests, summary = results.requests, results.summary
    assert requests["request_id"].is_unique
    if timeout_s:
        return
    assert requests["request_id"].tolist() == list(range(40))
    gone = summary["num_lost"] + summary["rejected"]
    assert summary["completed"] + gone == 40


def test_a_refused_request_ends_no_run_in_which_others_are_held() -> None:
    """All 40 wait for a prefiller; the first prompt is one that none can serve."""
    events = [
        {"time_s": 0.125, "kind": "drain", "engine": 0},
        {"time_s": 0.125, "kind": "drain", "engine": 1},
        {"time_s": 1.0, "kind": "die", "engine": 2},
        {"time_s": 1.5, "kind": "start", "engine": 0},
    ]
    fleet = fleet_of(
        events=events,
        links={"bytes_per_s": 1e8, "handshake_s": 0.0},
        connector={"num_reserved_decode_tokens": 512},
    )
    engine = TIGHT | {
        "max_total_tokens": 800,
        "page_size": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "async_scheduling": False,
    }
    is_conserved((fleet, engine, 0.0))


@settings(max_examples=6, deadline=None)
@given(histories())
def test_no_request_and_no_slot_is_lost(case: Any) -> None:
    is_conserved(case)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(histories())
def test_no_request_and_no_slot_is_lost_in_many_histories(case: Any) -> None:
    is_conserved(case)


def test_a_prefiller_dies_while_it_sends() -> None:
    for fate in ("retry", "lose"):
        events = [event(0.4, "die", 0, requests=fate), event(0.9, "start", 0)]
        fleet = fleet_of(links={"bytes_per_s": 1e8}, events=events)
        summary = checked(simulation_of(fleet)).summary
        assert summary["transfers"]["num_failed"] > 0
        assert summary["completed"] + summary["num_lost"] == 60
        assert (summary["num_retried"] > 0) is (fate == "retry")


@pytest.mark.parametrize("is_decoder_first", [False, True])
def test_of_two_deaths_the_first_says_what_becomes_of_a_request(
    *, is_decoder_first: bool
) -> None:
    deaths = [event(0.6, "die", 0, requests="lose"), event(0.6, "die", 2)]
    fleet = fleet_of(
        links={"bytes_per_s": 1e8},
        events=deaths[::-1] if is_decoder_first else deaths,
        connector={"num_reserved_decode_tokens": 64},
    )
    results = checked(simulation_of(fleet, TIGHT | {"max_total_tokens": 800}, 40, 40.0))
    summary = results.summary
    assert min(summary["num_lost"], summary["num_retried"]) > 0
    assert summary["completed"] + summary["num_lost"] == 40
    lost = results.requests["status"] == "finished_aborted"
    assert lost.sum() == summary["num_lost"]


@pytest.mark.slow
def test_the_page_tells_what_the_example_shows() -> None:
    page = " ".join((ROOT / "docs/fleets.md").read_text(encoding="utf-8").split())
    for name, overrides in {
        "as it is": [],
        "`num_reserved_decode_tokens: 64`": [
            "fleet.connector.num_reserved_decode_tokens=64"
        ],
        "two decoders": ["fleet.pools.decode.replicas=2"],
    }.items():
        config = load_config(ROOT / "examples/fleet_sglang_pd.yaml", overrides)
        told = simulate(config).summary
        (pool,) = (each for each in told["pools"] if each["role"] == "decode")
        cells = (
            name,
            f"{told['ttft_split']['queue']['mean_queue_ms']:,.0f} ms",
            f"{told['mean_ttft_ms']:,.0f}, {told['p99_ttft_ms']:,.0f} ms",
            f"{told['mean_tpot_ms']:.0f} ms",
            f"{pool['kv_cache_usage_max']:.0%}".replace("%", " %"),
        )
        assert f"| {' | '.join(cells)} |" in page


# -- misuse --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "engine", "line"),
    [
        (
            fleet_of(connector={"kind": "nixl"}),
            {},
            "hand prompts on by sglang, got nix",
        ),
        (
            fleet_of(connector={"kv_lease_duration": 5}),
            {},
            "connector.kv_lease_duration: sglang has no such key",
        ),
        (
            fleet_of(proxy={"order": "decode_first"}),
            {},
            "proxy: SGLang's gateway sends a request to both",
        ),
        (
            fleet_of(links={"bytes_per_s": 1e9, "descriptor_s": 1e-6}),
            {},
            "links.descriptor_s: SGLang sends slots that lie side by side as one",
        ),
    ],
)
def test_refused(fleet: dict[str, Any], engine: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        simulation_of(fleet, TIGHT | engine)
    assert "\n" not in str(refused.value)
