"""The fixed plain loop that the product's speed is measured against.

vLLM's V1 scheduler without prefix caching, rules of release 0.33, as one would write it
down first from its description: requests as objects, a list of running ones, every one
of them visited in every step, blocks counted out one by one, a row a step. Nothing in
here is needlessly slow, and nothing is clever. It takes the product's cost model and
times of arrival (`sim.engine.clock.At`), and shares no other line with it.

Leave it as it is: ratios to it are comparable over time only while it stays the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.engine.clock import ARRIVAL_PRIORITY, At
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import simpy

    from sim.costs.base import CostModel
    from workloads.spec import RequestSpec


@dataclass(eq=False)
class PlainRequest:
    """A request in the engine; `last_num_tokens` is read by `sample` only."""

    arrival_s: float
    num_prompt_tokens: int
    last_num_tokens: int
    num_tokens: int
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    finish_s: float | None = None


class PlainBlockPool:
    """Free block ids and reference counts; blocks freed last are reused first."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.free_block_ids = deque(range(1, num_gpu_blocks))  # 0 is the null block
        self.num_references = [0] * num_gpu_blocks

    def take(self) -> int:
        block_id = self.free_block_ids.popleft()
        self.num_references[block_id] += 1
        return block_id

    def give_back(self, block_id: int) -> None:
        self.num_references[block_id] -= 1
        if self.num_references[block_id] == 0:
            self.free_block_ids.appendleft(block_id)


class PlainEngine:
    """One engine: queues, blocks, and a SimPy process that takes step after step.

    Parameters
    ----------
    env
        The clock.
    specs
        The workload in order of arrival. Every request must fit the pool and the
        model; no other is refused.
    cost_model
        Seconds of a step.
    num_gpu_blocks
        Size of the pool, the null block included.

    Attributes
    ----------
    requests
        All that arrived, in order.
    rows
        One a step: step, start and length in seconds, running, waiting, decodes,
        prefill tokens, blocks in use, tokens attended to, preemptions, requests
        finished.
    """

    def __init__(
        self,
        env: simpy.Environment,
        specs: Sequence[RequestSpec],
        cost_model: CostModel,
        *,
        num_gpu_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.env = env
        self.specs = specs
        self.cost_model = cost_model
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_gpu_blocks = num_gpu_blocks
        self.pool = PlainBlockPool(num_gpu_blocks)
        self.waiting: deque[PlainRequest] = deque()
        self.running: list[PlainRequest] = []
        self.requests: list[PlainRequest] = []
        self.rows: list[tuple[float, ...]] = []
        self.has_arrival = env.event()
        env.process(self.arrivals())
        self.done = env.process(self.steps())

    # -- processes ------------------------------------------------------------

    def arrivals(self) -> Generator[simpy.Event, Any, None]:
        """Queue each request at its time."""
        for spec in self.specs:
            if spec.arrival_s > self.env.now:
                yield At(self.env, spec.arrival_s, ARRIVAL_PRIORITY)
            num_prompt_tokens = spec.num_prompt_tokens
            num_tokens = num_prompt_tokens + spec.num_output_tokens
            request = PlainRequest(
                arrival_s=spec.arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                last_num_tokens=min(num_tokens, self.max_model_len),
                num_tokens=num_prompt_tokens,
            )
            self.requests.append(request)
            self.waiting.append(request)
            if not self.has_arrival.triggered:
                self.has_arrival.succeed()

    def steps(self) -> Generator[simpy.Event, Any, None]:
        """Take steps while there is work, and sleep while there is none."""
        step = 0
        while True:
            while not self.running and not self.waiting:
                if len(self.requests) == len(self.specs):
                    return
                self.has_arrival = self.env.event()
                yield self.has_arrival
            start_s = self.env.now
            scheduled, num_preemptions = self.schedule()
            shape = batch_shape(scheduled)
            num_running = len(self.running)
            num_used = self.num_gpu_blocks - 1 - len(self.pool.free_block_ids)
            step_s = self.cost_model.step(shape).total_s
            yield self.env.timeout(step_s)
            num_finished = self.sample(scheduled)
            self.rows.append(
                (
                    step,
                    start_s,
                    step_s,
                    num_running,
                    len(self.waiting),
                    shape.num_decodes,
                    shape.num_prefill_tokens,
                    num_used,
                    shape.num_decode_context_tokens + shape.num_prefill_context_tokens,
                    num_preemptions,
                    num_finished,
                )
            )
            step += 1

    # -- a step ---------------------------------------------------------------

    def schedule(self) -> tuple[list[tuple[PlainRequest, int]], int]:
        """Share the token budget out; return who gets how much, and preemptions."""
        scheduled: list[tuple[PlainRequest, int]] = []
        budget = self.max_num_batched_tokens
        num_preemptions = 0
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_missing_tokens = request.num_tokens - request.num_computed_tokens
            num_new_tokens = min(num_missing_tokens, budget)
            while not self.allocate(request, num_new_tokens):
                victim = self.running.pop()
                self.preempt(victim)
                num_preemptions += 1
                if victim is request:
                    break
            else:
                scheduled.append((request, num_new_tokens))
                budget -= num_new_tokens
                index += 1
        if num_preemptions == 0:
            self.admit(scheduled, budget)
        for request, num_new_tokens in scheduled:
            request.num_computed_tokens += num_new_tokens
        return scheduled, num_preemptions

    def admit(self, scheduled: list[tuple[PlainRequest, int]], budget: int) -> None:
        """Let the head of the queue run, and the next, while all of it would fit."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self.num_blocks(request.num_tokens) > len(self.pool.free_block_ids):
                break
            num_new_tokens = min(request.num_tokens, budget)
            self.allocate(request, num_new_tokens)
            self.waiting.popleft()
            self.running.append(request)
            scheduled.append((request, num_new_tokens))
            budget -= num_new_tokens

    def sample(self, scheduled: list[tuple[PlainRequest, int]]) -> int:
        """Give a token to all that caught up; return how many that finished."""
        num_finished = 0
        for request, _ in scheduled:
            if request.num_computed_tokens < request.num_tokens:
                continue  # a prompt in mid-way
            request.num_tokens += 1
            if request.first_token_s is None:
                request.first_token_s = self.env.now
            if request.num_tokens >= request.last_num_tokens:
                request.finish_s = self.env.now
                self.free(request)
                num_finished += 1
        if num_finished:
            self.running = [each for each in self.running if each.finish_s is None]
        return num_finished

    # -- blocks ---------------------------------------------------------------

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, request: PlainRequest, num_new_tokens: int) -> bool:
        """Give `request` blocks for its next tokens; False if there are too few."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_new_blocks = self.num_blocks(num_tokens) - len(request.block_ids)
        if num_new_blocks > len(self.pool.free_block_ids):
            return False
        for _ in range(num_new_blocks):
            request.block_ids.append(self.pool.take())
        return True

    def free(self, request: PlainRequest) -> None:
        """Take all blocks from `request`; its last one is the next to be reused."""
        for block_id in request.block_ids:
            self.pool.give_back(block_id)
        request.block_ids.clear()

    def preempt(self, victim: PlainRequest) -> None:
        """Queue a request, which runs no more, to be computed again from its start."""
        self.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)


def batch_shape(scheduled: list[tuple[PlainRequest, int]]) -> BatchShape:
    """Count the work of a step, for the cost model."""
    num_decodes = num_decode_context_tokens = num_prefills = 0
    num_prefill_tokens = num_prefill_context_tokens = num_pairs = 0
    for request, num_new_tokens in scheduled:
        num_context_tokens = request.num_computed_tokens
        if num_new_tokens == 1:
            num_decodes += 1
            num_decode_context_tokens += num_context_tokens
        else:
            num_before = num_context_tokens - num_new_tokens
            num_prefills += 1
            num_prefill_tokens += num_new_tokens
            num_prefill_context_tokens += num_context_tokens
            num_pairs += num_new_tokens * num_before
            num_pairs += num_new_tokens * (num_new_tokens + 1) // 2
    return BatchShape(
        num_decodes,
        num_decode_context_tokens,
        num_prefills,
        num_prefill_tokens,
        num_prefill_context_tokens,
        num_pairs,
    )
