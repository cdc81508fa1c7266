"""SGLang's prefill and decode pools by the rules of 0.5.19 and later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.scheduler.batch import EMPTY_SHAPE, BatchShape
from sim.scheduler.request import RequestStatus
from sim.scheduler.sglang.prefill import PrefillScheduler
from sim.scheduler.sglang.requests import Mode
from sim.scheduler.sglang.settings import Disaggregation, Settings
from sim.simulation.run import Simulation
from tests.sim.fleet.test_pairs import fleet_of
from tests.sim.fleet.test_rooms import (
    LIMITS,
    TIGHT,
    arriving,
    checked,
    decoder,
    room_of,
    simulation_of,
    tokens_of,
)
from tests.sim.fleet.test_run import SESSIONS, data_of

if TYPE_CHECKING:
    from sim.scheduler.request import Request
    from sim.scheduler.sglang.decode import DecodeScheduler

LATER: dict[str, Any] = {"engine_version": "0.5.23"}


def joined(
    scheduler: DecodeScheduler, requests: list[Request], *awaited: Request
) -> Any:
    """Let requests come with their first token; return the batch of those that join."""
    for request in (*requests, *awaited):
        scheduler.add_request(request)
        room_of(request).has_arrived = request not in awaited
    assert not scheduler.rests(0.0)
    output = scheduler.schedule(0.0)
    assert (output.mode, output.shape, output.is_known) == (
        *(Mode.PREBUILT, EMPTY_SHAPE, True),
    )
    assert tokens_of(scheduler, output) == requests
    return output


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_join_and_decode_in_one_step(*, overlap: bool) -> None:
    """One that ends with its first token is in no decode, a step ahead either."""
    scheduler = decoder(0, overlap=overlap, **LATER)
    joined(scheduler, [arriving(0, 10, 5), arriving(1, 20, 1)])
    late = arriving(2, 10)
    scheduler.add_request(late)
    decodes = scheduler.schedule(1.0)
    assert decodes.shape == BatchShape(1, 11, 0, 0, 0, 0)
    assert not room_of(late).is_allocated  # queues are looked at once a step
    assert scheduler.num_wasted_tokens == 0
    tokens_of(scheduler, decodes)
    scheduler.schedule(2.0)
    assert room_of(late).is_allocated
    scheduler.check()


def test_a_request_that_finds_no_slot_beside_awaited_prompts_is_given_up() -> None:
    """Both prompts, of 10 and 20, come to an idle decoder: 2 of 32 slots are left."""
    scheduler = decoder(0, max_total_num_tokens=32, **LATER)
    running, awaited = arriving(0, 10, 18), arriving(1, 20, 2)
    joined(scheduler, [running], awaited)
    given_up: list[Request] = []
    for now_s in range(1, 5):
        output = scheduler.schedule(float(now_s))
        given_up += output.ignored
        tokens_of(scheduler, output)
    assert given_up == [running]
    assert running.status is RequestStatus.FINISHED_REJECTED
    assert "with all others retracted" in running.reason
    assert awaited.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert scheduler.cache_usage().num_physical_blocks == 20
    scheduler.check()


def test_a_prompt_is_asked_room_for_in_whole_pages() -> None:
    """Of 96 tokens 47 are left for a second prompt: it needs 32 + 17, or 17 + 17."""
    for version, num_allocated in (("0.5.21", 2), ("0.5.22", 1)):
        limits = {"max_total_num_tokens": 96, "page_size": 16}
        scheduler = decoder(17, **limits, engine_version=version)
        for number in range(2):
            scheduler.add_request(arriving(number, 17, 2))
        assert scheduler.rests(0.0)
        assert len(scheduler.allocated) == num_allocated


def test_slots_of_a_withdrawn_prompt_are_free_when_queues_are_looked_at() -> None:
    scheduler = decoder(0, **LATER)
    awaited, running = arriving(0, 100), arriving(1, 10)
    joined(scheduler, [running])
    tokens_of(scheduler, scheduler.schedule(1.0))
    scheduler.add_request(awaited)
    tokens_of(scheduler, scheduler.schedule(2.0))
    assert scheduler.cache_usage().num_physical_blocks == 112
    scheduler.abort(awaited)
    assert scheduler.num_waiting == 0
    assert scheduler.cache_usage().num_physical_blocks == 112
    tokens_of(scheduler, scheduler.schedule(3.0))
    assert scheduler.cache_usage().num_physical_blocks == 13
    scheduler.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_cached_pages_are_sent_when_their_prompt_begins(*, overlap: bool) -> None:
    """A step ahead that is behind the batch that runs, which may compute them."""
    side = Disaggregation("prefill")
    limits = LIMITS | {"page_size": 16, "overlap": overlap} | LATER
    scheduler = PrefillScheduler(Settings(**limits, kv_transfer=side))

    def begun(number: int) -> Any:
        prompt = arriving(number, 100, 1)
        prompt.tokens = first.tokens
        room_of(prompt).is_allocated = True
        scheduler.add_request(prompt)
        return scheduler.schedule(float(number))

    first = arriving(0, 100, 1)
    tokens_of(scheduler, begun(1))
    scheduler.sends.clear()
    output = begun(2)
    assert [(s.num_pages, s.is_last) for s in scheduler.sends] == (
        [] if overlap else [(6, False)]
    )
    tokens_of(scheduler, output)
    sent = [(send.num_pages, send.is_last) for send in scheduler.sends]
    assert sent == [(6, False), (1, True)]
    scheduler.check()


# -- runs ------------------------------------------------------------------------------


def test_first_tokens_are_told_while_decodes_run() -> None:
    """A step that brings them ends before the decodes ahead of it, which go on."""
    results = checked(simulation_of(fleet_of(1, 1), TIGHT | LATER))
    earlier = checked(simulation_of(fleet_of(1, 1)))
    assert results.summary["completed"] == earlier.summary["completed"] == 60
    means = [each.requests["ttft_decode_s"].mean() for each in (results, earlier)]
    assert means[0] < 0.6 * means[1]
    steps = results.steps
    decoding = steps[steps["engine"] == 1]
    told = decoding["output_s"].to_numpy()
    assert not np.isnan(told).any()
    brings = decoding["num_batched_tokens"].to_numpy() == 0
    assert (told[:-1][brings[1:]] > told[1:][brings[1:]]).any()
    is_told = results.requests["first_token_s"].to_numpy()
    assert np.isin(is_told, told).all()


def test_a_lone_request_is_told_its_first_token_at_once() -> None:
    data = data_of(TIGHT | LATER, fleet_of(1, 1))
    data["workload"]["synthetic"] |= {
        "num_requests": 1,
        "output_tokens": {"kind": "fixed", "tokens": 3},
    }
    simulation = Simulation(parse_config(data))
    request = checked(simulation).requests.iloc[0]
    empty_s = simulation.cost_model.step(EMPTY_SHAPE).total_s
    assert request["ttft_decode_s"] == pytest.approx(empty_s)
    assert request["num_output_tokens"] == 3


def test_sessions_are_served_by_both_sides() -> None:
    engine = TIGHT | LATER | {"max_total_tokens": 9000}
    data = data_of(engine, fleet_of(1, 1))
    data["workload"] = SESSIONS
    results = checked(Simulation(parse_config(data)))
    assert results.summary["completed"] == results.summary["num_requests"] == 36
    requests = results.requests
    assert requests["num_cached_tokens"].sum() > 0
    assert np.array_equal(
        requests["num_transferred_tokens"], requests["num_prompt_tokens"]
    )
