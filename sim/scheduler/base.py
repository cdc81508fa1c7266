"""The scheduler as the engine calls it, and the decisions that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cache.errors import require
from sim.scheduler.batch import EMPTY_SHAPE, BatchShape
from sim.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence


class PreemptionMode(Enum):
    """The fate of a preempted request's KV blocks."""

    RECOMPUTE = "recompute"
    """Blocks are freed; all tokens are computed again."""
    SWAP = "swap"
    """Blocks are copied to the CPU and back."""


class Preemption(NamedTuple):
    """One preemption, as the result table records it."""

    request: Request
    for_request: Request
    """The request that found no block; the victim itself if it was the last left."""
    reason: str
    mode: PreemptionMode
    num_tokens_lost: int
    num_blocks_freed: int
    num_blocks_moved: int
    kv_cache_usage_before: float
    kv_cache_usage_after: float


class CacheUsage(NamedTuple):
    """The KV cache right after a scheduler call."""

    num_physical_blocks: int
    """Blocks that at least one table holds."""
    num_logical_blocks: int
    """Entries of all tables."""
    num_physical_tokens: int
    """Tokens stored in the physical blocks."""
    num_logical_tokens: int
    """Computed tokens of all requests that hold a table, this step's included."""
    kv_cache_usage: float
    """Share of the GPU pool that tables hold."""
    cpu_cache_usage: float


def stored_tokens(
    num_logical_tokens: Any,
    num_physical_blocks: Any,
    num_logical_blocks: Any,
    block_size: int,
) -> Any:
    """Return `CacheUsage.num_physical_tokens`; of integers, or arrays of them.

    Only full blocks are ever shared: each extra entry is a block of tokens.
    """
    num_shared_blocks = num_logical_blocks - num_physical_blocks
    return num_logical_tokens - num_shared_blocks * block_size


class ScheduledDrafts(NamedTuple):
    """The draft tokens of a batch, which are among its scheduled tokens."""

    num_tokens: dict[Request, int]
    """Of each request that has some."""
    padding: set[Request]
    """Those whose drafts are empty: admissions that are filled up with them."""

    def queries(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens of each query that verifies drafts, and its context."""
        for request, num_drafts in self.num_tokens.items():
            yield 1 + num_drafts, request.num_computed_tokens


@dataclass(slots=True)
class SchedulerOutput:
    """One scheduler call's decisions.

    Attributes
    ----------
    scheduled
        The batch, in the scheduler's own order.
    num_scheduled_tokens
        Tokens of each request in `scheduled`.
    admitted
        Requests that came from the waiting queue in this call.
    preemptions
        In the order performed.
    ignored
        Requests that the policy refused in this call; their status has been set.
    shape
        The batch as the cost model sees it.
    num_recomputed_tokens
        Tokens of this batch that had been computed before.
    stuck
        Nothing can be scheduled until a request arrives or is aborted: the engine
        then stops asking. An empty batch without this is asked for again.
    completing
        Requests of the batch that its output gives a token; kept by schedulers that
        have several steps in flight, for which the requests' state does not say it.
    drafts
        Draft tokens of the batch, or None without speculative decoding.
    is_known
        Whether its tokens were computed elsewhere, and are there: they are told when
        the host is through with it, whatever is in flight.
    """

    scheduled: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    ignored: list[Request] = field(default_factory=list)
    shape: BatchShape = EMPTY_SHAPE
    num_recomputed_tokens: int = 0
    stuck: bool = False
    completing: list[Request] = field(default_factory=list)
    drafts: ScheduledDrafts | None = None
    is_known: bool = False

    @property
    def num_batched_tokens(self) -> int:
        """Tokens of the batch."""
        return self.shape.num_decodes + self.shape.num_prefill_tokens


class Scheduler(Protocol):
    """Decides, at the start of every step, how many tokens each request computes.

    A policy sees requests, blocks and the clock; how long an output will be is not
    known to it.
    """

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and may compute."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks, preempted ones included."""
        ...

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are on the CPU."""
        ...

    def admission_error(self, request: Request) -> str | None:
        """Return why `request` can never be served, or None."""
        ...

    def add_request(self, request: Request) -> None:
        """Queue an arrived request."""
        ...

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Form the batch of the next step, moving blocks and queues."""
        ...

    def update(self, finished: Sequence[Request]) -> None:
        """Release requests that the step's output finished, in batch order.

        Their status has been set already.
        """
        ...

    def abort(self, request: Request) -> None:
        """Withdraw an unfinished request, wherever it stands."""
        ...

    def cache_usage(self) -> CacheUsage:
        """Return the numbers of blocks that the cache holds now."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return counters of this policy for the run's summary, JSON-ready."""
        ...

    def check(self) -> None:
        """Prove the invariants of queues and blocks in O(n)."""
        ...


class ClockedScheduler(Scheduler, Protocol):
    """A scheduler that keeps its running decodes on a decode clock.

    Every request on the clock computes one token a step, so that nothing is written
    for it until it opens a block or ends. The engine gives such decodes their last
    token by a calendar, and takes steps in which nothing else happens in stretches.

    Attributes
    ----------
    running, waiting
        The queues; sized.
    clock
        Counts of the decodes: `num_decodes`, `num_base_tokens`, `buckets`.
    tables
        Counts of the blocks, and their observer.
    completing
        Requests whose last prompt chunk was in the latest batch.
    passed_over
        Decodes that run and get no token in the latest batch.
    count_blocks
        Called, if it is there, when a run begins in which nothing looks at blocks one
        by one: their ids need not be kept.
    decodes_pause
        Whether these are all of them, or none; it may be missing, for no.
    preemptions, num_recomputed_tokens
        See `SchedulerOutput`; of the latest batch.
    moves_blocks
        Whether batches copy or swap blocks, which six fields of a shape do not say.
    num_unquestioned_tokens
        A request whose prompt is shorter than this, and which ends there at the latest,
        has no `admission_error`.
    foresees_usage
        Whether quiet steps take a block for each that opens, and nothing else changes.
    groups
        Block tables of several groups, or None.
    num_blocks_by_group
        Blocks that each of these holds after the first of the latest quiet steps, after
        the second, and so on.
    """

    moves_blocks: bool
    num_unquestioned_tokens: int
    foresees_usage: bool
    running: Any
    waiting: Any
    clock: Any
    tables: Any
    block_size: int
    step: int
    completing: list[Request]
    passed_over: list[Request]
    preemptions: list[Preemption]
    num_recomputed_tokens: int
    groups: Any
    num_blocks_by_group: list[int]

    def form(self, now_s: float) -> tuple[int, int, int, int, int, int]:
        """Form the next batch as `schedule` does; return six fields of its shape."""
        ...

    def output(self, shape: Sequence[int]) -> SchedulerOutput:
        """Return the decisions of the latest `form` as an object."""
        ...

    def usage_facts(self) -> tuple[int, int, int]:
        """Return physical and logical blocks, and logical tokens, of `cache_usage`."""
        ...

    def quiet_steps(self, most: int) -> int:
        """Return how many next steps, at most `most`, only let the same decodes run.

        Changes nothing.
        """
        ...

    def advance(self, num_steps: int) -> Sequence[int]:
        """Take quiet steps; return how many blocks tables took in each.

        With `groups`: `usage_facts` after each, one after the other.
        """
        ...

    def usage_after(self, num_steps: int) -> float:
        """Return the share of blocks in use when so many quiet steps more have begun.

        Asked only if it `foresees_usage`. Changes nothing.
        """
        ...

    def begin_decoding(self, requests: Sequence[Request]) -> None:
        """Put those of `completing` that go on onto the clock, in batch order."""
        ...


def schedules_groups(scheduler: object) -> bool:
    """Whether the samples of a prompt are one scheduled unit, not one request each."""
    return bool(getattr(type(scheduler), "schedules_groups", False))


def check_queues(
    running: Collection[Request], waiting: Iterable[Request], max_num_seqs: int
) -> None:
    """Prove that requests stand where their status says, and once."""
    require(
        len(running) <= max_num_seqs,
        f"{len(running)} requests run, max_num_seqs is {max_num_seqs}",
    )
    for request in running:
        require(
            request.status is RequestStatus.RUNNING,
            f"request {request.request_id} runs as {request.status.value}",
        )
    for request in waiting:
        require(
            request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and request.num_computed_tokens == 0,
            f"request {request.request_id} waits as {request.status.value} with "
            f"{request.num_computed_tokens} computed tokens",
        )
    ids = [request.request_id for request in (*running, *waiting)]
    require(len(set(ids)) == len(ids), "a request stands twice in the queues")
