"""Schedulers of sequence groups, stepped by hand with the real output processing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from cache.tokens import SegmentTokens
from sim.engine.group_sampling import sampler_for
from sim.scheduler.groups.scheduler import GroupScheduler
from sim.scheduler.groups.settings import SchedulerConfig
from sim.scheduler.request import Request
from sim.scheduler.settings import CacheConfig

if TYPE_CHECKING:
    from sim.scheduler.groups.output import GroupSchedulerOutput
    from sim.scheduler.groups.sequence import Sequence

CACHE_KEYS = frozenset(
    {
        "block_size",
        "enable_prefix_caching",
        "evictor",
        "num_cpu_blocks",
        "num_gpu_blocks",
        "sliding_window",
        "watermark",
    }
)
SchedulerT = TypeVar("SchedulerT", bound=GroupScheduler)


def make(kind: type[SchedulerT], **changes: Any) -> SchedulerT:
    """A scheduler of 20 + 20 blocks of 4 tokens, unless said otherwise."""
    cache: dict[str, Any] = {
        "block_size": 4,
        "num_gpu_blocks": 20,
        "num_cpu_blocks": 20,
        "watermark": 0.0,
    }
    rules: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "max_model_len": 64,
        "max_paddings": 64,
    }
    more = {key: changes.pop(key) for key in ("stats",) if key in changes}
    for key, value in changes.items():
        (cache if key in CACHE_KEYS else rules)[key] = value
    return kind(SchedulerConfig(**rules), CacheConfig(**cache), **more)


class Steps:
    """A scheduler, its requests, and a step counter."""

    def __init__(self, scheduler: GroupScheduler) -> None:
        self.scheduler: Any = scheduler
        self.requests: list[Request] = []
        self.sample = sampler_for(scheduler)
        self.num_steps = 0

    def add(
        self, num_prompt_tokens: int, num_output_tokens: int = 30, **more: Any
    ) -> Request:
        """Let a request arrive; `prompt` names its segments, else it is its own."""
        index = len(self.requests)
        prompt = more.pop("prompt", ((2 * index, num_prompt_tokens),))
        branches = more.pop("branches", ())
        width = more.pop("width", len(branches) or 1)
        limit = self.scheduler.scheduler_config.max_model_len
        length = num_prompt_tokens + num_output_tokens
        request = Request(
            request_id=index,
            arrival_s=float(index),
            num_prompt_tokens=num_prompt_tokens,
            tokens=SegmentTokens(prompt, 2 * index + 1),
            max_num_tokens=min(length, limit),
            oracle_num_tokens=length,
            num_sequences=width,
            oracle_branch_num_tokens=tuple(num_prompt_tokens + n for n in branches),
            **more,
        )
        self.requests.append(request)
        self.scheduler.add_request(request)
        return request

    def call(self) -> GroupSchedulerOutput:
        """Call the scheduler and prove what it did."""
        output: GroupSchedulerOutput = self.scheduler.schedule(float(self.num_steps))
        self.scheduler.check()
        return output

    def step(self) -> GroupSchedulerOutput:
        """Call the scheduler and let the output appear."""
        output = self.call()
        self.emit(output)
        return output

    def emit(self, output: GroupSchedulerOutput) -> None:
        """Let the output of a call appear."""
        finished = self.sample(output, self.num_steps, float(self.num_steps))
        self.scheduler.update(finished)
        self.scheduler.check()
        self.num_steps += 1

    def steps(self, num_steps: int) -> None:
        """Take so many steps."""
        for _ in range(num_steps):
            self.step()

    def run(self, limit: int = 500) -> None:
        """Step until nothing is unfinished."""
        while self.scheduler.has_unfinished_seqs():
            self.step()
            assert self.num_steps < limit

    def seqs(self, request: Request) -> list[Sequence]:
        """Sequences of a request that is in the queues."""
        seqs: list[Sequence] = self.scheduler.group_of(request).get_seqs()
        return seqs

    def table(self, request: Request, index: int = 0) -> list[int]:
        """Block ids of one sequence."""
        manager = self.scheduler.block_manager
        table: list[int] = manager.get_block_table(self.seqs(request)[index])
        return table


def batch(output: GroupSchedulerOutput) -> list[tuple[int | str, int, str]]:
    """A batch as the logs write it."""
    return [
        (
            entry.seq_group.request_id,
            entry.token_chunk_size,
            "p" if entry.is_prefill else "d",
        )
        for entry in output.scheduled_seq_groups
    ]


def chunks(output: GroupSchedulerOutput) -> list[tuple[int | str, int, int, int]]:
    """Prefills of a batch: who, tokens, computed before, cached."""
    return [
        (
            entry.seq_group.request_id,
            entry.token_chunk_size,
            entry.num_computed_tokens,
            entry.num_cached_tokens,
        )
        for entry in output.scheduled_seq_groups
        if entry.is_prefill
    ]


def preempted(output: GroupSchedulerOutput) -> list[tuple[int, str]]:
    """Preemptions as the logs write them."""
    return [(p.request.request_id, p.mode.value) for p in output.preemptions]


def queued(scheduler: GroupScheduler) -> tuple[list[int | str], ...]:
    """Waiting, running and swapped, by request id."""
    queues = (scheduler.waiting, scheduler.running, scheduler.swapped)
    return tuple([group.request_id for group in queue] for queue in queues)
