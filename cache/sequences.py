"""Sequences as block managers of the sequence-group generations read them.

The 2023 manager and block manager v2 place *sequences*, which belong to groups: one
prompt, sampled in parallel or searched with beams. A sequence's status says where its
blocks are. `sim.scheduler.groups.sequence` has the classes; the roles are here, since
the arrow points from ``sim`` to ``cache``.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from cache.tokens import TokenSlice


class Device(Enum):
    """The two tiers of KV memory."""

    GPU = "gpu"
    CPU = "cpu"


class AllocStatus(Enum):
    """Whether a group's blocks can be had."""

    OK = "ok"
    """Now."""
    LATER = "later"
    """Once others have given up theirs."""
    NEVER = "never"
    """Not even of an empty pool."""


class SequenceStatus(Enum):
    """Where a sequence stands, and with it, where its blocks are."""

    WAITING = "waiting"
    """New, or preempted by recomputation; holds no block."""
    RUNNING = "running"
    """Its blocks are on the GPU."""
    SWAPPED = "swapped"
    """Its blocks are on the CPU."""
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_IGNORED = "finished_ignored"
    """Refused by the scheduler: its prompt can never be served."""

    def __init__(self, value: str) -> None:
        self.is_finished = value.startswith("finished")
        """Whether the sequence will never be scheduled again."""


class PagedSequence(Protocol):
    """A sequence as block managers see it."""

    @property
    def seq_id(self) -> int:
        """Unique number; keys the tables."""
        ...

    @property
    def status(self) -> SequenceStatus:
        """Where its blocks are."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV entries are in the cache."""
        ...

    def get_len(self) -> int:
        """Tokens, prompt and output."""
        ...

    def get_prompt_len(self) -> int:
        """Tokens of the prompt."""
        ...

    def get_token_ids(self) -> TokenSlice:
        """All tokens, prompt and output; not to be changed, but they may grow."""
        ...

    def is_finished(self) -> bool:
        """Whether it will never be scheduled again."""
        ...


class PagedSequenceGroup(Protocol):
    """A sequence group as block managers see it."""

    @property
    def request_id(self) -> int | str:
        """Names the group in errors, and keys cross-attention tables."""
        ...

    def get_seqs(self, status: SequenceStatus | None = None) -> Items[PagedSequence]:
        """Sequences in group order, of one status or all."""
        ...

    def num_seqs(self, status: SequenceStatus | None = None) -> int:
        """Count of `get_seqs`."""
        ...

    def is_encoder_decoder(self) -> bool:
        """Whether an encoder sequence belongs to it."""
        ...

    def get_encoder_seq(self) -> PagedSequence | None:
        """Return the encoder's sequence, of encoder-decoder models."""
        ...
