"""A request as the `sglang` scheduler holds it, and the batches it stands in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from cache.sglang.slot_table import SlotTable
from cache.tokens import RunTokens, TokenRuns
from sim.scheduler.base import SchedulerOutput
from sim.scheduler.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from cache.sglang.allocator import Slots
    from sim.scheduler.request import Request
    from sim.scheduler.sglang.settings import Settings

_SEGMENT_BITS = 32


class TokenNumbers:
    """Numbers for tokens, equal where tokens are.

    Plain ids stand for themselves; a token of a segment is numbered by the segment, in
    the order in which segments are met, and its place in it.
    """

    def __init__(self) -> None:
        self._segments: dict[Hashable, int] = {}

    def prompt(self, request: Request) -> Slots:
        """Return the tokens of a prompt."""
        tokens = request.tokens.prompt()
        if not isinstance(tokens, TokenRuns):
            return np.array(tokens, np.int64)
        pieces = [self._run(*piece) for piece in tokens.pieces]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def outputs(self, request: Request, first: int, end: int) -> Slots:
        """Return outputs from one on, before another."""
        if first >= end:
            return np.zeros(0, np.int64)
        if isinstance(request.tokens, RunTokens):  # no other prompt quotes them
            return self._run((request.request_id,), first, end - first)
        output = request.tokens.output(0, first)
        if isinstance(output, tuple):
            return self._run(*output, end - first)
        own = [request.tokens.output(0, index) for index in range(first, end)]
        return np.array(own, np.int64)

    def _run(self, segment_id: Hashable, offset: int, num_tokens: int) -> Slots:
        number = self._segments.setdefault(segment_id, len(self._segments) + 1)
        first = (number << _SEGMENT_BITS) + offset
        return np.arange(first, first + num_tokens)


class Entry:
    """A request as the scheduler keeps it.

    Parameters
    ----------
    request
        The engine's.
    prompt
        Its tokens; a prompt that is too long is replaced by one token.
    max_new_tokens
        Most outputs; may be below 1, for one output all the same.
    ignore_eos
        Whether its client says that it writes all of them.

    Attributes
    ----------
    table
        Its slots.
    slot
        Its row of the table of requests; -1 without one.
    num_prefix_tokens, num_extend_tokens
        Of its latest look-up, or batch: stored before, and to be computed.
    num_matched_tokens
        Of the latest look at the queue.
    num_fill_tokens
        Stored after its latest batch of a prompt.
    num_prefill_batches
        Batches of its prompt, since it holds slots.
    num_filled
        Tokens that it had when it was last looked up, or decoded beside prompts.
    num_received_outputs
        Of another engine: its first token, once that is there.
    is_ended
        Whether it was withdrawn, and ends with its next token.
    is_finished
        Whether its last output has been processed.
    is_retracted
        Whether it lost its slots, and waits.
    entered
        Number of its latest entry into the queue.
    """

    __slots__ = (
        "_tokens",
        "entered",
        "ignore_eos",
        "is_ended",
        "is_finished",
        "is_retracted",
        "max_new_tokens",
        "num_extend_tokens",
        "num_fill_tokens",
        "num_filled",
        "num_known",
        "num_matched_tokens",
        "num_prefill_batches",
        "num_prefix_tokens",
        "num_prompt_tokens",
        "num_received_outputs",
        "request",
        "slot",
        "table",
    )

    def __init__(
        self,
        request: Request,
        prompt: Slots,
        max_new_tokens: int,
        *,
        ignore_eos: bool,
    ) -> None:
        self.request = request
        self.num_prompt_tokens = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.ignore_eos = ignore_eos
        self.table = SlotTable()
        self.slot = -1
        self.num_prefix_tokens = self.num_extend_tokens = 0
        self.num_matched_tokens = self.num_fill_tokens = self.num_filled = 0
        self.num_received_outputs = self.num_prefill_batches = 0
        self.is_ended = self.is_finished = self.is_retracted = False
        self.entered = 0
        self._tokens = prompt
        self.num_known = len(prompt)  # of `_tokens`

    @classmethod
    def of(cls, request: Request, prompt: Slots, settings: Settings) -> Entry:
        """Return the entry of a request that arrives, cut to what can be served."""
        request.max_num_tokens = min(request.max_num_tokens, settings.longest_request)
        max_new_tokens = request.max_num_tokens - request.num_prompt_tokens
        if settings.patch >= 12:
            size = settings.page_size
            room = settings.max_total_num_tokens - -(-len(prompt) // size) * size
            max_new_tokens = max(min(max_new_tokens, room - size - 1), 0)
            request.max_num_tokens = request.num_prompt_tokens + max_new_tokens
        if len(prompt) > settings.longest_prompt:
            prompt = np.zeros(1, np.int64)
            request.max_num_tokens = request.num_prompt_tokens + 1
        return cls(request, prompt, max_new_tokens, ignore_eos=request.ignore_eos)

    @property
    def num_outputs(self) -> int:
        """Tokens that it has got so far, also if its client has not."""
        return max(self.request.num_output_tokens, self.num_received_outputs)

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs so far."""
        return self.num_prompt_tokens + self.num_outputs

    @property
    def num_left(self) -> int:
        """Outputs that it may still write."""
        return self.max_new_tokens - self.num_outputs

    @property
    def is_parked(self) -> bool:
        """Whether its prompt was to go on in the latest batch, and had no room."""
        return self.num_fill_tokens == self.num_prefix_tokens

    def go_on(self) -> None:
        """Let a prompt go on behind its latest chunk."""
        self.num_prefix_tokens = self.table.num_stored_tokens
        self.num_filled = self.num_tokens
        self.num_extend_tokens = self.num_tokens - self.num_prefix_tokens

    def retract(self) -> None:
        """Note that it lost its slots."""
        self.is_retracted = True
        self.num_extend_tokens = self.num_prefix_tokens = self.num_fill_tokens = 0
        self.num_prefill_batches = 0

    def tokens(self, numbers: TokenNumbers, num_tokens: int) -> Slots:
        """Return its first tokens, outputs among them."""
        if num_tokens > self.num_known:
            room = self._tokens
            if num_tokens > len(room):
                room = np.empty(num_tokens + 64 + num_tokens // 8, np.int64)
                room[: self.num_known] = self._tokens[: self.num_known]
                self._tokens = room
            before = self.num_prompt_tokens
            room[self.num_known : num_tokens] = numbers.outputs(
                self.request, self.num_known - before, num_tokens - before
            )
            self.num_known = num_tokens
        return self._tokens[:num_tokens]


class Mode(Enum):
    """The work of a batch."""

    EXTEND = "extend"
    """Prompts, or parts of them."""
    DECODE = "decode"
    """A token of each running request."""
    MIXED = "mixed"
    """Both."""
    PREBUILT = "prebuilt"
    """Nothing: prompts, and their first tokens, have come from another engine."""


@dataclass(slots=True)
class ScheduleBatch:
    """Requests that compute together, or run.

    Attributes
    ----------
    entries
        In batch order.
    is_full
        Nothing more is admitted beside it: memory or request slots were found short.
    mode
        What it computes; of one that runs, what it computed last.
    chunked
        Its request of which only a chunk is computed.
    num_decoding
        Of a mixed one: the last entries, which decode.
    is_prefill_only
        None of its requests may write a token, so that none will decode.
    """

    entries: list[Entry] = field(default_factory=list)
    is_full: bool = False
    mode: Mode = Mode.EXTEND
    chunked: Entry | None = None
    num_decoding: int = 0
    is_prefill_only: bool = False

    def filter(self, excluded: Iterable[Entry | None] = ()) -> bool:
        """Drop requests that have finished, and some others; return whether any was."""
        out = set(excluded)
        before = len(self.entries)
        self.entries = [
            each for each in self.entries if not (each.is_finished or each in out)
        ]
        return len(self.entries) < before


@dataclass(slots=True)
class SglangOutput(SchedulerOutput):
    """A call's decisions; the base class is the engine's view.

    Attributes
    ----------
    mode
        None for no batch.
    entries
        The batch, with prefix and extend tokens of each.
    chunked, num_decoding
        See `ScheduleBatch`.
    retracted
        Requests without room to decode.
    preempted
        Requests that a more urgent one pushed out.
    dropped, rejected
        Requests that were withdrawn from the queue since the latest call, and that its
        limit turned away.
    """

    mode: Mode | None = None
    entries: list[tuple[Entry, int, int]] = field(default_factory=list)
    chunked: Entry | None = None
    num_decoding: int = 0
    retracted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    dropped: list[Request] = field(default_factory=list)
    rejected: list[Request] = field(default_factory=list)

    def take(self, batch: ScheduleBatch) -> None:
        """Describe a batch in the engine's terms, and count its tokens."""
        self.mode, self.num_decoding = batch.mode, batch.num_decoding
        self.chunked = batch.chunked
        if batch.mode is Mode.PREBUILT:
            self._take_prebuilt(batch)
            return
        counts = Batch(0)
        num_extending = len(batch.entries) - batch.num_decoding
        if batch.mode is Mode.DECODE:
            num_extending = 0
        for index, entry in enumerate(batch.entries):
            after = entry.table.num_stored_tokens
            num_new = entry.num_extend_tokens if index < num_extending else 1
            before = after - num_new
            self.entries.append((entry, before, num_new))
            counts.add(num_new, after)
            request = entry.request
            if entry.is_ended or entry.is_finished:
                continue
            request.num_computed_tokens = after
            self.scheduled.append(request)
            self.num_scheduled_tokens.append(num_new)
            if before < request.num_recompute_tokens:
                num_again = min(after, request.num_recompute_tokens) - before
                request.num_recomputed_tokens += num_again
                counts.num_recomputed_tokens += num_again
        self.shape = counts.shape()
        self.num_recomputed_tokens = counts.num_recomputed_tokens

    def _take_prebuilt(self, batch: ScheduleBatch) -> None:
        """Let first tokens come, and those back that had theirs."""
        for entry in batch.entries:
            num_stored, request = entry.table.num_stored_tokens, entry.request
            self.entries.append((entry, num_stored, 0))
            if not (entry.is_ended or request.num_output_tokens):
                request.num_computed_tokens = num_stored
                self.scheduled.append(request)
                self.num_scheduled_tokens.append(0)
