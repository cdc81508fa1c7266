"""Counts of a batch while it is formed."""

from __future__ import annotations

from sim.cost import BatchShape


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
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_decodes = 0
        self.num_decode_context_tokens = 0
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_prefill_context_tokens = 0
        self.num_prefill_attention_pairs = 0
        self.num_recomputed_tokens = 0

    def add(self, num_new_tokens: int, num_context_tokens: int) -> None:
        """Count a query of `num_new_tokens` that ends at `num_context_tokens`."""
        if num_new_tokens == 1:
            self.num_decodes += 1
            self.num_decode_context_tokens += num_context_tokens
            return
        self.num_prefills += 1
        self.num_prefill_tokens += num_new_tokens
        self.num_prefill_context_tokens += num_context_tokens
        # Query j of the chunk sees all keys before the chunk and j of its own.
        self.num_prefill_attention_pairs += (
            num_new_tokens * (num_context_tokens - num_new_tokens)
            + num_new_tokens * (num_new_tokens + 1) // 2
        )

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
