"""The V1 scheduler on the virtual decode clock."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from sim.fast.exact import check_exact
from sim.fast.state import FastV1State
from sim.scheduler.base import SchedulerOutput
from sim.scheduler.batch import Batch
from sim.scheduler.v1 import V1Scheduler
from sim.scheduler.v1_settings import V1Settings

if TYPE_CHECKING:
    from cache.managers.v1_fast import Found
    from cache.managers.v1_ids import IdTables
    from sim.request import Request


class FastV1Scheduler(FastV1State):
    """`sim.scheduler.v1.V1Scheduler`, decision by decision, for quiet decodes.

    What makes it exact: every running request but the last decodes one token in every
    step. That holds for first come, first served with a budget that the batch cannot
    use up, for then at most one prompt is in mid-way, and it was admitted last. So

    - a step looks at the decodes that open or fill a block, and at no other;
    - `running` is a dict in running order: its last request is the victim;
    - a queue head that waits for blocks is not looked at again before something could
      change the answer.

    Parameters
    ----------
    num_gpu_blocks, block_size, enable_prefix_caching, sliding_window
        See `sim.scheduler.v1.V1Scheduler`.
    **settings
        Its other parameters.

    Raises
    ------
    NotExactError
        If the settings break the conditions; nothing has been built then.
    SchedulerError
        If the settings are refused anyway.
    """

    # The twin's arguments, for who builds either from a table.
    __signature__ = signature(V1Scheduler)

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        sliding_window: int | None = None,
        **settings: Any,
    ) -> None:
        checked = V1Settings(**settings)
        check_exact(checked, sliding_window)
        super().__init__(
            checked,
            num_gpu_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._most_running = checked.most_running
        self._budget = checked.token_budget
        self._chunks = checked.enable_chunked_prefill
        self._reserve_full_isl = checked.reserve_full_isl
        self._watermark_blocks = int(checked.watermark * num_gpu_blocks)

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Form the batch of the next step; see `V1Scheduler.schedule`.

        `SchedulerOutput.scheduled` holds the prompts only; all other running requests
        decode.
        """
        step = self.step
        self.step = step + 1
        output = SchedulerOutput()
        self._decode(step, output)
        clock = self.clock
        batch = Batch(self._budget - clock.num_decodes)
        batch.num_decodes = clock.num_decodes
        batch.num_decode_context_tokens = clock.num_context_tokens(step)
        if self.partial is not None:
            self._go_on(self.partial, output, batch)
        if self.waiting and not output.preemptions:
            if self._ids is None:
                self._schedule_waiting(output, batch, now_s)
            elif not self._head_is_blocked:
                self._schedule_waiting_plain(self._ids, output, batch, now_s)
        output.shape = batch.shape()
        output.num_recomputed_tokens = batch.num_recomputed_tokens
        output.stuck = not (
            clock.num_decodes
            or output.scheduled
            or (output.preemptions and self.running)
        )
        return output

    def _decode(self, step: int, output: SchedulerOutput) -> None:
        """Give decodes the blocks that they open, and register those they fill."""
        tables = self.tables
        opening = self.clock.opening(step)
        if len(opening) <= tables.num_free_blocks:
            tables.append_blocks(opening)
        else:
            self._append_or_preempt(list(opening), step, output)
        if self.enable_caching:
            tables.register_blocks(self.clock.filling(step))

    def _append_or_preempt(
        self, opening: list[Request], step: int, output: SchedulerOutput
    ) -> None:
        """Do so one by one, in running order, preempting from the tail."""
        tables, running = self.tables, self.running
        for request in opening:
            if request not in running:
                return  # and those behind it went before it
            while not tables.num_free_blocks:
                victim, _ = running.popitem()
                self._preempt(victim, request, step, output)
                if victim is request:
                    return
            tables.append_blocks((request,))

    def _go_on(self, request: Request, output: SchedulerOutput, batch: Batch) -> None:
        """Compute the next chunk of the prompt in mid-way, which runs last."""
        block_size = self.block_size
        before = request.num_computed_tokens
        num_new_tokens = min(request.num_tokens - before, batch.budget)
        after = before + num_new_tokens
        num_new_blocks = -(-after // block_size) - -(-before // block_size)
        if num_new_blocks > self.tables.num_free_blocks:
            del self.running[request]
            self._preempt(request, request, self.step - 1, output)
            return
        self.tables.extend(request, after)
        self.partial = None
        self._advance(request, num_new_tokens, output, batch)

    def _schedule_waiting(
        self, output: SchedulerOutput, batch: Batch, now_s: float
    ) -> None:
        """Admit from the head of the queue while everything lasts."""
        waiting, running, tables = self.waiting, self.running, self.tables
        while waiting and batch.budget and len(running) < self._most_running:
            if self._head_is_blocked and not tables.watch_hit:
                return
            request = waiting[0]
            if not tables.num_free_blocks:
                self._head_is_blocked = True
                return
            found = tables.find(request, request.num_tokens)
            num_hits = found.num_blocks * self.block_size
            num_new_tokens = request.num_tokens - num_hits
            if num_new_tokens > batch.budget:
                if not self._chunks:
                    return
                num_new_tokens = batch.budget
            if not self._fits(request, num_hits + num_new_tokens, found):
                return
            waiting.popleft()
            self._look_again()
            tables.begin(request, num_hits + num_new_tokens, found)
            self._admit(request, num_hits, now_s)
            output.admitted.append(request)
            self._advance(request, num_new_tokens, output, batch)

    def _schedule_waiting_plain(
        self, tables: IdTables, output: SchedulerOutput, batch: Batch, now_s: float
    ) -> None:
        """Do so where nothing is cached, so that nothing is found."""
        waiting, running, block_size = self.waiting, self.running, self.block_size
        while waiting and batch.budget and len(running) < self._most_running:
            request = waiting[0]
            num_tokens = num_whole = request.num_tokens
            if num_tokens > batch.budget:
                if not self._chunks:
                    return
                num_tokens = batch.budget
            num_blocks = -(-num_tokens // block_size)
            num_needed = num_blocks
            if self._reserve_full_isl and num_tokens < num_whole:
                num_needed = -(-num_whole // block_size)
            num_spare = self._watermark_blocks if running else 0
            if num_needed + num_spare > tables.num_free_blocks:
                self._head_is_blocked = True
                return
            waiting.popleft()
            request.table = tables.take(num_blocks)
            self._admit(request, 0, now_s)
            output.admitted.append(request)
            self._advance(request, num_tokens, output, batch)

    def _fits(self, request: Request, num_tokens: int, found: Found) -> bool:
        """Whether the head gets its first slots, up to token `num_tokens`.

        If not, it is not looked at again before that could change: more blocks are
        needed, and fewer free, with every block that decodes take, whether or not
        it is one that was found. Only where the budget cuts the prompt, a hit that
        is lost might lower what is needed now, so there every call looks.
        """
        tables, block_size = self.tables, self.block_size
        num_spare = self._watermark_blocks if self.running else 0
        num_free = tables.num_free_blocks - num_spare - found.num_revived
        num_free += found.num_blocks
        whole = request.num_tokens
        if self._reserve_full_isl and -(-whole // block_size) > num_free:
            fits = False
        else:
            fits = -(-num_tokens // block_size) <= num_free
        if fits:
            return True
        self._head_is_blocked = (
            self._reserve_full_isl or num_tokens == whole or not self.enable_caching
        )
        tables.watch(request, whole, found)
        return False

    # -- quiet steps ----------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether the next call could find nothing to do but let decodes go on.

        Nobody is in mid-way, and nobody can be admitted: the queue is empty, its head
        waits for blocks, or as many requests run as may.
        """
        return (
            self.partial is None
            and self.clock.num_decodes > 0
            and (
                not self.waiting
                or self._head_is_blocked
                or len(self.running) >= self._most_running
            )
        )

    def quiet_steps(self, most: int) -> int:
        """Return how many quiet steps, at most `most`, have all blocks they open.

        None where a decode may fill a block that the head of the queue waits for: the
        step that fills it looks at the head. For a quiet scheduler. Changes nothing.
        """
        if self._head_is_blocked and self.tables.will_fill_watched(self.running):
            return 0
        num_free, clock = self.tables.num_free_blocks, self.clock
        if (most // self.block_size + 1) * clock.num_decodes <= num_free:
            return most
        for num_steps in range(most):
            num_free -= len(clock.opening(self.step + num_steps))
            if num_free < 0:
                return num_steps
        return most

    def advance(self, num_steps: int) -> list[int]:
        """Take `num_steps` quiet steps; return how many blocks each opens."""
        step = self.step
        self.step = step + num_steps
        if self._ids is not None:
            return self._ids.append_rounds(self.clock.buckets, step, num_steps)
        tables, buckets, block_size = self.tables, self.clock.buckets, self.block_size
        num_opened: list[int] = []
        for now in range(step, step + num_steps):
            opening = buckets[now % block_size]
            if opening:
                tables.append_blocks(opening)
            num_opened.append(len(opening))
            filling = buckets[(now + 1) % block_size]
            if filling:
                tables.register_blocks(filling)
        return num_opened
