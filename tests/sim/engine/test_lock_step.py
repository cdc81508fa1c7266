"""Engines that step together: one length for all, dummy batches, ends of waves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.costs.linear import LinearCost
from sim.costs.steps.ahead import HostAhead
from sim.costs.steps.lock_step import steps_together
from sim.engine.clients import FanOutClient, open_loop
from sim.engine.clock import Clock
from sim.engine.group_sampling import sampler_for
from sim.engine.lock_step import DP_SYNC_INTERVAL, LockStep
from sim.engine.loop import Engine
from sim.engine.requests import RequestFactory
from sim.errors import CostError
from sim.fleet.engines import Engines
from sim.results.fleet.ranks import RankRecorders, tables_of_rank
from sim.results.recording.recorder import Recorder
from sim.scheduler.generation import SCHEDULE_REQUEST_S
from sim.scheduler.settings import CacheConfig
from sim.scheduler.v1.ahead import AheadScheduler
from sim.scheduler.v1.batch_queue import BatchQueueScheduler
from sim.scheduler.v1.settings import Settings
from tests.sim.build import scheduler, spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.results.fleet.ranks import RankedRecording
    from sim.scheduler.request import Request
    from workloads.spec import RequestSpec

TERMS = {
    "base_s": 0.01,
    "decode_s": 0.001,
    "prefill_token_s": 1e-4,
    "decode_context_token_s": 1e-7,
}
COST = LinearCost(**TERMS)

HOST_S = 0.004


class InTurn:
    """Sends requests to one rank after another, or where they are told to go."""

    def __init__(self, num_ranks: int, places: Sequence[int] = ()) -> None:
        self.num_ranks = num_ranks
        self.places = places
        self.num_ended = 0

    def choose(self, request: Request) -> int:
        if self.places:
            return self.places[request.request_id]
        return request.request_id % self.num_ranks

    def ended(self, request: Request, place: int) -> None:
        assert self.choose(request) == place
        self.num_ended += 1


def ran(
    specs: Sequence[RequestSpec],
    num_ranks: int,
    places: Sequence[int] = (),
    *,
    cost_model: Any = COST,
    stepwise: bool = False,
    host: HostAhead | None = None,
    **changes: Any,
) -> tuple[RankedRecording, LockStep]:
    """Serve requests by ranks in lock-step, and prove all structures at every step."""
    env = Clock()
    lock = LockStep(env, num_ranks, steps_together(cost_model), host=host)
    recorders = RankRecorders(
        [Recorder() for _ in lock.ranks], [rank.waits_s for rank in lock.ranks]
    )
    schedulers = [
        scheduler(**changes) if host is None else ahead(stepwise=stepwise, **changes)
        for _ in range(num_ranks)
    ]
    engines = [
        Engine(
            env,
            each,
            cost_model,
            recorder,
            sample=sampler_for(each),
            pace=pace,
            stepwise=stepwise,
        )
        for each, recorder, pace in zip(
            schedulers, recorders.of_rank, lock.ranks, strict=True
        )
    ]
    router = InTurn(num_ranks, places)
    whole = Engines(env, engines, router)

    def check(engine: Engine) -> None:
        engine.scheduler.check()
        engine.recorder.check(engine.scheduler)

    for engine in engines:
        engine.observe(1, check)
    client = FanOutClient(RequestFactory(8192))
    env.process(open_loop(env, whole, specs, client))
    env.run(until=whole.done)
    recording = recorders.finish(env.now)
    assert router.num_ended == recording.request_table.num_rows == len(specs)
    return recording, lock


def ahead(*, stepwise: bool, **changes: Any) -> Any:
    """A scheduler of `tests.sim.build.scheduler` that schedules ahead."""
    own = {"num_gpu_blocks": 1001, "max_num_seqs": 256, "max_model_len": 8192} | changes
    cache = CacheConfig(
        block_size=16,
        num_gpu_blocks=own.pop("num_gpu_blocks"),
        enable_prefix_caching=False,
    )
    asked = Settings(max_num_batched_tokens=2048, async_scheduling=True, **own)
    return (BatchQueueScheduler if stepwise else AheadScheduler)(asked, cache)


class OnHost(LinearCost):
    """`LinearCost` of which the host has a part."""

    def host_part_s(self, num_rows: int) -> float:
        return HOST_S + 0.0 * num_rows


def steps_of(recording: RankedRecording, rank: int) -> dict[str, Any]:
    table = tables_of_rank(recording, rank).step_table
    (batch,) = table.batches([*table.kinds])
    return batch


def test_all_ranks_begin_and_end_together() -> None:
    specs = [spec(0, 0.0, 100, 3), spec(1, 0.005, 50, 2)]
    recording, lock = ran(specs, 2)
    first, second = steps_of(recording, 0), steps_of(recording, 1)
    for name in ("start_s", "latency_s"):
        assert first[name].tolist() == second[name].tolist()
    # a prompt of 100 beside a dummy batch; a decode beside a prompt of 50; then decodes
    assert first["num_batched_tokens"][:4].tolist() == [100, 1, 1, 0]
    assert second["num_batched_tokens"][:4].tolist() == [0, 50, 1, 0]
    assert first["latency_s"][:2].tolist() == pytest.approx([0.02, 0.015])
    assert second["wait_s"][0] == pytest.approx(0.02 - 0.011, rel=1e-3)
    assert first["wait_s"][1] == pytest.approx(0.015 - 0.01101, rel=1e-3)
    # steps 1 and 16 ask whether any rank has work; the wave ends at the second
    assert len(first["step"]) == DP_SYNC_INTERVAL
    assert lock.num_waves == 1


def test_a_wave_of_one_step_ends_at_its_end() -> None:
    recording, lock = ran([spec(0, 0.0, 10, 1), spec(1, 5.0, 10, 1)], 3)
    assert lock.num_waves == 2
    for rank in range(3):
        assert steps_of(recording, rank)["start_s"].tolist() == [0.0, 5.0]


def test_what_comes_in_the_last_step_of_a_wave_starts_another_one() -> None:
    """A core reads its queue when a turn begins, and then asks what it knows of."""
    specs = [spec(0, 0.0, 10, 1), spec(1, 0.005, 10, 2)]
    recording, lock = ran(specs, 2)
    assert lock.num_waves == 2
    tokens = steps_of(recording, 1)["num_batched_tokens"].tolist()
    assert tokens == [0, 10, 1, *[0] * (DP_SYNC_INTERVAL - 2)]


def test_one_rank_is_an_engine() -> None:
    specs = [spec(i, 0.03 * i, 40 + 37 * i % 300, 1 + 13 * i % 40) for i in range(60)]
    changes = {"num_gpu_blocks": 60, "max_num_seqs": 8, "max_model_len": 800}
    env = Clock()
    recorder = Recorder()
    engine = Engine(env, scheduler(**changes), COST, recorder)
    env.process(open_loop(env, engine, specs, FanOutClient(RequestFactory(8192))))
    env.run(until=engine.done)
    plain = recorder.finish(env.now)
    ranked, _ = ran(specs, 1, **changes)
    assert plain.preemptions.drop(columns=[]).equals(
        ranked.preemptions.drop(columns="rank")
    )
    assert len(plain.preemptions) > 0
    assert plain.requests.equals(ranked.requests.drop(columns="rank"))
    computed = ranked.steps[ranked.steps["num_batched_tokens"] > 0]
    for name in ("start_s", "latency_s", "num_physical_blocks", "num_waiting"):
        assert plain.steps[name].tolist() == computed[name].tolist()


def traffic(num_ranks: int) -> st.SearchStrategy[list[tuple[float, int, int, int]]]:
    """Arrivals in seconds, lengths of prompts and outputs, and ranks."""
    each = st.tuples(
        st.floats(0, 0.3),
        st.integers(1, 150),
        st.integers(1, 30),
        st.integers(0, num_ranks - 1),
    )
    return st.lists(each, min_size=1, max_size=25)


def specs_of(data: Sequence[tuple[float, int, int, int]]) -> list[RequestSpec]:
    arrivals_s = sorted(each[0] for each in data)
    return [
        spec(i, arrivals_s[i], prompt, output)
        for i, (_, prompt, output, _) in enumerate(data)
    ]


@settings(max_examples=25, deadline=None)
@given(data=traffic(4), stepwise=st.booleans())
def test_any_traffic(data: list[tuple[float, int, int, int]], stepwise: bool) -> None:
    specs = specs_of(data)
    recording, lock = ran(
        specs,
        4,
        [each[3] for each in data],
        stepwise=stepwise,
        num_gpu_blocks=25,
        max_num_seqs=6,
        max_model_len=200,
    )
    requests = recording.requests
    assert (requests["status"] == "finished_stopped").all()
    assert requests["rank"].tolist() == [each[3] for each in data]
    tables = [steps_of(recording, rank) for rank in range(4)]
    for table in tables:
        assert table["start_s"].tolist() == tables[0]["start_s"].tolist()
        assert table["latency_s"].tolist() == tables[0]["latency_s"].tolist()
        assert (table["wait_s"] >= 0).all()
    # some rank waits for none, and no step is a dummy batch everywhere but at the end
    assert (sum(table["wait_s"] == 0 for table in tables) > 0).all()
    served = sum(table["num_batched_tokens"] for table in tables)
    idle = (served == 0).astype(int)
    runs = "".join(map(str, idle)).split("0")
    assert max(map(len, runs)) < DP_SYNC_INTERVAL
    assert lock.num_waves >= 1
    done = recording.steps["num_finished"].sum()
    assert done == len(specs)


def test_a_rank_ahead_forms_a_step_while_all_run_the_one_before() -> None:
    """By hand: two ranks, steps of constant length, the second rank comes later."""
    cost = OnHost(base_s=0.1)
    host = HostAhead(cost)
    recording, lock = ran(
        [spec(0, 0.0, 100, 4), spec(1, 0.15, 50, 1)], 2, cost_model=cost, host=host
    )
    per_row_s = HOST_S + SCHEDULE_REQUEST_S
    gpu_s = 0.1 - HOST_S
    ends_s = [per_row_s + number * gpu_s for number in range(1, 20)]
    first, second = steps_of(recording, 0), steps_of(recording, 1)
    # its second turn begins when its first batch is launched, the third when that ends
    starts_s = [0.0, per_row_s, *ends_s[:3]]
    assert first["start_s"][:5].tolist() == pytest.approx(starts_s)
    assert first["output_s"][:3].tolist() == pytest.approx(ends_s[:3])
    # a token after each last one is computed in vain: it is a stop token
    assert first["num_batched_tokens"][:6].tolist() == [100, 1, 1, 1, 1, 0]
    # the other launches a dummy batch, and waits until the first has launched its own:
    # when its request comes it waits so with the fourth, which comes at 0.2
    assert second["num_batched_tokens"][:6].tolist() == [0, 0, 0, 0, 50, 1]
    assert second["start_s"][4] == pytest.approx(ends_s[1] + per_row_s)
    told = recording.requests.set_index("request_id")
    assert told["first_token_s"].tolist() == pytest.approx([ends_s[0], ends_s[4]])
    assert told["finish_s"].tolist() == pytest.approx([ends_s[3], ends_s[4]])
    assert lock.num_waves == 1
    assert len(first["step"]) == len(second["step"]) == DP_SYNC_INTERVAL


def test_one_rank_ahead_is_an_engine_ahead() -> None:
    specs = [spec(i, 0.002 * i, 40 + 37 * i % 300, 2 + 13 * i % 40) for i in range(60)]
    changes = {"num_gpu_blocks": 60, "max_num_seqs": 8, "max_model_len": 800}
    cost = OnHost(**TERMS)
    host = HostAhead(cost)
    for stepwise in (False, True):
        env, recorder = Clock(), Recorder()
        own = ahead(stepwise=stepwise, **changes)
        engine = Engine(
            env, own, host, recorder, sample=sampler_for(own), stepwise=stepwise
        )
        env.process(open_loop(env, engine, specs, FanOutClient(RequestFactory(8192))))
        env.run(until=engine.done)
        plain = recorder.finish(env.now)
        ranked, _ = ran(
            specs, 1, cost_model=cost, host=host, stepwise=stepwise, **changes
        )
        assert len(plain.preemptions) > 0
        computed = ranked.steps[ranked.steps["num_batched_tokens"] > 0]
        expected = plain.steps[plain.steps["num_batched_tokens"] > 0]
        for name in ("latency_s", "num_physical_blocks", "num_waiting"):
            assert expected[name].tolist() == computed[name].tolist(), name
        for name in ("first_token_s", "finish_s"):
            times_s = ranked.requests[name].to_numpy()
            assert plain.requests[name].to_numpy() == pytest.approx(times_s, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=traffic(3))
def test_any_traffic_ahead(data: list[tuple[float, int, int, int]]) -> None:
    specs = specs_of(data)
    cost = OnHost(**TERMS)
    (recording, lock), (oracle, _) = (
        ran(
            specs,
            3,
            [each[3] for each in data],
            cost_model=cost,
            host=HostAhead(cost),
            stepwise=stepwise,
            num_gpu_blocks=25,
            max_num_seqs=6,
            max_model_len=200,
        )
        for stepwise in (False, True)
    )
    assert recording.requests.equals(oracle.requests)
    assert recording.preemptions.equals(oracle.preemptions)
    assert recording.steps.equals(oracle.steps)
    assert (recording.requests["status"] == "finished_stopped").all()
    tables = [steps_of(recording, rank) for rank in range(3)]
    for table in tables:
        assert table["latency_s"].tolist() == tables[0]["latency_s"].tolist()
        assert (table["output_s"] >= table["start_s"]).all()
        assert (np.diff(table["output_s"]) >= 0).all()
    served = sum(table["num_batched_tokens"] for table in tables)
    runs = "".join(map(str, (served == 0).astype(int))).split("0")
    assert max(map(len, runs)) <= DP_SYNC_INTERVAL
    assert recording.steps["num_finished"].sum() == len(specs)
    assert lock.num_waves >= 1


def test_a_step_without_length_is_refused() -> None:
    class Endless(LinearCost):
        def step(self, shape: Any) -> Any:
            return super().step(shape)._replace(total_s=float("inf"))

    with pytest.raises(CostError, match="finite time"):
        ran([spec(0, 0.0, 10, 2)], 2, cost_model=Endless(base_s=0.01))
