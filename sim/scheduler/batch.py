"""The shape of a batch, and its counts while it is formed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class BatchShape(NamedTuple):
    """The work of one engine step, as exact integers.

    A *decode* is a scheduled request with a query of one token; everything longer is
    a *prefill* chunk. Context lengths include the tokens of this step.
    """

    num_decodes: int
    """Requests with a query of one token."""
    num_decode_context_tokens: int
    """Sum over decodes of the keys each attends to."""
    num_prefills: int
    """Requests with a query of more than one token."""
    num_prefill_tokens: int
    """Sum over prefill chunks of query tokens."""
    num_prefill_context_tokens: int
    """Sum over prefill chunks of the context at the chunk's end."""
    num_prefill_attention_pairs: int
    """Sum over prefill chunks of causal query-key pairs."""
    num_swapped_in_blocks: int = 0
    """KV blocks copied from CPU to GPU before the step."""
    num_swapped_out_blocks: int = 0
    """KV blocks copied from GPU to CPU before the step."""
    num_copied_blocks: int = 0
    """KV blocks copied on the GPU (copy-on-write) before the step."""


class VerifyingShape(BatchShape):
    """A shape among whose prefill chunks are verifications of drafts.

    A verification is a query of a request's next token and of its drafts. The counts
    below are of those alone, and of the same units as the shape's own.
    """

    num_verifications: int
    num_verified_tokens: int
    num_verified_context_tokens: int
    num_verified_attention_pairs: int

    @classmethod
    def of(
        cls, shape: BatchShape, queries: Iterable[tuple[int, int]]
    ) -> VerifyingShape:
        """Return `shape`, with verifications among its chunks.

        Parameters
        ----------
        shape
            Counts them as chunks already.
        queries
            Of each, its tokens, at least 2, and the context at their end.
        """
        num = num_tokens = num_context_tokens = num_pairs = 0
        for num_own, num_context in queries:
            num += 1
            num_tokens += num_own
            num_context_tokens += num_context
            num_pairs += _num_pairs(num_own, num_context - num_own)
        made = cls(*shape)
        made.num_verifications = num
        made.num_verified_tokens = num_tokens
        made.num_verified_context_tokens = num_context_tokens
        made.num_verified_attention_pairs = num_pairs
        return made


class SharingShape(BatchShape):
    """A shape whose requests share a prefix, in blocks that all of them hold."""

    num_common_tokens: int
    """Tokens of it that each request had computed before; whole blocks, above 0."""

    @classmethod
    def of(cls, shape: Iterable[int], num_common_tokens: int) -> SharingShape:
        made = cls(*shape)
        made.num_common_tokens = num_common_tokens
        return made


EMPTY_SHAPE = BatchShape(0, 0, 0, 0, 0, 0)
"""A step that computes nothing."""


class Batch:
    """Counts of the batch being formed, and what is left of its budget."""

    __slots__ = (
        "budget",
        "num_decode_context_tokens",
        "num_decodes",
        "num_prefill_attention_pairs",
        "num_prefill_context_tokens",
        "num_prefill_tokens",
        "num_prefills",
        "num_recomputed_tokens",
        "sliding_window",
    )

    def __init__(self, budget: int, sliding_window: int | None = None) -> None:
        self.budget = budget
        self.sliding_window = sliding_window
        self.num_decodes = 0
        self.num_decode_context_tokens = 0
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_prefill_context_tokens = 0
        self.num_prefill_attention_pairs = 0
        self.num_recomputed_tokens = 0

    def add(self, num_new_tokens: int, num_context_tokens: int) -> None:
        """Count a query of `num_new_tokens` that ends at `num_context_tokens`."""
        window = self.sliding_window
        if num_new_tokens == 1:
            self.num_decodes += 1
            if window is not None and window < num_context_tokens:
                num_context_tokens = window
            self.num_decode_context_tokens += num_context_tokens
            return
        self.num_prefills += 1
        self.num_prefill_tokens += num_new_tokens
        num_before = num_context_tokens - num_new_tokens
        if window is not None and window < num_context_tokens:
            self.num_prefill_context_tokens += min(
                num_context_tokens, num_new_tokens + window - 1
            )
            # Queries within the window see all before them, the others a window full.
            num_within = max(0, window - num_before)
            self.num_prefill_attention_pairs += (
                _num_pairs(num_within, num_before)
                + (num_new_tokens - num_within) * window
            )
            return
        self.num_prefill_context_tokens += num_context_tokens
        self.num_prefill_attention_pairs += _num_pairs(num_new_tokens, num_before)

    def shape(self) -> BatchShape:
        """Return the counts as the cost model takes them."""
        return BatchShape(
            self.num_decodes,
            self.num_decode_context_tokens,
            self.num_prefills,
            self.num_prefill_tokens,
            self.num_prefill_context_tokens,
            self.num_prefill_attention_pairs,
        )


def _num_pairs(num_new_tokens: int, num_before: int) -> int:
    """Query j of a chunk sees all keys before the chunk and j of its own."""
    return num_new_tokens * num_before + num_new_tokens * (num_new_tokens + 1) // 2
