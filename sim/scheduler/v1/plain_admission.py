"""Admission where a request asks for nothing but free blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.policies import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.v1.id_tables import IdTables
    from sim.scheduler.v1.holdings import Holdings
    from sim.scheduler.v1.queues import FCFSRequestQueue

# Looked up once: members of an enum are found by a call.
_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED


class PlainAdmission:
    """The scan of the queue where nothing is cached, in one walk.

    It decides as `Scheduler` does, in half the time.

    Parameters
    ----------
    holdings
        Of a scheduler that `may_use` it.
    ids, waiting
        Its blocks and its queue.
    schedule_waiting
        Its own scan, given the budget and the time: it knows prompts, admitted
        unchecked, that have more tokens than slots.
    """

    def __init__(
        self,
        holdings: Holdings,
        ids: IdTables,
        waiting: FCFSRequestQueue,
        schedule_waiting: Callable[[int, float], None],
    ) -> None:
        self._holdings = holdings
        self._gate = holdings.gate
        self._ids = ids
        self._waiting = waiting
        self._schedule_waiting = schedule_waiting
        self._most_running = holdings.settings.most_running
        self._chunks_prompts = holdings.settings.enable_chunked_prefill

    def admit(self, budget: int, now_s: float) -> None:
        """Admit from the head of the queue while everything lasts."""
        waiting, gate = self._waiting, self._gate
        if waiting[0] is gate.head:
            return
        holdings, ids = self._holdings, self._ids
        running, block_size = holdings.running, ids.block_size
        while waiting and budget and len(running) < self._most_running:
            request = waiting[0]
            num_whole = num_tokens = request.num_tokens
            if num_whole > holdings.max_model_len:
                self._schedule_waiting(budget, now_s)
                return
            if num_tokens > budget:
                if not self._chunks_prompts:
                    return
                num_tokens = budget
            num_blocks = -(-num_tokens // block_size)
            num_needed = num_blocks + gate.num_spare_blocks
            if gate.reserves_beside and num_tokens < num_whole:
                num_needed += -(-num_whole // block_size) - num_blocks
            if num_needed > ids.num_free_blocks and (
                running or not self._fits_alone(num_blocks, num_whole)
            ):
                gate.shut(request, NEVER, num_needed)
                return
            waiting.popleft()
            request.table = ids.take(num_blocks)
            if request.status is not _PREEMPTED:
                request.first_scheduled_s = now_s
            request.status = _RUNNING
            request.order = holdings.num_admitted
            holdings.num_admitted += 1
            running[request] = holdings.prefilling[request] = None
            budget -= num_tokens
            request.num_computed_tokens = num_tokens
            holdings.num_chunk_tokens += num_tokens
            if request.num_recompute_tokens:
                holdings.note_recomputed(request, 0, num_tokens)
            holdings.prompts.append((request, 0, num_tokens))
            if num_tokens == num_whole:
                holdings.completing.append(request)

    def _fits_alone(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a head gets `num_blocks` of those of all its tokens, if none runs."""
        if self._gate.reserves_all:
            num_blocks = -(-num_tokens // self._ids.block_size)
        return num_blocks <= self._ids.num_free_blocks
