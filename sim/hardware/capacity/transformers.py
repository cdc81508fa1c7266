"""How many blocks transformers' continuous batching makes: its own memory rule.

::

    available  = (total - weights - CUDA context) * gpu_memory_utilization
    footprint  = c_m * batch tokens + c_n * cached tokens     (bytes, for each peak)
    num_blocks = the most that keep the footprint of every peak within what is available

Unlike vLLM it profiles no step: it counts the tensors of the two peaks, the logits of
the whole batch and the keys and values that attention has gathered.

Source: transformers 5.17, ``generation/continuous_batching/cache.py``
(`PagedAttentionMemoryHandler`), with flash attention (no mask is stored) and without
asynchronous batching. No engine log was at hand to compare with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sim.errors import CapacityError
from sim.hardware.capacity.parts import MemoryParts, memory_parts
from sim.hardware.capacity.pool import groups_of
from sim.hardware.gpus import GIB

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments

_VERSION = re.compile(r"5\.17(\.\d{1,3})?")
STAND_IN_MINOR = 0
"""Of the vLLM release whose layout this is: one group of blocks, all in one pool."""
MAX_NUM_SEQS = 1_024
MAX_BATCH_TOKENS = 8_192
LEAST_BATCH_TOKENS = 256
CACHE_FILL_PER_BATCH = 0.1
"""A default batch fills at most this share of the cache."""
BLOCK_TABLE_ENTRIES = 32
"""Blocks of a request in the table that serves decodes (``max_blocks_per_request``)."""
CONTEXT_GIB = 0.5
"""CUDA context and driver, as the release's comments have it."""
MARGIN_GIB = 1.0
"""Half-width of the interval: the context, and what loading left behind."""
CONSTANTS_SOURCE = "transformers' own rule, held against no log"


def is_transformers(engine_version: str) -> bool:
    """Whether a release is one of transformers, not of vLLM."""
    return _VERSION.fullmatch(str(engine_version).strip()[:40]) is not None


@dataclass(frozen=True, slots=True)
class _Peak:
    """Bytes of a peak, for each token of the batch and of the cache."""

    batch_token_bytes: int
    cached_token_bytes: int

    def most_cached_tokens(self, available: int, batch_tokens: int) -> int:
        return (available - self.batch_token_bytes * batch_tokens) // (
            self.cached_token_bytes
        )


def _peaks(arguments: EngineArguments) -> tuple[_Peak, _Peak]:
    """Return the peak of the logits, and that of attention.

    Keys and values are counted for all KV heads, also where ranks share them: a wart
    of the release, which leaves half of the memory unused with two ranks.
    """
    model, size = arguments.model, arguments.itemsize_bytes
    page = model.head_dim * model.num_key_value_heads
    # Seven rows of inputs, one of outputs, the block table, read and write indices.
    batch_bytes = 7 * 4 + 4 + BLOCK_TABLE_ENTRIES * 4 + 8 + 8
    cache_bytes = 2 * model.num_hidden_layers * page * arguments.kv_itemsize_bytes + 8
    logits = model.hidden_size * size + model.vocab_size * 4
    projections = model.hidden_size + model.num_attention_heads * model.head_dim
    return (
        _Peak(batch_bytes + logits, cache_bytes),
        _Peak(
            batch_bytes + size * (projections + 2 * page), cache_bytes + 2 * page * size
        ),
    )


@dataclass(frozen=True, slots=True)
class TransformersMemory:
    """The pool that the release's rule gives, and what it is cut from."""

    arguments: EngineArguments
    parts: MemoryParts
    num_blocks_low: int
    num_blocks_high: int


def transformers_memory(arguments: EngineArguments) -> TransformersMemory:
    """Return parts and number of blocks of one rank, with the release's own batch."""
    model = arguments.model
    unlike = model.num_sliding_layers + model.num_state_layers
    if unlike:
        raise CapacityError(
            f"model must have full attention in all layers for transformers, "
            f"{model.name} has {unlike} with a window or a state, whose blocks "
            f"are not built; use another model, or a vLLM release"
        )
    weights = memory_parts(arguments).weights_bytes
    context = round(CONTEXT_GIB * GIB)
    free = arguments.gpu.memory_bytes - weights - context
    available = int(free * arguments.gpu_memory_utilization)
    peaks = _peaks(arguments)
    if "max_num_batched_tokens" in arguments.defaults:
        tokens = _default_batch_tokens(peaks, available)
        arguments = replace(arguments, max_num_batched_tokens=tokens)
    tokens, block_size = arguments.max_num_batched_tokens, arguments.block_size
    margin = round(MARGIN_GIB * GIB)
    blocks, low, high = (
        min(peak.most_cached_tokens(room, tokens) for peak in peaks) // block_size
        for room in (available, available - margin, available + margin)
    )
    block_bytes = groups_of(arguments).layout.bytes_per_block
    return TransformersMemory(
        arguments,
        MemoryParts(
            requested_bytes=available + weights + context,
            weights_bytes=weights,
            activation_peak_bytes=available - blocks * block_bytes,
            non_torch_bytes=context,
            cuda_graph_bytes=0,
            activation_argument="max_num_batched_tokens",
        ),
        max(0, low),
        high,
    )


def batch_limits(
    max_num_batched_tokens: int | None, max_num_seqs: int | None
) -> tuple[int, int]:
    """Return both limits, those left out at the most that the release takes."""
    return max_num_batched_tokens or MAX_BATCH_TOKENS, max_num_seqs or MAX_NUM_SEQS


def _default_batch_tokens(peaks: tuple[_Peak, ...], available: int) -> int:
    """Return the release's batch: 8,192 tokens, or less on a small device."""
    share = CACHE_FILL_PER_BATCH
    most = min(
        int(
            int(available / (peak.cached_token_bytes + peak.batch_token_bytes * share))
            * share
        )
        for peak in peaks
    )
    return max(LEAST_BATCH_TOKENS, min(MAX_BATCH_TOKENS, most))
