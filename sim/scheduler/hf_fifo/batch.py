"""A call of the `hf_fifo` scheduler while its batch is formed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.scheduler.base import SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cache.hf_fifo.manager import BlockPairs, PagedAttentionCache
    from sim.scheduler.batch import Batch
    from sim.scheduler.request import Request


@dataclass(slots=True)
class HfFifoOutput(SchedulerOutput):
    """A call's decisions; the base class is the engine's view.

    Attributes
    ----------
    restored
        Requests that came back from the CPU in this call; `admitted` has them, too.
    blocks_to_swap_out, blocks_to_swap_in
        Pairs ``(from, to)`` that are copied before the step, out before in.
    gives_up
        Whether no request finds a block and none can be evicted: the release ends.
    """

    restored: list[Request] = field(default_factory=list)
    blocks_to_swap_out: BlockPairs = field(default_factory=list)
    blocks_to_swap_in: BlockPairs = field(default_factory=list)
    gives_up: bool = False


@dataclass(slots=True)
class Pass:
    """One walk over the candidates: what is left of the budgets, and what came of it.

    Attributes
    ----------
    token_budget, request_budget
        Tokens and requests that the batch may still take.
    cache_budget
        Cached tokens that the batch may still read.
    is_decode_only
        Whether the block table serves the batch so far: single tokens in short
        contexts, whose reads have no budget.
    batch
        Counts for the cost model.
    scheduled
        Requests with the tokens that each gets.
    taken
        Requests that have left the queues, scheduled or not.
    admitted
        Requests scheduled for the first time since they waited.
    restored
        Those of them that waited on the CPU.
    starved
        Active requests that found too few blocks, and how many they need.
    allocation_failed
        Whether blocks were short for any request, waiting ones included.
    """

    token_budget: int
    request_budget: int
    cache_budget: int
    is_decode_only: bool
    batch: Batch
    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    taken: set[Request] = field(default_factory=set)
    admitted: list[Request] = field(default_factory=list)
    restored: list[Request] = field(default_factory=list)
    starved: list[tuple[Request, int]] = field(default_factory=list)
    allocation_failed: bool = False

    @property
    def is_spent(self) -> bool:
        """Whether a budget is used up."""
        return (
            self.token_budget == 0
            or self.request_budget == 0
            or (self.cache_budget <= 0 and not self.is_decode_only)
        )


class HfFifoHoldings:
    """Tokens and blocks of an active request; see `Holdings`."""

    def __init__(self, cache: PagedAttentionCache) -> None:
        self._cache = cache

    def num_output_tokens(self, request: Request) -> int:
        return request.num_output_tokens

    def num_computed_tokens(self, request: Request) -> int:
        return request.num_computed_tokens

    def num_blocks(self, request: Request) -> int:
        return len(self._cache.table(request))

    def num_shared_tokens(self, request: Request) -> int:
        num_shared = 0
        for block_id in self._cache.table(request):
            if not self._cache.block_manager.is_shared(block_id):
                break
            num_shared += 1
        return num_shared * self._cache.block_size


def in_turns(first: deque[Request], second: deque[Request]) -> Iterator[Request]:
    """Walk two queues by turns, the first one first, and then the longer one's rest."""
    queues = [iter(first), iter(second)]
    while queues:
        for queue in queues.copy():
            request = next(queue, None)
            if request is None:
                queues.remove(queue)
            else:
                yield request


def without(queue: deque[Request], taken: set[Request]) -> deque[Request]:
    """Return a queue without some requests, which mostly stand at its head."""
    num_left = len(taken)
    while queue and num_left and queue[0] in taken:
        queue.popleft()
        num_left -= 1
    if not num_left:
        return queue
    return deque(request for request in queue if request not in taken)
