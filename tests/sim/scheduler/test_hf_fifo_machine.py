"""The `hf_fifo` scheduler under random traffic (invariants 1, 2, 6, 7)."""

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
from sim.scheduler.base import PreemptionMode
from sim.scheduler.hf_fifo import HF_FIFO
from tests.sim.build import request_from_spec, spec
from tests.sim.scheduler import policies

if TYPE_CHECKING:
    from sim.scheduler.hf_fifo.batch import HfFifoOutput
    from sim.scheduler.hf_fifo.scheduler import FIFOScheduler
    from sim.scheduler.request import Request

MAX_MODEL_LEN = 60


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of an engine that is soon short of blocks."""
    return {
        "num_gpu_blocks": draw(st.integers(2, 16)),
        "block_size": draw(st.sampled_from([4, 5, 8])),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": draw(st.integers(1, 60)),
        "max_num_seqs": draw(st.integers(1, 8)),
        "num_cpu_blocks": draw(st.sampled_from([0, 3, 30])),
        "enable_prefix_caching": draw(st.booleans()),
        "safety_margin": draw(st.sampled_from([0.0, 0.0, 0.15, 1.0])),
        "max_blocks_per_request": draw(st.sampled_from([0, 2, 32])),
        "preemption_victim": draw(policies.victims()),
    }


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, compute, finish and leave; nobody is lost and everybody ends."""

    policy: FIFOScheduler

    @initialize(arguments=engines())
    def set_up(self, arguments: dict[str, Any]) -> None:
        self.policy = HF_FIFO.make(arguments)
        self.live: list[Request] = []
        self.num_added = self.num_finished = self.num_aborted = 0
        self.num_steps = 0

    @rule(
        prompt=st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 15)), min_size=1, max_size=3
        ),
        num_output_tokens=st.integers(1, 40),
    )
    def add(self, prompt: list[tuple[int, int]], num_output_tokens: int) -> None:
        request = request_from_spec(
            spec(
                self.num_added,
                float(self.num_steps),
                0,
                num_output_tokens,
                prompt=tuple((2 * segment, n) for segment, n in prompt),
                max_tokens=num_output_tokens,
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

    def one_step(self) -> HfFifoOutput:
        policy = self.policy
        had_aborts = self.num_aborted > 0
        output = policy.schedule(float(self.num_steps))
        policy.check()
        self.check_batch(output)
        # Whatever passed admission can be served; but a withdrawn request never lets
        # others in again.
        assert output.scheduled or (had_aborts and policy.block_new_requests)
        finished = sample(output, self.num_steps, self.num_steps + 1.0)
        policy.update(finished)
        self.num_finished += len(finished)
        self.live = [r for r in self.live if not r.status.is_finished]
        self.num_steps += 1
        return output

    def check_batch(self, output: HfFifoOutput) -> None:
        """Budgets hold, the shape is the batch, and moves are those of who moved."""
        policy, engine = self.policy, self.policy.settings
        num_tokens = output.num_scheduled_tokens
        assert all(n > 0 for n in num_tokens)
        assert sum(num_tokens) == output.num_batched_tokens
        assert sum(num_tokens) <= engine.max_num_batched_tokens
        assert len(output.scheduled) <= engine.max_num_seqs
        victims = {preemption.request for preemption in output.preemptions}
        assert not victims & set(output.scheduled)
        assert not victims or policy.block_new_requests
        swapped = [p for p in output.preemptions if p.mode is PreemptionMode.SWAP]
        assert sum(p.num_blocks_moved for p in swapped) == len(
            output.blocks_to_swap_out
        )
        assert bool(output.restored) == bool(output.blocks_to_swap_in)
        usage = policy.cache_usage()
        size = policy.cache.block_size
        assert usage.num_physical_tokens <= usage.num_physical_blocks * size
        assert usage.num_logical_tokens >= usage.num_physical_tokens

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
            policy = self.policy
            policy.check()
            num_live = policy.num_running + policy.num_waiting + policy.num_swapped
            assert num_live == len(self.live)
            assert self.num_added == num_live + self.num_finished + self.num_aborted

    def teardown(self) -> None:
        """Let everybody end: no livelock, and all blocks come back."""
        if not hasattr(self, "policy"):
            return
        for _ in range(20_000):
            if not self.live or not self.one_step().scheduled:
                break
        for request in self.live:  # behind a withdrawn one
            self.policy.abort(request)
        self.policy.check()
        assert self.policy.cache_usage() == (0, 0, 0, 0, 0.0, 0.0)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=40)
