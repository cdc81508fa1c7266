"""Sequences and sequence groups: what the generations before V1 schedule.

A *group* is one client request: one prompt and the sequences that continue it, one
for plain sampling, several for parallel sampling and beam search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cache.sequences import SequenceStatus
from cache.tokens import TokenRuns
from sim.scheduler.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Items

    from cache.tokens import TokenIds, TokenSlice
    from sim.scheduler.request import Request

_S = SequenceStatus
TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.FINISHED_IGNORED, _S.FINISHED_ABORTED}),
    _S.RUNNING: frozenset(
        {
            _S.WAITING,
            _S.SWAPPED,
            _S.FINISHED_STOPPED,
            _S.FINISHED_LENGTH_CAPPED,
            _S.FINISHED_ABORTED,
        }
    ),
    _S.SWAPPED: frozenset({_S.RUNNING, _S.FINISHED_ABORTED, _S.FINISHED_IGNORED}),
    **{status: frozenset() for status in _S if status.is_finished},
}
"""The legal transitions of `SequenceStatus`.

vLLM 0.1.0 breaks one: a finished sequence of a group that is preempted by
recomputation runs again (`Sequence.revive`).
"""


class IllegalSequenceTransitionError(RuntimeError):
    """A sequence was moved to a status that its own does not lead to."""


class Sequence:
    """A prompt and one continuation of it."""

    __slots__ = (
        "_num_prompt_tokens",
        "_num_tokens",
        "block_size",
        "branch",
        "is_prefill",
        "num_computed_tokens",
        "seq_id",
        "status",
        "tokens",
    )

    def __init__(
        self, seq_id: int, prompt_token_ids: TokenSlice, block_size: int
    ) -> None:
        self.seq_id = seq_id
        self.block_size = block_size
        self.status = SequenceStatus.WAITING
        self.tokens: list[int] | TokenRuns = (
            prompt_token_ids.copy()
            if isinstance(prompt_token_ids, TokenRuns)
            else list(prompt_token_ids)
        )
        self._num_prompt_tokens = self._num_tokens = len(self.tokens)
        # Tokens whose KV entries are in the cache.
        self.num_computed_tokens = 0
        # Whether tokens that it had when it was last admitted are still to be computed.
        self.is_prefill = True
        # Which continuation of its group it is; names the generated text.
        self.branch = 0

    def get_len(self) -> int:
        """Tokens, prompt and output."""
        return self._num_tokens

    def get_prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self._num_prompt_tokens

    def get_output_len(self) -> int:
        """Tokens generated so far."""
        return self._num_tokens - self._num_prompt_tokens

    def get_token_ids(self) -> TokenSlice:
        """All tokens; not to be changed."""
        return self.tokens

    @property
    def num_logical_blocks(self) -> int:
        """Blocks that its tokens span."""
        return -(-self._num_tokens // self.block_size)

    def append_token_id(
        self, token_id: int | tuple[int, int], logprobs: object = None
    ) -> None:
        """Add a generated token."""
        tokens = self.tokens
        if isinstance(tokens, TokenRuns):
            if isinstance(token_id, tuple):
                tokens.append(*token_id)
                self._num_tokens += 1
                return
        elif isinstance(token_id, int):
            tokens.append(token_id)
            self._num_tokens += 1
            return
        raise TypeError(
            f"sequence {self.seq_id} holds {type(tokens).__name__}: give a token of "
            f"that kind, not {token_id!r}"
        )

    def extend(self, text: TokenIds, num_new: int) -> None:
        """Add the next generated tokens of its branch, at least one."""
        first = self.get_output_len()
        token_id = text.output(self.branch, first)
        tokens = self.tokens
        if isinstance(tokens, TokenRuns) and isinstance(token_id, tuple):
            segment_id, offset = token_id
            last = segment_id, offset + num_new - 1
            if text.output(self.branch, first + num_new - 1) == last:
                tokens.append(segment_id, offset, num_new)
                self._num_tokens += num_new
                return
        for index in range(first, first + num_new):
            self.append_token_id(text.output(self.branch, index))

    def update_num_computed_tokens(self, num_tokens: int) -> None:
        """Note that the KV entries of `num_tokens` more tokens are in the cache."""
        after = self.num_computed_tokens + num_tokens
        if after > self._num_tokens:
            raise ValueError(
                f"sequence {self.seq_id} has {self._num_tokens} tokens, {after} cannot "
                f"be computed"
            )
        self.num_computed_tokens = after
        if after == self._num_tokens:
            self.is_prefill = False

    def reset_for_recompute(self) -> None:
        """Forget all progress; the blocks are the manager's business."""
        self.num_computed_tokens = 0
        self.is_prefill = True

    def is_finished(self) -> bool:
        """Whether it will never be scheduled again."""
        return self.status.is_finished

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status."""
        if status not in TRANSITIONS[self.status]:
            raise IllegalSequenceTransitionError(
                f"sequence {self.seq_id} cannot go from {self.status.value} to "
                f"{status.value}"
            )
        self.status = status

    def revive(self) -> None:
        """Wait again, finished or not (vLLM 0.1.0 only, see `TRANSITIONS`)."""
        self.status = SequenceStatus.WAITING

    def fork(self, new_seq_id: int) -> Sequence:
        """Return a copy under a new number; its blocks are the manager's business."""
        child = Sequence(new_seq_id, self.tokens, self.block_size)
        child._num_prompt_tokens = self._num_prompt_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.is_prefill = self.is_prefill
        child.status = self.status
        child.branch = self.branch
        return child

    def become(self, parent: Sequence) -> None:
        """Take over tokens and progress of `parent`, keeping the own number."""
        self.tokens = parent.tokens.copy()
        self._num_tokens = parent.get_len()
        self.num_computed_tokens = parent.num_computed_tokens
        self.is_prefill = parent.is_prefill

    def __repr__(self) -> str:
        return (
            f"Sequence(seq_id={self.seq_id}, status={self.status.value}, "
            f"num_tokens={self.get_len()})"
        )


class SequenceGroup:
    """The sequences of one request, in group order."""

    __slots__ = (
        "_seqs",
        "arrival_time",
        "encoder_seq",
        "priority",
        "request",
        "request_id",
        "sampling_params",
    )

    def __init__(
        self,
        request_id: int | str,
        seqs: Items[Sequence],
        arrival_time: float,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        encoder_seq: Sequence | None = None,
    ) -> None:
        self.request_id = request_id
        self._seqs: dict[int, Sequence] = {seq.seq_id: seq for seq in seqs}
        self.arrival_time = arrival_time
        self.sampling_params = sampling_params or SamplingParams()
        self.priority = priority
        self.encoder_seq = encoder_seq
        # The engine's request that this group serves, if any.
        self.request: Request | None = None

    # -- sequences ------------------------------------------------------------

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """Sequences in group order, of one status or all."""
        if status is None:
            return list(self._seqs.values())
        return [seq for seq in self._seqs.values() if seq.status is status]

    def get_unfinished_seqs(self) -> list[Sequence]:
        """Sequences that are not finished."""
        return [seq for seq in self._seqs.values() if not seq.status.is_finished]

    def get_finished_seqs(self) -> list[Sequence]:
        """Sequences that are finished and still in the group."""
        return [seq for seq in self._seqs.values() if seq.status.is_finished]

    def num_seqs(self, status: SequenceStatus | None = None) -> int:
        """Count of `get_seqs`."""
        if status is None:
            return len(self._seqs)
        num_seqs = 0
        for seq in self._seqs.values():
            num_seqs += seq.status is status
        return num_seqs

    def num_unfinished_seqs(self) -> int:
        """Count of `get_unfinished_seqs`."""
        return sum(not seq.is_finished() for seq in self._seqs.values())

    @property
    def first_seq(self) -> Sequence:
        """The first sequence of the group."""
        return next(iter(self._seqs.values()))

    def find(self, seq_id: int) -> Sequence:
        """Return the sequence of that number."""
        if seq_id not in self._seqs:
            raise KeyError(f"sequence {seq_id} is not in group {self.request_id}")
        return self._seqs[seq_id]

    def add(self, seq: Sequence) -> None:
        """Add a forked sequence at the end."""
        if seq.seq_id in self._seqs:
            raise ValueError(f"sequence {seq.seq_id} is in group {self.request_id}")
        self._seqs[seq.seq_id] = seq

    def remove(self, seq_id: int) -> None:
        """Drop a sequence."""
        self.find(seq_id)
        del self._seqs[seq_id]

    def is_finished(self) -> bool:
        """Whether all sequences are finished."""
        for seq in self._seqs.values():  # noqa: SIM110  # all() takes twice as long
            if not seq.status.is_finished:
                return False
        return True

    def get_max_num_running_seqs(self) -> int:
        """Sequences that may run at a time in the rest of its life.

        Source: vLLM 0.2.7, ``vllm/sequence.py``.
        """
        width = self.sampling_params.width
        if self.sampling_params.use_beam_search:
            return width
        if width > self.num_seqs():
            return width  # the prompt has not been forked yet
        return self.num_unfinished_seqs()

    def is_encoder_decoder(self) -> bool:
        """Whether an encoder sequence belongs to it."""
        return self.encoder_seq is not None

    def get_encoder_seq(self) -> Sequence | None:
        """Return the encoder's sequence, of encoder-decoder models."""
        return self.encoder_seq

    # -- progress -------------------------------------------------------------

    def is_prefill(self) -> bool:
        """Whether tokens of its prompt, or of a recomputation, are to be computed.

        Unfinished sequences of a group advance together, so the first one answers.
        """
        for seq in self._seqs.values():
            if not seq.is_finished():
                return seq.is_prefill
        return False

    def get_num_uncomputed_tokens(self) -> int:
        """Tokens of unfinished sequences that are not computed."""
        return sum(
            seq.get_len() - seq.num_computed_tokens
            for seq in self.get_unfinished_seqs()
        )

    def __repr__(self) -> str:
        return f"SequenceGroup(request_id={self.request_id}, seqs={self.get_seqs()})"


class GroupBlockManager(Protocol):
    """A generation's block manager, as `GroupScheduler` calls it."""

    @property
    def num_logical_blocks(self) -> int:
        """Entries of all GPU tables."""
        ...

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let the child share all blocks of its parent."""
        ...

    def free(self, seq: Sequence) -> None:
        """Give up a sequence's table; nothing to do if it has none."""
        ...

    def get_block_table(self, seq: Sequence) -> list[int]:
        """Return the physical block ids of a sequence."""
        ...

    def open_block(self, seq: Sequence) -> None:
        """Take the block that the next token of a decode begins, as it would itself.

        What the table says of tokens stands still until `show_tokens`.
        """
        ...

    def show_tokens(self, seq: Sequence) -> None:
        """Put all computed tokens of a decode into its table, which has room."""
        ...

    def get_num_free_gpu_blocks(self) -> int:
        """Free blocks of the GPU pool."""
        ...

    def get_num_free_cpu_blocks(self) -> int:
        """Free blocks of the CPU pool."""
        ...

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Prove invariant 2 for pools and the tables of `seqs`, all that hold one."""
        ...
