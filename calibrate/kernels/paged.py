"""A batch over a paged KV cache, as every attention kernel here takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Queries, one layer's cache, and the block table of each sequence.

    A decode is a sequence with one query token. Lengths are kept on the host and on
    the device, as engines do: the host plans launches, kernels read the device's.
    """

    query: Tensor
    """(num_query_tokens, num_heads, head_dim), contiguous; sequences one after the
    other; bf16, fp16 or fp32."""
    key_cache: Tensor
    """(num_blocks, block_size, num_kv_heads, head_dim), the query's dtype or fp8. Holds
    the keys of the query tokens themselves, too."""
    value_cache: Tensor
    """As `key_cache`, with the same strides."""
    block_tables: Tensor
    """(num_sequences, max_blocks), int32."""
    query_lens: tuple[int, ...]
    """Query tokens of each sequence; 0 for one that takes no part."""
    context_lens: tuple[int, ...]
    """Keys of each sequence, those of its query tokens included; a decode without any
    gives zeros."""
    query_starts: Tensor
    """(num_sequences + 1,), int32: where each sequence's query tokens begin."""
    contexts: Tensor
    """(num_sequences,), int32: `context_lens` on the device."""

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one query token."""
        return all(length == 1 for length in self.query_lens)


def paged_batch(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
) -> PagedBatch:
    """Return the batch, lengths on the query's device.

    ValueError if they do not fit.
    """
    device = query.device
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    longest = max(context_lens, default=0)
    rules = (
        (starts[-1] == query.shape[0], "query_lens must add up to the query tokens"),
        (len(query_lens) == len(context_lens), "one context length a sequence"),
        (
            block_tables.shape[0] == len(query_lens)
            and block_tables.shape[1] * caches[0].shape[1] >= longest,
            "block tables must cover the longest context",
        ),
        (query.shape[1] % caches[0].shape[2] == 0, "heads must divide among KV heads"),
        (
            caches[0].stride() == caches[1].stride(),
            "caches must be laid out alike",
        ),
    )
    for holds, rule in rules:
        if not holds:
            raise ValueError(
                f"{rule}; got queries {tuple(query.shape)}, caches"
                f" {tuple(caches[0].shape)}, tables {tuple(block_tables.shape)},"
                f" longest context {longest}"
            )
    return PagedBatch(
        query,
        caches[0],
        caches[1],
        block_tables,
        tuple(query_lens),
        tuple(context_lens),
        torch.tensor(starts, dtype=torch.int32).to(device),
        torch.tensor(list(context_lens), dtype=torch.int32).to(device),
    )
