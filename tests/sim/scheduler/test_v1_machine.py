"""The V1 scheduler under random traffic, in random dialects (invariants 1, 2, 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sim.engine.sampling import sample
from sim.scheduler.v1.dialect import dialect_of
from tests.sim.build import request_from_spec, scheduler, spec
from tests.sim.scheduler import policies

if TYPE_CHECKING:
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.v1 import V1Scheduler

VERSIONS = ("0.8", "0.11", "0.12", "0.22", "0.24", "0.30", "0.31", "0.33")
MAX_MODEL_LEN = 40


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that fit together, with keys that the release has."""
    dialect = dialect_of(version := draw(st.sampled_from(VERSIONS)))
    chunked = not dialect.has_priority_policy or draw(st.booleans())
    budget = draw(st.integers(MAX_MODEL_LEN if not chunked else 5, 60))
    arguments: dict[str, Any] = {
        "engine_version": version,
        "num_gpu_blocks": draw(st.integers(4, 30)),
        "block_size": draw(st.sampled_from([1, 2, 4, 7])),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": budget,
        "max_num_seqs": draw(st.integers(1, 6)),
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3, 9, 60])),
        "enable_chunked_prefill": chunked,
        "sliding_window": draw(st.sampled_from([None, None, 1, 3, 8, 20])),
        "preemption_victim": draw(policies.victims()),
        "admission": draw(policies.rules()),
    }
    if dialect.has_priority_policy:
        arguments["scheduling_policy"] = draw(st.sampled_from(["fcfs", "priority"]))
    newer: dict[str, st.SearchStrategy[Any]] = {
        "max_num_scheduled_tokens": st.none() | st.integers(4, budget),
        "scheduler_reserve_full_isl": st.sampled_from([None, True, False]),
        "watermark": st.sampled_from([0.0, 0.05, 0.5]),
        "prefill_schedule_interval": st.sampled_from([1, 2, 5]),
        "max_num_active_seqs": st.none() | st.integers(1, arguments["max_num_seqs"]),
        "long_prefill_token_threshold_adaptive": st.booleans(),
    }
    for key, values in newer.items():
        if dialect.has_key(key):
            arguments[key] = draw(values)
    return arguments


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, compute, finish and leave; nobody is lost and everybody ends."""

    policy: V1Scheduler

    @initialize(arguments=engines())
    def set_up(self, arguments: dict[str, Any]) -> None:
        self.policy = scheduler(**arguments)
        self.live: list[Request] = []
        self.num_added = self.num_finished = self.num_aborted = 0
        self.num_steps = 0

    @rule(
        prompt=st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 15)), min_size=1, max_size=3
        ),
        num_output_tokens=st.integers(1, 25),
        priority=st.integers(0, 2),
    )
    def add(
        self, prompt: list[tuple[int, int]], num_output_tokens: int, priority: int
    ) -> None:
        request = request_from_spec(
            spec(
                self.num_added,
                float(self.num_steps),
                0,
                num_output_tokens,
                prompt=tuple((2 * segment, n) for segment, n in prompt),
                priority=priority,
            ),
            MAX_MODEL_LEN,
        )
        if self.policy.admission_error(request) is None:
            self.policy.add_request(request)
            self.live.append(request)
            self.num_added += 1

    @precondition(lambda self: self.live)
    @rule()
    def step(self) -> None:
        self.one_step()

    def one_step(self) -> SchedulerOutput:
        policy = self.policy
        before = {id(r): r.num_computed_tokens for r in policy.running}
        output = policy.schedule(float(self.num_steps))
        policy.check()
        self.check_batch(output, before)
        finished = sample(output, self.num_steps, self.num_steps + 1.0)
        policy.update(finished)
        self.num_finished += len(finished)
        self.live = [r for r in self.live if not r.status.is_finished]
        self.num_steps += 1
        # Invariant 6: who is alone is admitted, whatever a rule says of others.
        assert output.scheduled or output.preemptions or policy.running
        return output

    def check_batch(self, output: SchedulerOutput, before: dict[int, int]) -> None:
        """Budgets and caps hold; the shape is the batch; nobody admitted is lost."""
        engine = self.policy.settings
        num_tokens = output.num_scheduled_tokens
        assert all(n > 0 for n in num_tokens)
        assert sum(num_tokens) == output.num_batched_tokens <= engine.token_budget
        assert len(self.policy.running) <= engine.most_running
        if engine.has_steady_threshold:
            assert max(num_tokens, default=0) <= engine.long_prefill_token_threshold
        if output.preemptions:
            assert not output.admitted
        victims = {id(preemption.request) for preemption in output.preemptions}
        for request, n in zip(output.scheduled, num_tokens, strict=True):
            assert id(request) not in victims
            if request not in output.admitted:
                assert request.num_computed_tokens == before[id(request)] + n
        usage = self.policy.cache_usage()
        size = self.policy.block_size
        assert usage.num_physical_tokens <= usage.num_physical_blocks * size
        assert usage.num_physical_tokens > (usage.num_physical_blocks - 7) * size
        assert usage.num_logical_tokens >= usage.num_physical_tokens
        assert not output.stuck  # whatever passed admission can be served

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.policy.abort(request)
        self.live.remove(request)
        self.num_aborted += 1

    @invariant()
    def requests_are_conserved(self) -> None:
        if hasattr(self, "policy"):
            self.policy.check()
            num_live = self.policy.num_running + self.policy.num_waiting
            assert num_live == len(self.live)
            assert self.num_added == num_live + self.num_finished + self.num_aborted

    def teardown(self) -> None:
        """Let everybody end: no livelock, no idling, and all blocks come back."""
        if not hasattr(self, "policy"):
            return
        num_idle_steps = 0
        for _ in range(20_000):
            if not self.live:
                break
            output = self.one_step()
            num_idle_steps = 0 if output.scheduled else num_idle_steps + 1
            assert num_idle_steps <= 2
        assert not self.live
        self.policy.check()
        usage = self.policy.cache_usage()
        assert usage == (0, 0, 0, 0, 0.0, 0.0)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=30)
