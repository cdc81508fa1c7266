"""Parts of the stepwise V1 scheduler: its batch, and its views for policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.errors import SchedulerError
from sim.scheduler.batch import Batch
from sim.scheduler.views import (
    EngineView,
    RequestView,
    RunningRequest,
    WaitingRequest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock
    from sim.scheduler.admission.base import AdmissionRule
    from sim.scheduler.request import Request
    from tests.oracles.v1_manager import KVCacheManager


def is_prefilling(request: Request) -> bool:
    """Whether the latest chunk of a running request left tokens to compute.

    `V1Scheduler` leaves 0 quiet tokens behind such a chunk, and the cache manager at
    least 1 behind any other.
    """
    return not request.num_quiet_tokens


class V1Batch(Batch):
    """The batch being formed, and the rules that hold for this call.

    Attributes
    ----------
    threshold
        Most tokens of one request; 0 for no such limit.
    holds_prefill
        Whether prefill is left alone in this call.
    carries_prefill
        Whether some was scheduled all the same.
    """

    __slots__ = ("carries_prefill", "holds_prefill", "threshold")

    threshold: int
    holds_prefill: bool
    carries_prefill: bool

    def limited(self, num_missing_tokens: int) -> int:
        """Cut missing tokens to the threshold."""
        if 0 < self.threshold < num_missing_tokens:
            return self.threshold
        return num_missing_tokens


class V1Holdings:
    """Facts of a running request in the cache of the V1 engine; see `Holdings`.

    Parameters
    ----------
    manager
        The blocks.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def num_output_tokens(self, request: Request) -> int:
        """See `Holdings`."""
        return request.num_output_tokens

    def num_computed_tokens(self, request: Request) -> int:
        """See `Holdings`."""
        return request.num_computed_tokens

    def num_blocks(self, request: Request) -> int:
        """See `Holdings`. O(1), or O(blocks) with a sliding window."""
        table = request.block_table
        if self._manager.window is None:
            return len(table)
        null_block = self._manager.block_pool.null_block
        return sum(block is not null_block for block in table)

    def num_shared_tokens(self, request: Request) -> int:
        """See `Holdings`. O(shared blocks)."""
        num_shared = 0
        for block in request.block_table[: request.num_cached_blocks]:
            if block.ref_cnt < 2:
                break
            num_shared += 1
        return num_shared * self._manager.block_size


class V1RunningRequest(RunningRequest):
    """The same without detours: an admission may look at all that run, each step."""

    __slots__ = ()

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self._request.num_tokens - self._request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and tokens generated so far."""
        return self._request.num_tokens


class V1AdmissionDesk:
    """Asks an admission rule about the head of the queue.

    Parameters
    ----------
    rule
        The rule that decides.
    manager
        The blocks.
    """

    def __init__(self, rule: AdmissionRule, manager: KVCacheManager) -> None:
        self._rule = rule
        self._manager = manager
        self._holdings = V1Holdings(manager)
        self._finished = getattr(rule, "finished", None)

    def admits(
        self,
        head: WaitingRequest,
        num_spare_blocks: int,
        running: Sequence[Request],
    ) -> bool:
        """Return the rule's answer.

        Parameters
        ----------
        head
            The head of the queue.
        num_spare_blocks
            Free blocks that the engine's own watermark keeps back.
        running
            Requests that run.

        Raises
        ------
        SchedulerError
            If the rule says neither yes nor no.
        """
        pool = self._manager.block_pool
        if head.num_needed_blocks > pool.num_free_blocks - num_spare_blocks:
            return False  # the engine's own rules say no
        holdings = self._holdings
        engine = EngineView(
            num_gpu_blocks=pool.num_usable_blocks + 1,
            block_size=self._manager.block_size,
            num_available_blocks=pool.num_free_blocks - num_spare_blocks,
            running=lambda: [V1RunningRequest(each, holdings) for each in running],
        )
        answer = self._rule.admits(head, engine)
        if answer not in (True, False):
            raise SchedulerError(
                f"admission: admits must return True or False, got "
                f"{str(answer)[:60]}; mend {type(self._rule).__name__}"
            )
        return bool(answer)

    def head(
        self,
        request: Request,
        num_new_tokens: int,
        hits: Sequence[KVCacheBlock],
        *,
        reserves_full: bool,
        most_blocks: int | None,
    ) -> WaitingRequest:
        """Return the view of a request that could be admitted with some tokens."""
        manager = self._manager
        num_tokens = len(hits) * manager.block_size + num_new_tokens
        num_needed_blocks = manager.num_missing_blocks(num_tokens, hits)
        num_full_blocks = manager.num_missing_blocks(
            request.num_tokens, hits, most_blocks=most_blocks
        )
        if reserves_full:
            num_needed_blocks = max(num_needed_blocks, num_full_blocks)
        return WaitingRequest(
            request,
            num_needed_blocks=num_needed_blocks,
            num_full_blocks=num_full_blocks,
        )

    def finished(self, requests: Sequence[Request]) -> None:
        """Tell the rule which requests have ended, if it wants to know."""
        if self._finished is not None:
            for request in requests:
                self._finished(RequestView(request))
