"""Figures of the V1 scheduler's batch and cache, in literals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cache.errors import InvariantError
from sim.engine.sampling import sample
from sim.scheduler.batch import BatchShape
from tests.sim.build import request_from_spec, scheduler, spec

if TYPE_CHECKING:
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.v1 import V1Scheduler
    from workloads.spec import RequestSpec


class Steps:
    """A scheduler stepped by hand."""

    def __init__(self, policy: V1Scheduler) -> None:
        self.policy = policy
        self.num_steps = 0

    def add(self, request: RequestSpec) -> Request:
        added = request_from_spec(request, self.policy.max_model_len)
        self.policy.add_request(added)
        return added

    def step(self) -> SchedulerOutput:
        output = self.policy.schedule(float(self.num_steps))
        self.policy.check()
        finished = sample(output, self.num_steps, self.num_steps + 1.0)
        self.policy.update(finished)
        self.policy.check()
        self.num_steps += 1
        return output


def test_the_shape_of_mixed_batches() -> None:
    steps = Steps(scheduler(max_num_batched_tokens=50))
    steps.add(spec(0, 0.0, 10, 5))
    steps.add(spec(1, 0.0, 80, 5))
    # 10 tokens of 0: pairs 10 * 11 / 2. 40 of 80 tokens of 1: 40 * 41 / 2.
    assert steps.step().shape == BatchShape(0, 0, 2, 50, 50, 55 + 820)
    # A decode that sees 11 keys; 40 more tokens of 1 behind 40: 40 * 40 + 820.
    assert steps.step().shape == BatchShape(1, 11, 1, 40, 80, 1600 + 820)
    # Decodes that see 12 and 81 keys.
    assert steps.step().shape == BatchShape(2, 93, 0, 0, 0, 0)


def test_a_last_chunk_of_one_token_costs_what_a_decode_costs() -> None:
    steps = Steps(scheduler(max_num_batched_tokens=50))
    steps.add(spec(0, 0.0, 51, 2))
    assert steps.step().num_batched_tokens == 50
    assert steps.step().shape == BatchShape(1, 51, 0, 0, 0, 0)


def test_shared_blocks_are_stored_once() -> None:
    steps = Steps(scheduler(enable_prefix_caching=True))
    shared = ((100, 40),)
    first = steps.add(spec(0, 0.0, 0, 9, prompt=(*shared, (102, 10))))
    second = steps.add(spec(1, 0.0, 0, 9, prompt=(*shared, (104, 10))))
    output = steps.step()
    # 50 tokens in 4 blocks; the second finds the 2 full blocks of the shared 40.
    assert output.num_scheduled_tokens == [50, 18]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    usage = steps.policy.cache_usage()
    assert (usage.num_physical_blocks, usage.num_logical_blocks) == (6, 8)
    assert (usage.num_physical_tokens, usage.num_logical_tokens) == (68, 100)
    assert usage.kv_cache_usage == pytest.approx(6 / 1000)
    # Queries and hits are whole prompts.
    stats = steps.policy.prefix_cache_stats
    assert (stats.queries, stats.hits) == (100, 32)


def test_a_preempted_request_may_hit_its_own_blocks_and_that_is_counted_apart() -> None:
    policy = scheduler(num_gpu_blocks=8, max_model_len=112, enable_prefix_caching=True)
    steps = Steps(policy)
    steps.add(spec(0, 0.0, 47, 12))
    victim = steps.add(spec(1, 0.0, 60, 12))
    preempted_at = []
    while policy.num_running or policy.num_waiting:
        output = steps.step()
        if output.preemptions:
            preempted_at.append(steps.num_steps)
        if victim.num_preemptions and output.admitted:
            # 47 + 2 tokens of the first took a block; three full ones are left.
            hits = victim.num_computed_tokens - output.num_scheduled_tokens[-1]
            assert hits == policy.prefix_cache_stats.preempted_hits > 0
            assert output.num_recomputed_tokens == (victim.num_recompute_tokens - hits)
    assert len(preempted_at) == 1
    stats = policy.prefix_cache_stats
    assert (stats.queries, stats.hits) == (107, 0)
    assert stats.preempted_queries > 60
    assert victim.num_cached_tokens == 0  # of its first admission


def test_recomputation_is_counted_up_to_the_farthest_point_ever_reached() -> None:
    """Preempted twice, the second time in mid-recomputation."""
    policy = scheduler(num_gpu_blocks=12, max_model_len=170, max_num_batched_tokens=64)
    steps = Steps(policy)
    for i in range(3):
        steps.add(spec(i, 0.0, 50 + i, 60))
    num_batched = num_recomputed = 0
    while policy.num_running or policy.num_waiting:
        output = steps.step()
        num_batched += output.num_batched_tokens
        num_recomputed += output.num_recomputed_tokens
    once = sum(50 + i + 60 - 1 for i in range(3))
    assert num_recomputed > 0
    assert num_batched == once + num_recomputed


def test_admission_at_the_boundaries() -> None:
    policy = scheduler(num_gpu_blocks=6, max_model_len=80)
    error = policy.admission_error
    assert error(request_from_spec(spec(0, 0.0, 79, 1), 80)) is None
    assert "leaves no room" in str(error(request_from_spec(spec(0, 0.0, 80, 1), 80)))
    policy = scheduler(num_gpu_blocks=6, max_model_len=200)
    assert error(request_from_spec(spec(0, 0.0, 79, 1, max_tokens=1), 200)) is None
    fits = spec(0, 0.0, 60, 1, max_tokens=20)
    assert policy.admission_error(request_from_spec(fits, 200)) is None
    longer = spec(0, 0.0, 60, 1, max_tokens=21)
    assert "longest output of 81 tokens needs 6 blocks; the cache has 5" in str(
        policy.admission_error(request_from_spec(longer, 200))
    )


def test_no_more_than_max_num_seqs_run() -> None:
    steps = Steps(scheduler(max_num_seqs=2))
    for i in range(4):
        steps.add(spec(i, 0.0, 5, 3))
    assert len(steps.step().scheduled) == 2
    assert (steps.policy.num_running, steps.policy.num_waiting) == (2, 2)


def test_a_long_prompt_is_cut_to_the_threshold() -> None:
    steps = Steps(scheduler(long_prefill_token_threshold=16))
    steps.add(spec(0, 0.0, 40, 1))
    steps.add(spec(1, 0.0, 10, 1))
    assert steps.step().num_scheduled_tokens == [16, 10]
    # Alone in the engine it is not cut any more (0.31 on).
    assert steps.step().num_scheduled_tokens == [24]


def test_before_0_31_a_long_prompt_is_cut_even_when_it_is_alone() -> None:
    steps = Steps(scheduler(long_prefill_token_threshold=16, engine_version="0.30"))
    steps.add(spec(0, 0.0, 40, 1))
    assert steps.step().num_scheduled_tokens == [16]
    assert steps.step().num_scheduled_tokens == [16]
    assert steps.step().num_scheduled_tokens == [8]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda p: p.waiting.append(next(iter(p.running))), "waits as running"),
        (lambda p: setattr(p.tables, "num_logical_blocks", 7), "entries held"),
        (lambda p: setattr(p, "num_chunk_tokens", 3), "on the clock nor in mid-way"),
        (lambda p: setattr(p.clock, "num_base_tokens", 3), "decode clock: "),
        (lambda p: setattr(p.clock, "num_opening", [1] * 16), "0 decodes, 1 counted"),
        (lambda p: setattr(p, "max_num_seqs", 0), "max_num_seqs is 0"),
    ],
)
def test_check_finds_what_was_tampered_with(tamper: object, message: str) -> None:
    steps = Steps(scheduler(enable_prefix_caching=True))
    steps.add(spec(0, 0.0, 40, 5))
    steps.step()
    tamper(steps.policy)  # type: ignore[operator]
    with pytest.raises(InvariantError, match=message):
        steps.policy.check()
