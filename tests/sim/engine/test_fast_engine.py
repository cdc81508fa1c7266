"""The fast path's engine against the stepwise one, also where processes interfere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import InvariantError
from sim.costs.base import StepCost
from sim.costs.constant import ConstantCost
from sim.costs.linear import LinearCost
from sim.engine.clients import FanOutClient, open_loop
from sim.engine.clock import At, Clock, advance
from sim.engine.loop import Engine
from sim.engine.requests import RequestFactory
from sim.errors import CostError
from sim.results.recording.recorder import Recorder
from sim.scheduler.admission import FullPrompt, Watermark
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.v1 import V1Scheduler
from sim.scheduler.victims import LatestArrival, MostBlocks
from tests.oracles.v1 import V1Scheduler as Oracle
from tests.sim.build import spec

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import simpy

    from sim.costs.base import CostModel
    from sim.scheduler.batch import BatchShape
    from workloads.spec import RequestSpec

MAX_MODEL_LEN = 200
SETTINGS: dict[str, Any] = {
    "num_gpu_blocks": 60,
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": MAX_MODEL_LEN,
    "enable_prefix_caching": False,
}


BEFORE_ARRIVALS = -1  # or ties would go by who asked first, which paths need not share


class CountingScheduler(V1Scheduler):
    """Counts the stretches that it takes."""

    counts_blocks = True
    num_stretches = 0
    longest = 0

    def advance(self, num_steps: int) -> list[int]:
        self.num_stretches += 1
        self.longest = max(self.longest, num_steps)
        return super().advance(num_steps)


class Keeping(RequestFactory):
    """Keeps the requests it makes, so that a test can abort them."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self.made: list[Request] = []

    def _request(self, spec: RequestSpec, output_segment: int) -> Request:
        request = super()._request(spec, output_segment)
        self.made.append(request)
        return request


class Run:
    """One run on either path, with aborts at given times."""

    def __init__(
        self,
        specs: Sequence[RequestSpec],
        *,
        fast: bool,
        aborts: Sequence[tuple[float, int]] = (),
        cost_model: CostModel | None = None,
        pull: bool = False,
        check: bool = False,
        env: Clock | None = None,
        **changes: Any,
    ) -> None:
        self.env = env or Clock()
        self.recorder = Recorder()
        self.factory = Keeping(MAX_MODEL_LEN)
        client = FanOutClient(self.factory)
        cost_model = cost_model or ConstantCost(1.0)
        arguments = SETTINGS | changes
        pulled = self.factory.stream(specs) if fast and pull else None
        self.scheduler = (CountingScheduler if fast else Oracle)(**arguments)
        self.engine = Engine(
            self.env, self.scheduler, cost_model, self.recorder, arrivals=pulled
        )
        if not (fast and pull):
            self.env.process(open_loop(self.env, self.engine, specs, client))
        if aborts:
            self.env.process(self._abort(aborts))
        if check:
            self.engine.observe(1, lambda engine: engine.scheduler.check())

    def _abort(
        self, aborts: Sequence[tuple[float, int]]
    ) -> Generator[simpy.Event, Any, None]:
        for time_s, index in sorted(aborts):
            yield At(self.env, max(time_s, self.env.now), BEFORE_ARRIVALS)
            request = self.recorder.active.get(index)
            if request is not None:
                self.engine.abort(request, "the client went away")

    def finish(self) -> dict[str, Any]:
        """Run to the end; return everything that must be equal on both paths."""
        self.env.run(until=self.engine.done)
        recording = self.recorder.finish(self.env.now)
        return {
            "requests": recording.requests.to_csv(),
            "steps": recording.steps.to_csv(),
            "preemptions": recording.preemptions.to_csv(),
            "summary": self.engine.scheduler.summary(),
            "now": self.env.now,
            "num_steps": self.engine.num_steps,
            "ids": sorted(
                (request.request_id, request.num_tokens, request.num_computed_tokens)
                for request in self.factory.made
                if not request.status.is_finished
            ),
        }


def burst(num_requests: int, num_prompt_tokens: int = 10, num_output_tokens: int = 40):
    return [
        spec(i, float(i // 3), num_prompt_tokens, num_output_tokens)
        for i in range(num_requests)
    ]


times = st.one_of(
    st.integers(0, 120).map(float),  # at the ends of steps
    st.floats(0, 120, allow_nan=False).map(lambda t: round(t, 3)),
)
request_lists = st.lists(
    st.tuples(times, st.integers(1, 90), st.integers(1, 60), st.integers(0, 3)),
    min_size=1,
    max_size=25,
).map(
    lambda drawn: [
        spec(i, time_s, length, output, prompt=((2 * text, length),))
        for i, (time_s, length, output, text) in enumerate(sorted(drawn))
    ]
)


@settings(max_examples=30, deadline=None)
@given(
    specs=request_lists,
    aborts=st.lists(st.tuples(times.filter(bool), st.integers(0, 24)), max_size=12),
    caching=st.booleans(),
    num_gpu_blocks=st.integers(51, 90),
    version=st.sampled_from(["0.8.5", "0.11", "0.24", "0.33"]),
    check=st.booleans(),
    pull=st.booleans(),
)
def test_aborts_leave_both_paths_equal(
    *,
    specs: list[RequestSpec],
    aborts: list[tuple[float, int]],
    caching: bool,
    num_gpu_blocks: int,
    version: str,
    check: bool,
    pull: bool,
) -> None:
    changes: dict[str, Any] = {
        "enable_prefix_caching": caching,
        "num_gpu_blocks": num_gpu_blocks,
        "engine_version": version,
    }
    stepwise = Run(specs, fast=False, aborts=aborts, **changes).finish()
    changes |= {"check": check, "pull": pull}
    run = Run(specs, fast=True, aborts=aborts, **changes)
    fast = run.finish()
    assert fast == stepwise


@pytest.mark.parametrize("pull", [False, True], ids=["process", "pulled"])
def test_plain_decodes_are_taken_in_stretches(pull: bool) -> None:
    specs = [spec(i, 0.0, 10, 150) for i in range(3)]
    stepwise = Run(specs, fast=False, num_gpu_blocks=200)
    fast = Run(specs, fast=True, pull=pull, num_gpu_blocks=200)
    assert fast.finish() == stepwise.finish()
    # A step of prompts gives the first tokens, a stretch all others.
    assert fast.scheduler.num_stretches == 1
    assert fast.scheduler.longest == 149


def test_a_stretch_ends_where_an_observer_looks() -> None:
    fast = Run([spec(0, 0.0, 10, 150)], fast=True)
    seen: list[int] = []
    fast.engine.observe(40, lambda engine: seen.append(engine.num_steps))
    fast.finish()
    assert seen == [40, 80, 120]
    assert fast.scheduler.longest == 40


def test_a_stretch_ends_at_the_horizon() -> None:
    near, far = (Run([spec(0, 0.0, 10, 150)], fast=True) for _ in range(2))
    near.engine.horizon = lambda: near.env.now + 25.0
    assert near.finish() == far.finish()
    assert (near.scheduler.longest, far.scheduler.longest) == (25, 149)


def test_an_observer_sees_how_far_decodes_are() -> None:
    seen: dict[bool, list[int]] = {}
    for fast in (False, True):
        run = Run([spec(0, 0.0, 10, 50)], fast=fast)
        numbers = seen[fast] = []

        def look(engine: Engine, run: Run = run, numbers: list[int] = numbers) -> None:
            numbers.append(run.factory.made[0].num_tokens)

        run.engine.observe(7, look)
        run.finish()
    assert seen[True] == seen[False]


def test_an_observer_sees_what_requests_hold_whose_blocks_are_counted() -> None:
    run = Run(burst(12), fast=True)
    tables, seen = run.scheduler.tables, []

    def look(engine: Engine) -> None:
        held = sum(map(run.scheduler.num_blocks, run.scheduler.running))
        seen.append((held, tables.num_logical_blocks))

    run.engine.observe(1, look)
    run.finish()
    assert tables.counts_only
    assert max(seen) > (50, 50)
    assert all(held == counted for held, counted in seen)


def test_who_waits_for_an_answer_is_called_back_once() -> None:
    run = Run([spec(0, 0.0, 10, 5)], fast=True)
    ended: list[int] = []
    request = RequestFactory(MAX_MODEL_LEN).samples(spec(7, 0.0, 10, 5))[0]
    request.request_id = 7
    request.on_end = lambda it: ended.append(it.request_id)
    run.engine.submit(request)
    run.finish()
    assert ended == [7]
    assert request.on_end is None


def test_a_listener_sees_every_step() -> None:
    class Listener:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.ends: list[float] = []

        def scheduled(self, step: int, *_: object) -> None:
            self.steps.append(step)

        def ended(self, end_s: float, *_: object) -> None:
            self.ends.append(end_s)

    specs = burst(5)
    fast, plain = (Run(specs, fast=True) for _ in range(2))
    listener = Listener()
    fast.engine.listeners.append(listener)
    assert fast.finish() == plain.finish()
    assert listener.steps == list(range(fast.engine.num_steps))
    assert listener.ends == [float(step + 1) for step in listener.steps]
    assert fast.scheduler.num_stretches == 0 < plain.scheduler.num_stretches


@pytest.mark.parametrize("after_s", [0.0, 3.0, 33.0, 61.0])
def test_an_interrupted_run_says_how_far_it_came(after_s: float) -> None:
    def stop(run: Run) -> Generator[simpy.Event, Any, None]:
        yield At(run.env, after_s, 0)
        run.engine.stop_requested = True

    runs = [Run(burst(12), fast=fast) for fast in (False, True)]
    for run in runs:
        run.env.process(stop(run))
    stepwise, fast = (run.finish() for run in runs)
    assert fast == stepwise
    assert fast["ids"] or after_s > 60


class WholeStepsOnly:
    """A cost model that prices steps one by one, and knows no columns."""

    def step(self, shape: BatchShape) -> StepCost:
        host_s = 0.25 + 0.001 * shape.num_decode_context_tokens
        return StepCost(host_s + 0.5, host_s=host_s, gemm_s=0.5)

    def describe(self) -> dict[str, Any]:
        return {"kind": "whole"}


@pytest.mark.parametrize(
    "cost_model",
    [WholeStepsOnly(), LinearCost(0.1, decode_context_token_s=0.01)],
    ids=["no pricer", "linear"],
)
def test_any_cost_model_prices_stretches(cost_model: CostModel) -> None:
    runs = [
        Run(
            burst(20),
            fast=fast,
            cost_model=cost_model,
            num_gpu_blocks=51,
        )
        for fast in (False, True)
    ]
    stepwise, fast = (run.finish() for run in runs)
    assert fast == stepwise
    assert runs[1].scheduler.num_stretches


def test_a_quiet_step_without_length_is_refused() -> None:
    class Free(WholeStepsOnly):
        def step(self, shape: BatchShape) -> StepCost:
            return StepCost(0.0 if shape.num_decodes else 1.0)

    run = Run([spec(0, 0.0, 10, 9)], fast=True, cost_model=Free())
    with pytest.raises(CostError, match="more than zero"):
        run.finish()


def test_two_engines_share_a_clock() -> None:
    def both(fast: bool) -> list[str]:
        one = Run(burst(9), fast=fast, cost_model=ConstantCost(0.7))
        other = Run(burst(7), fast=fast, cost_model=ConstantCost(1.1), env=one.env)
        env = one.env
        env.run(until=env.all_of([one.engine.done, other.engine.done]))
        recordings = [run.recorder.finish(env.now) for run in (one, other)]
        return [
            table.to_csv()
            for recording in recordings
            for table in (recording.steps, recording.requests)
        ]

    assert both(fast=True) == both(fast=False)


def test_pulled_arrivals_wait_among_other_events() -> None:
    specs = [spec(i, 5.0 * i, 10, 9) for i in range(6)]
    runs = [Run(specs, fast=fast, pull=fast) for fast in (False, True)]
    for run in runs:
        for delay_s in (2.0, 5.0, 7.5, 24.0):
            run.env.timeout(delay_s)
    stepwise, fast = (run.finish() for run in runs)
    assert fast == stepwise


def test_nothing_to_pull_ends_a_run() -> None:
    run = Run([], fast=True, pull=True)
    run.env.run(until=run.engine.done)
    assert run.engine.num_steps == 0


def test_the_clock_moves_without_an_event_only_if_none_comes_first() -> None:
    env = Clock()
    env.timeout(2.0)
    assert advance(env, 1.5)
    assert env.now == 1.5
    assert not advance(env, 2.0)
    assert env.now == 1.5
    with pytest.raises(ValueError, match="never goes back"):
        advance(env, 1.0)
    with pytest.raises(ValueError, match="never goes back"):
        advance(env, float("nan"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 32},
        {"long_prefill_token_threshold": 32},
        {"max_num_active_seqs": 3},
        {"max_num_scheduled_tokens": 8},
        {"watermark": 0.1},
        {"scheduler_reserve_full_isl": False},
        {"preemption_victim": LatestArrival()},
        {"admission": Watermark(0.1)},
        {"admission": FullPrompt(), "scheduler_reserve_full_isl": False},
        {"admission": FullPrompt(), "engine_version": "0.11"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        {"long_prefill_token_threshold": 9},
        {"max_num_scheduled_tokens": 7},
        {"sliding_window": 10},
        {"prefill_schedule_interval": 3},
        {"scheduling_policy": "priority"},
        {"preemption_victim": MostBlocks()},
    ],
)
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
def test_settings_are_equal_to_the_oracle(
    changes: dict[str, Any], caching: bool
) -> None:
    specs = [
        spec(i, i / 2, 5 + 7 * i % 83, 1 + 11 * i % 47, prompt=((2 * (i % 4), 90),))
        for i in range(30)
    ]
    changes = changes | {"enable_prefix_caching": caching}
    stepwise = Run(specs, fast=False, **changes).finish()
    assert Run(specs, fast=True, pull=True, check=True, **changes).finish() == stepwise


def test_check_finds_a_decode_out_of_place() -> None:
    scheduler = V1Scheduler(**SETTINGS)
    request = RequestFactory(MAX_MODEL_LEN).samples(spec(0, 0.0, 10, 9))[0]
    scheduler.add_request(request)
    scheduler.schedule(0.0)
    request.num_tokens += 1
    scheduler.begin_decoding(scheduler.completing)
    scheduler.check()
    request.base_tokens += 1
    with pytest.raises(InvariantError, match="decode clock"):
        scheduler.check()
    request.base_tokens -= 1
    request.status = RequestStatus.WAITING
    with pytest.raises(InvariantError, match="runs as waiting"):
        scheduler.check()
