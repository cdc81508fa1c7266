"""Waves of data-parallel ranks beside the installed vLLM's loops and coordinator."""

from __future__ import annotations

from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from sim.costs.linear import LinearCost
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.lock_step import steps_together
from sim.engine.clients import hand_over
from sim.engine.clock import Clock
from sim.engine.group_sampling import sampler_for
from sim.engine.lock_step import LockStep
from sim.engine.loop import Engine
from sim.fleet.engines import Engines
from sim.fleet.network import Network
from sim.fleet.pulls import BlockSizes, ConsumerSteps, PullRules
from sim.results.fleet.pulls import PullLog
from sim.results.recording.recorder import Recorder
from sim.scheduler.hosted.api import installed_version, nearest_release
from sim.studies.conformance.driver import (
    hosted_scheduler,
    make_scheduler,
    requests_of,
)
from sim.studies.conformance.random_pairs import random_pair_workload
from sim.studies.conformance.random_v1 import random_workload
from tests.hosted.test_conform import minor, pytestmark, why_missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.steps.lock_step import RankStep
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.request import Request
    from sim.studies.conformance.workload import DecisionWorkload

    Arrivals = list[tuple[float, int, Request]]
    Steps = list[tuple[float, list[int]]]

__all__ = ["pytestmark"]

NUM_WORKLOADS, WORKLOADS_A_TEST = 60, 30
STEP_S = 1.0
"""Of every step, as fakes have it, too: which rank steps when is what is compared."""


def drawn(seed: int, release: str, *, ahead: bool, reads: bool) -> DecisionWorkload:
    """Return a workload of which each rank has the engine; all of it is served.

    The ranks are decoders where they are to read blocks.
    """
    workload = random_workload(seed, release, async_scheduling=ahead)
    if reads:
        (workload,) = random_pair_workload(seed, release).sides("decode")
    more = {"prefill_schedule_interval": 1, "async_scheduling": ahead}
    config = workload.config | more
    workload = workload.model_copy(update={"config": config})
    asked, requests = make_scheduler(workload), requests_of(workload)
    served = [
        raw.model_copy(update={"abort_step": None})
        for raw in workload.requests
        if asked.admission_error(requests[raw.id]) is None
    ]
    return workload.model_copy(update={"requests": served})


def arrivals_of(
    workload: DecisionWorkload,
    seed: int,
    num_ranks: int,
    *,
    reads: bool,
    source: Prefiller | None = None,
) -> Arrivals:
    """Return requests with times and ranks: bursts, and pauses that end waves."""
    draw, time_s, arrivals = Random(f"waves {seed}"), 0.0, []
    gap_s = draw.choice((1, 5, 20, 40))
    for request in requests_of(workload).values():
        time_s += gap_s * draw.choice((0.0, 0.1, 0.5, 1, 4)) * draw.random()
        time_s += 1e-3 * draw.random()
        request.arrival_s = time_s
        if reads and draw.random() < 0.8:
            request.kv_transfer_params = {
                "do_remote_prefill": True,
                "remote_block_ids": ([1],),
                "remote_engine": source,
                "remote_request": request,
            }
        arrivals.append((time_s, draw.randrange(num_ranks), request))
    return arrivals


class Prefiller:
    """Holds the blocks of all prompts."""

    is_dead, place = False, 0

    def told(self, prompt: Request) -> None:
        """Hear that a prompt has been read."""

    def extend(self, prompt: Request, now_s: float) -> None:
        """Hear that a prompt is wanted still."""


class AsTold:
    """Sends each request to its rank."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._places = {request.request_id: place for _, place, request in arrivals}

    def choose(self, request: Request) -> int:
        return self._places[request.request_id]

    def ended(self, request: Request, place: int) -> None:
        assert self.choose(request) == place


def ours(
    workload: DecisionWorkload,
    arrivals: Arrivals,
    num_ranks: int,
    *,
    ahead: bool,
    pull_s: float | None = None,
) -> tuple[Steps, int, dict[int, float]]:
    """Return the steps of all ranks, the number of waves, and when requests end."""
    env, begun = Clock(), []
    model = LinearCost(STEP_S, decode_s=0.0, prefill_token_s=0.0)
    price = steps_together(model)

    def noted(shapes: Sequence[BatchShape]) -> list[RankStep]:
        tokens = [shape.num_decodes + shape.num_prefill_tokens for shape in shapes]
        begun.append((env.now, tokens))
        return price(shapes)

    host = HostAhead(model) if ahead else None
    lock = LockStep(env, num_ranks, noted, host=host)
    schedulers = [make_scheduler(workload) for _ in lock.ranks]
    network = Network(env, [1.0] * num_ranks)

    def beside(place: int) -> ConsumerSteps | None:
        if pull_s is None:
            return None
        rules = PullRules((BlockSizes(1, 0.0, 0),), latency_s=pull_s)
        parts: Any = schedulers[place], model, place, network, rules, PullLog()
        return ConsumerSteps(*parts)

    engines = [
        Engine(
            env,
            each,
            model,
            Recorder(),
            sample=sampler_for(each),
            pace=pace,
            stepwise=True,
            beside=beside(place),
        )
        for place, (each, pace) in enumerate(zip(schedulers, lock.ranks, strict=True))
    ]
    whole = Engines(env, engines, AsTold(arrivals))
    requests = [request for *_, request in arrivals]
    env.process(hand_over(env, whole, requests))
    env.run(until=whole.done)
    return begun, lock.num_waves, {each.request_id: each.finish_s for each in requests}


@pytest.mark.skipif(
    bool(why_missing()) or minor() != "0.33", reason="waves are known of 0.33 only"
)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, WORKLOADS_A_TEST))
def test_ranks_step_and_idle_as_the_real_ones(
    first: int, ahead: bool, reads: bool
) -> None:
    real_ranks: Any = import_module("tests.hosted.real_waves").RealRanks  # needs vLLM
    release, num_several = nearest_release(installed_version()), 0
    for seed in range(first, first + WORKLOADS_A_TEST):
        workload = drawn(seed, release, ahead=ahead, reads=reads)
        draw = Random(seed)
        num_ranks, pull_s = draw.randint(2, 4), draw.choice((0.2, 1.3, 4.7, 25.1))
        hosted = [hosted_scheduler(workload) for _ in range(num_ranks)]
        real = real_ranks(hosted, ahead=ahead, pull_s=pull_s)
        real.run(arrivals_of(workload, seed, num_ranks, reads=reads))
        again = arrivals_of(workload, seed, num_ranks, reads=reads, source=Prefiller())
        steps, num_waves, ends_s = ours(
            *(workload, again, num_ranks),
            ahead=ahead,
            pull_s=pull_s if reads else None,
        )
        name = f"seed {seed}"
        assert [tokens for _, tokens in steps] == [
            tokens for _, tokens in real.gpus.begun
        ], name
        begun: Any = [time_s for time_s, _ in real.gpus.begun]
        assert [time_s for time_s, _ in steps] == pytest.approx(begun), name
        assert num_waves == real.num_waves, name
        assert ends_s == pytest.approx(real.ends_s()), name
        num_several += num_waves > 1
    assert num_several > 0
