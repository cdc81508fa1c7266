"""The model's output for a batch of sequence groups: tokens, forks, beams, ends.

The counterpart of `sim.engine.sampling` for the generations that schedule groups, and
like it the only reader of output lengths (invariant 4). Which beam survives is the
model's choice, too; it follows from the request's seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heappop
from typing import TYPE_CHECKING, Any

from cache.sequences import SequenceStatus
from sim.engine.sampling import (
    NEVER,
    InFlightSampler,
    OutputCalendar,
    running_order,
    sample,
)
from sim.engine.verification import SpeculativeSampler
from sim.scheduler.base import schedules_groups
from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.engine.sampling import Sampler
    from sim.scheduler.base import Preemption
    from sim.scheduler.groups.decodes import GroupDecodes
    from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup
    from sim.scheduler.groups.scheduler import GroupScheduler
    from sim.scheduler.groups.sequence import Sequence, SequenceGroup
    from sim.scheduler.request import Request
    from workloads.acceptance import Acceptance

_RUNNING = SequenceStatus.RUNNING


def sampler_for(scheduler: Any, acceptance: Acceptance | None = None) -> Sampler:
    """Return the output processing that a scheduler expects.

    One that verifies drafts needs to be told how many of them are accepted.
    """
    if hasattr(scheduler, "num_speculative_tokens"):
        assert acceptance is not None
        return SpeculativeSampler(scheduler, acceptance)
    if hasattr(scheduler, "deliver"):
        return InFlightSampler(scheduler)
    if not schedules_groups(scheduler):
        return sample
    if scheduler.num_initial_sequences_is_width:
        return FixedWidthSampler(scheduler)
    return ForkingSampler(scheduler)


def chosen_parents(request: Request, num_output_tokens: int, width: int) -> list[int]:
    """Return, for each beam of the next position, which of the beams it continues.

    Parameters
    ----------
    request
        Its `beam_seed` and `beam_percent` decide: in so many per cent of the cases a
        beam continues another one than its own.
    num_output_tokens
        Position in the output.
    width
        Running beams.
    """
    parents = []
    for slot in range(width):
        drawn = (
            (request.beam_seed * 73856093)
            ^ (num_output_tokens * 19349663)
            ^ (slot * 83492791)
        ) & 0x7FFFFFFF
        moves = drawn % 100 < request.beam_percent
        parents.append(drawn // 100 % width if moves else slot)
    return parents


class TurnCalendar(OutputCalendar):
    """The decodes on a clock of groups that end, by the turn of their last token."""

    def forget_preempted(self, preemptions: Iterable[Preemption], step: int) -> None:
        # They left the clock, which says so and knows their tokens.
        pass


class GroupSampler(ABC):
    """Base of the two ways of processing output.

    Attributes
    ----------
    calendar
        The decodes on the clock of the scheduler, by the turn that gives their last
        token.
    due_steps
        One step: the first that may give one of them its last token, if all until then
        are turns.
    """

    def __init__(self, scheduler: GroupScheduler) -> None:
        self.scheduler = scheduler
        self.max_model_len = scheduler.scheduler_config.max_model_len
        self.calendar = TurnCalendar()
        self.due_steps = [NEVER]

    def __call__(
        self, output: GroupSchedulerOutput | None, step: int, end_s: float
    ) -> list[Request]:
        """Give tokens to a batch or, without one, to decodes on the clock.

        See `sim.engine.sampling.sample`; `step` is the latest of several quiet ones.
        """
        decodes = self.scheduler.decodes
        if decodes is None:
            assert output is not None
            return self._process(output.scheduled_seq_groups, 0, [], step, end_s)
        decodes.note_step(step)
        for request in decodes.left:
            self._forget(request)
        decodes.left.clear()
        ended = self._due(decodes)
        if output is None:
            finished = self._end_decodes(ended, end_s)
        else:
            at = output.num_before_clocked
            entries = output.scheduled_seq_groups
            finished = self._process(entries, at, ended, step, end_s)
        joined = decodes.join(step, len(ended))
        for request in decodes.left:
            self._forget(request)
        decodes.left.clear()
        for request in joined:
            last_turn = self._last_num_tokens(request) - request.base_tokens - 1
            self.calendar.join(request, last_turn)
        self.due_steps[0] = self.calendar.steps[0] + decodes.num_other_steps
        return finished

    @abstractmethod
    def _process(
        self,
        entries: list[ScheduledSequenceGroup],
        at: int,
        ended: list[Request],
        step: int,
        end_s: float,
    ) -> list[Request]:
        """Give tokens to entries of a batch; before number `at` decodes have ended."""

    def _forget(self, request: Request) -> None:
        """Take a request that left the clock out of the calendar."""
        if request.due_step >= 0:
            self.calendar.leave(request)

    def _due(self, decodes: GroupDecodes) -> list[Request]:
        """Return the decodes that have their last token now, in running order."""
        calendar = self.calendar
        due: list[Request] = []
        while calendar.steps[0] < decodes.num_turns:
            due += calendar.due.pop(heappop(calendar.steps))
        due.sort(key=running_order)
        for request in due:
            request.due_step = -1
        return due

    def _end_decodes(self, ended: list[Request], end_s: float) -> list[Request]:
        """End decodes on the clock that have their last token."""
        decodes = self.scheduler.decodes
        for request in ended:
            assert decodes is not None
            seq = decodes.end(request)
            self._ended(request, seq, self._limit(request, 0))
            self.scheduler.free_seq(seq)
            self._finish(self.scheduler.group_of(request), end_s)
        return ended.copy()

    def _last_num_tokens(self, request: Request) -> int:
        """Return the length at which the one sequence of a request ends."""
        last = min(self._limit(request, 0), self.max_model_len + 1)
        most = request.max_output_tokens
        return last if most is None else min(last, request.num_prompt_tokens + most)

    def _limit(self, request: Request, branch: int) -> int:
        """Return the length at which the model ends a continuation."""
        branches = request.oracle_branch_num_tokens
        return branches[branch] if branches else request.oracle_num_tokens

    def _append(self, request: Request, seq: Sequence, branch: int) -> None:
        index = seq.get_output_len()
        seq.append_token_id(request.tokens.output(branch, index))
        request.num_generated_tokens += 1

    def _ended(self, request: Request, seq: Sequence, limit: int) -> bool:
        """Set the status of a sequence that is `limit` tokens long, or too long."""
        length = seq.get_len()
        if length >= limit:
            seq.move_to(SequenceStatus.FINISHED_STOPPED)
            return True
        most = request.max_output_tokens
        if length > self.max_model_len or (
            most is not None and seq.get_output_len() >= most
        ):
            seq.move_to(SequenceStatus.FINISHED_LENGTH_CAPPED)
            return True
        return False

    def _note_step(self, request: Request, step: int, end_s: float) -> None:
        request.note_token(step)
        if request.num_output_tokens == 1:
            request.note_first_token(end_s)

    def _finish(self, group: SequenceGroup, end_s: float) -> Request:
        request = group.request
        assert request is not None
        request.end_streak()
        request.finish_s = end_s
        stopped = group.num_seqs(SequenceStatus.FINISHED_STOPPED)
        request.move_to(
            RequestStatus.FINISHED_STOPPED
            if stopped
            else RequestStatus.FINISHED_LENGTH_CAPPED
        )
        return request


class ForkingSampler(GroupSampler):
    """One sequence forks into several when the first token appears.

    Group by group, in batch order: tokens and forks, then ends; a sequence that ends
    is freed at once.

    Notes
    -----
    Source: vLLM 0.2.7, ``vllm/engine/llm_engine.py``
    (`_process_sequence_group_outputs`), and 0.7.3,
    ``vllm/engine/output_processor/single_step.py``.
    """

    def _process(
        self,
        entries: list[ScheduledSequenceGroup],
        at: int,
        ended: list[Request],
        step: int,
        end_s: float,
    ) -> list[Request]:
        finished = self._continue(entries[:at], step, end_s)
        finished += self._end_decodes(ended, end_s)
        return finished + self._continue(entries[at:], step, end_s)

    def _continue(
        self, entries: list[ScheduledSequenceGroup], step: int, end_s: float
    ) -> list[Request]:
        finished: list[Request] = []
        for entry in entries:
            group = entry.seq_group
            if entry.is_prefill and group.is_prefill():
                continue  # a chunk: the prompt is not through yet
            request = group.request
            assert request is not None
            if request.num_sequences > 1:
                self._continue_group(group, request)
            else:
                seq = group.first_seq
                self._append(request, seq, 0)
                if self._ended(request, seq, self._limit(request, 0)):
                    self.scheduler.free_seq(seq)
            self._note_step(request, step, end_s)
            if group.is_finished():
                finished.append(self._finish(group, end_s))
        return finished

    def _continue_group(self, group: SequenceGroup, request: Request) -> None:
        """Give each running sequence its children, or its one next token."""
        running = group.get_seqs(_RUNNING)
        num_output_tokens = running[0].get_output_len()
        if num_output_tokens == 0:
            slots = {running[0].seq_id: list(range(request.num_sequences))}
        elif request.use_beam_search:
            slots = {seq.seq_id: [] for seq in running}
            for slot, index in enumerate(
                chosen_parents(request, num_output_tokens, len(running))
            ):
                slots[running[index].seq_id].append(slot)
        else:
            slots = {seq.seq_id: [seq.branch] for seq in running}
        children: list[tuple[Sequence, Sequence]] = []
        survivors: list[Sequence] = []
        for parent in running:
            if not slots[parent.seq_id]:
                parent.move_to(SequenceStatus.FINISHED_ABORTED)
                group.remove(parent.seq_id)
                self.scheduler.free_seq(parent)
                continue
            *others, last = slots[parent.seq_id]
            for slot in others:
                child = parent.fork(next(self.scheduler.seq_counter))
                self._extend(request, child, slot)
                children.append((parent, child))
            self._extend(request, parent, last)
            survivors.append(parent)
        for parent, child in children:
            group.add(child)
            if not child.is_finished():
                self.scheduler.fork_seq(parent, child)
        for parent in survivors:
            if parent.is_finished():
                self.scheduler.free_seq(parent)

    def _extend(self, request: Request, seq: Sequence, branch: int) -> None:
        seq.branch = branch
        self._append(request, seq, branch)
        self._ended(request, seq, self._limit(request, branch))


class FixedWidthSampler(GroupSampler):
    """All sequences of a group are there from arrival on.

    For all groups, in batch order: beams, then tokens; only then ends, again in batch
    order.

    Notes
    -----
    Source: vLLM 0.1.0, ``vllm/core/scheduler.py`` (`update`).
    """

    def _process(
        self,
        entries: list[ScheduledSequenceGroup],
        at: int,
        ended: list[Request],
        step: int,
        end_s: float,
    ) -> list[Request]:
        assert at == 0, "running groups stand in front"
        groups = [entry.seq_group for entry in entries]
        for entry in entries:
            self._continue_group(entry.seq_group, is_prefill=entry.is_prefill)
        finished = self._end_decodes(ended, end_s)
        for group in groups:
            request = group.request
            assert request is not None
            self._end(group, request)
            self._note_step(request, step, end_s)
            if group.is_finished():
                finished.append(self._finish(group, end_s))
        return finished

    def _continue_group(self, group: SequenceGroup, *, is_prefill: bool) -> None:
        request = group.request
        assert request is not None
        running = group.get_seqs(_RUNNING)
        if request.use_beam_search and not is_prefill:
            self._choose_beams(request, running)
        for seq in running:
            self._append(request, seq, seq.branch)

    def _limit(self, request: Request, branch: int) -> int:
        return min(super()._limit(request, branch), request.oracle_num_tokens)

    def _choose_beams(self, request: Request, running: list[Sequence]) -> None:
        """Let sequences that no beam continues become copies of others."""
        parents = chosen_parents(request, running[0].get_output_len(), len(running))
        continued: set[int] = set()
        spare: list[Sequence] = []
        for index in parents:
            if index in continued:
                spare.append(running[index])
            continued.add(index)
        for index, seq in enumerate(running):
            if index not in continued:
                parent = spare.pop()
                self.scheduler.free_seq(seq)
                seq.become(parent)
                self.scheduler.fork_seq(parent, seq)

    def _end(self, group: SequenceGroup, request: Request) -> None:
        for seq in group.get_seqs(_RUNNING):
            # On the dot: a sequence that was revived past its own end goes on to the
            # request's.
            length = seq.get_len()
            limit = self._limit(request, seq.branch)
            if length != limit:
                limit = request.oracle_num_tokens
            if self._ended(request, seq, limit):
                self.scheduler.free_seq(seq)
