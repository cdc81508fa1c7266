"""Decodes of sequence groups, advanced by counting steps.

A group of one sequence that decodes computes one token whenever running groups have
their turn. Nothing is written for it until its sequence opens a block, or leaves.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from cache.errors import require
from sim.scheduler.v1.clock import DecodeClock

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from cache.stats import BlockTier
    from sim.scheduler.groups.output import GroupSchedulerOutput
    from sim.scheduler.groups.sequence import (
        GroupBlockManager,
        Sequence,
        SequenceGroup,
    )
    from sim.scheduler.request import Request


class Queues(Protocol):
    """The scheduler whose decodes these are; see `GroupScheduler`."""

    block_manager: GroupBlockManager
    running: deque[SequenceGroup]
    waiting: deque[SequenceGroup]
    swapped: deque[SequenceGroup]

    def running_key(self) -> Callable[[SequenceGroup], Any] | None: ...

    def decodes_together(self, num_decodes: int, num_others: int) -> bool: ...

    def may_be_quiet(self) -> bool: ...

    def group_of(self, request: Request) -> SequenceGroup: ...


class GroupDecodes:
    """The groups at the head of the running queue, as far as each is one decode.

    A *turn* is a step in which running groups compute. Prompt steps of the generations
    that keep them apart are none: all decodes wait in them.

    Parameters
    ----------
    scheduler
        Its running queue begins with the groups on the clock, in running order.
    block_size
        Tokens a block.
    pool
        The blocks of the GPU.

    Attributes
    ----------
    clock
        Counts turns in place of steps.
    num_turns
        Turns taken.
    num_other_steps
        Steps of the engine, up to the latest one, that were no turns.
    left
        Requests that left the clock since the output was last processed, but for those
        that ended.
    """

    def __init__(self, scheduler: Queues, block_size: int, pool: BlockTier) -> None:
        self.scheduler = scheduler
        self.block_size = block_size
        self.num_usable_blocks = pool.num_blocks
        self.clock = DecodeClock(block_size)
        self.num_turns = 0
        self.num_other_steps = 0
        self.left: list[Request] = []
        self._gpu: Any = pool.store
        self._seqs: dict[Request, Sequence] = {}
        # Of each, the turns and the runs that there were when it joined.
        self._joined_at: dict[Request, tuple[int, int]] = {}
        # Runs of steps that were turns; the last one may go on.
        self._runs: list[tuple[int, int]] = []
        self._num_noted_turns = 0
        # The head of the waiting queue that was refused, and the free blocks and
        # running groups that there were.
        self._refused: tuple[SequenceGroup, int, int] | None = None
        self._next_order = 0

    # -- what the engine asks -------------------------------------------------

    @property
    def num_decodes(self) -> int:
        """Groups on the clock."""
        return self.clock.num_decodes

    @property
    def num_base_tokens(self) -> int:
        """Sum of their tokens at the start of a step, if its number were 0."""
        clock = self.clock
        return clock.num_base_tokens - clock.num_decodes * self.num_other_steps

    @property
    def is_observed(self) -> bool:
        """Whether anything is told of each GPU block that moves."""
        return self._gpu.observer is not None

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the GPU pool."""
        num_free: int = self._gpu.get_num_free_blocks()
        return num_free

    @property
    def num_logical_blocks(self) -> int:
        """Entries of all GPU tables."""
        return self.scheduler.block_manager.num_logical_blocks

    def quiet_steps(self, most: int) -> int:
        """Return how many next steps, at most `most`, only let the same decodes run.

        Blocks are short, as the releases see it, where none is free although none is
        needed; so one is left. Changes nothing.
        """
        scheduler, num_decodes = self.scheduler, self.clock.num_decodes
        if not num_decodes or num_decodes != len(scheduler.running):
            return 0
        num_free = self.num_free_blocks
        if (
            scheduler.swapped
            or (scheduler.waiting and not self._stays_refused(num_free))
            or not scheduler.may_be_quiet()
            or not scheduler.decodes_together(num_decodes, 0)
            # Blocks that a group has lost, or shares, are counted step by step.
            or self.num_usable_blocks - num_free != self.num_logical_blocks
        ):
            return 0
        block_size = self.block_size
        if (most // block_size + 1) * num_decodes < num_free:
            return most
        buckets, turn = self.clock.buckets, self.num_turns
        for num_steps in range(most):
            num_free -= len(buckets[(turn + num_steps) % block_size])
            if num_free < 1:
                return num_steps
        return most

    def _stays_refused(self, num_free_blocks: int) -> bool:
        """Whether the head of the waiting queue is refused as it was."""
        if self._refused is None:
            return False
        head, most_free_blocks, num_running = self._refused
        return (
            head is self.scheduler.waiting[0]
            and num_free_blocks <= most_free_blocks
            and len(self.scheduler.running) >= num_running
        )

    def advance(self, num_turns: int) -> list[int]:
        """Take turns; return how many blocks tables took in each."""
        open_block, seqs = self.scheduler.block_manager.open_block, self._seqs
        buckets, turn = self.clock.buckets, self.num_turns
        num_opened = []
        for later in range(num_turns):
            bucket = buckets[(turn + later) % self.block_size]
            for request in bucket:
                open_block(seqs[request])
            num_opened.append(len(bucket))
        self.num_turns += num_turns
        return num_opened

    # -- what the scheduler asks ----------------------------------------------

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens of all groups on the clock."""
        return self.clock.num_context_tokens(self.num_turns - 1)

    def take_turn(self, output: GroupSchedulerOutput) -> list[SequenceGroup]:
        """Give groups on the clock their slots, and take them off the running queue.

        Where blocks or budget may not suffice all leave the clock instead, to be asked
        one by one.
        """
        scheduler, num_decodes = self.scheduler, self.clock.num_decodes
        running = scheduler.running
        num_free = self.num_free_blocks - len(self.clock.opening(self.num_turns))
        if (
            not num_decodes
            or num_free < 1
            or not scheduler.decodes_together(num_decodes, len(running) - num_decodes)
        ):
            self.leave_all()
            return []
        output.num_clocked = num_decodes
        output.num_clocked_tokens = self.clock.num_context_tokens(self.num_turns)
        self.advance(1)
        if num_decodes == len(running):
            taken = list(running)
            running.clear()
            return taken
        return [running.popleft() for _ in range(num_decodes)]

    def note_refused(
        self, output: GroupSchedulerOutput, *, was_looked_at: bool
    ) -> None:
        """Note that the head of the waiting queue could not join a batch of decodes."""
        scheduler = self.scheduler
        self._refused = None
        if (
            was_looked_at
            and scheduler.waiting
            and not (output.scheduled_seq_groups or output.preemptions)
        ):
            head, num_running = scheduler.waiting[0], len(scheduler.running)
            self._refused = head, self.num_free_blocks, num_running

    def leave(self, request: Request) -> None:
        """Take a request off the clock, if it is on it."""
        seq = self._seqs.pop(request, None)
        if seq is not None:
            self.clock.leave(request)
            self._settle(request, seq)
            self._note_runs(request)
            self.left.append(request)

    def leave_all(self) -> None:
        """Take all requests off the clock."""
        for request in list(self._seqs):
            self.leave(request)

    def settle_all(self) -> None:
        """Write down how far the decodes came; they stay on the clock."""
        for request, seq in self._seqs.items():
            self._settle(request, seq)

    def _settle(self, request: Request, seq: Sequence) -> None:
        num_tokens = request.base_tokens + self.num_turns
        num_new = num_tokens - seq.get_len()
        if num_new:
            seq.extend(request.tokens, num_new)
            seq.num_computed_tokens = num_tokens - 1
            request.num_tokens = num_tokens
            request.num_generated_tokens += num_new
            self.scheduler.block_manager.show_tokens(seq)

    # -- what the sampler asks ------------------------------------------------

    def note_step(self, step: int) -> None:
        """Note which steps, the latest being `step`, were turns."""
        num_turns = self.num_turns - self._num_noted_turns
        if num_turns:
            runs, first = self._runs, step - num_turns + 1
            if runs and runs[-1][1] == first - 1:
                first = runs.pop()[0]
            runs.append((first, step))
            self._num_noted_turns = self.num_turns
        self.num_other_steps = step + 1 - self.num_turns

    def end(self, request: Request) -> Sequence:
        """Take a request that has its last token off the clock."""
        seq = self._seqs[request]
        self.leave(request)
        self.left.pop()
        return seq

    def join(self, step: int, num_ended: int) -> list[Request]:
        """Put groups that go on decoding onto the clock, after `step`.

        Returns those that joined. The running queue still begins with `num_ended`
        groups more than are on the clock, that have ended.
        """
        scheduler = self.scheduler
        num_clocked = self.clock.num_decodes + num_ended
        running = scheduler.running
        if len(running) == num_clocked:
            return []
        key = scheduler.running_key()
        if key is not None and not self._is_sorted(running, num_clocked, key):
            self.leave_all()  # for a step, which sorts
            return []
        seqs = self._seqs
        joined: list[Request] = []
        for group in islice(running, num_clocked, None):
            request = group.request
            if group.is_finished() or request in seqs:
                continue
            seq = group.first_seq
            if (
                request is None
                or request.num_sequences > 1
                or seq.is_prefill
                or seq.num_computed_tokens != seq.get_len() - 1
            ):
                break
            seqs[request] = seq
            request.joined_step = step
            self._joined_at[request] = self.num_turns, len(self._runs)
            request.order = self._next_order
            self._next_order += 1
            joined.append(request)
        self.clock.join_all(joined, self.num_turns)
        return joined

    def _is_sorted(
        self,
        running: deque[SequenceGroup],
        num_clocked: int,
        key: Callable[[SequenceGroup], Any],
    ) -> bool:
        """Whether a running queue is sorted, as its first `num_clocked` are."""
        keys = list(map(key, islice(running, max(num_clocked - 1, 0), None)))
        return keys == sorted(keys)

    def _note_runs(self, request: Request) -> None:
        """Note in which steps a request got its tokens on the clock."""
        num_turns, num_runs = self._joined_at.pop(request)
        if num_turns == self._num_noted_turns:
            return
        step, runs = request.joined_step, self._runs[max(num_runs - 1, 0) :]
        first, last = runs[0]
        if last <= step:
            del runs[0]
        elif first <= step:
            runs[0] = step + 1, last
        request.note_runs(runs, self._num_noted_turns - num_turns)

    # -- proof ----------------------------------------------------------------

    def check(self) -> None:
        """Prove that the running queue begins with the groups on the clock; O(n)."""
        running = list(islice(self.scheduler.running, self.clock.num_decodes))
        requests = [group.request for group in running if group.request is not None]
        require(
            self._seqs.keys() == set(requests),
            f"requests {sorted(each.request_id for each in self._seqs)} are on the "
            f"clock, the running queue begins with {requests}",
        )
        self.clock.check(requests)
