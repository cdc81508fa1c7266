"""The prefix that all requests of a batch share, in blocks that each of them holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.v1.common_prefix import num_common_prefix_blocks
from sim.scheduler.batch import BatchShape, SharingShape

if TYPE_CHECKING:
    from sim.scheduler.request import Request


class CommonPrefix:
    """Tokens of the prefix that the requests of a scheduler share, batch by batch.

    A block of it is held by every request that holds any, also by those that have no
    token in the batch. It ends before the first token that a request of the batch
    computes, with a whole block.

    Parameters
    ----------
    scheduler
        A `sim.scheduler.v1.scheduler.Scheduler` of one group of layers, of whose
        requests those alone hold blocks that run.

    Attributes
    ----------
    refused
        Heads of the queue that found no room, some of which may have come in since. In
        some releases they count as if they held blocks, so that nothing is common to
        all: a look at a request without a table left it an empty one.

    Notes
    -----
    Source: vLLM 0.17.1, ``vllm/v1/core/sched/scheduler.py``, ``kv_cache_manager.py``
    (`get_num_common_prefix_blocks`) and ``v1/worker/gpu_model_runner.py``
    (`_compute_cascade_attn_prefix_len`).
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.refused: set[Request] = set()
        self._counts_refused = scheduler.dialect.counts_refused_heads
        self._num_known = 0  # tokens that all requests had computed at a batch before

    def num_blocks(self) -> list[int]:
        """Return how many leading blocks all requests with blocks hold, by group."""
        scheduler = self._scheduler
        running = scheduler.running
        if not running:
            return [0] * len(scheduler.layout.groups)
        num_tables = len(running)
        if self.refused:
            self.refused = {
                request
                for request in self.refused
                if not (request in running or request.status.is_finished)
            }
            num_tables += len(self.refused) * self._counts_refused
        first = next(iter(running))
        return num_common_prefix_blocks(scheduler.tables, first, num_tables)

    def of_decodes(self) -> int:
        """Return those of quiet steps: each has computed the blocks that it shares."""
        num_tokens: int = self.num_blocks()[0] * self._scheduler.block_size
        if not num_tokens:
            self._num_known = 0
        return num_tokens

    def of_batch(self) -> int:
        """Return those of the batch that was formed last."""
        num_tokens = self.of_decodes()
        if not num_tokens:
            return 0
        scheduler = self._scheduler
        for _, num_before, _ in scheduler.prompts:
            num_tokens = min(num_tokens, num_before)
        if num_tokens > self._num_known:
            # Only a block that a decode has filled now may be a new one of the prefix.
            passed_over = set(scheduler.passed_over)
            base_tokens = [
                request.base_tokens
                for bucket in scheduler.clock.buckets
                for request in bucket
                if request not in passed_over
            ]
            if base_tokens:
                num_before = min(base_tokens) + scheduler.step - 2
                num_tokens = min(num_tokens, num_before)
        self._num_known = num_tokens
        block_size: int = scheduler.block_size
        return num_tokens - num_tokens % block_size

    def told(self, *counts: int, **moved: int) -> BatchShape:
        """Return the shape of the batch that was formed last, and what it shares."""
        shape = BatchShape(*counts)._replace(**moved)
        num_common_tokens = self.of_batch()
        if not num_common_tokens:
            return shape
        return SharingShape.of(shape, num_common_tokens)
