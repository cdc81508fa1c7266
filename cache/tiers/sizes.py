"""How many chunks host memory holds."""

from __future__ import annotations

CHUNK_ALIGNMENT_BYTES = 4096
"""A chunk takes whole pages of host memory."""


def num_chunks_of(num_bytes: int, block_bytes: int, blocks_per_chunk: int) -> int:
    """Return how many chunks so much host memory holds.

    Parameters
    ----------
    num_bytes
        Of all workers together.
    block_bytes
        KV bytes of a block, over all workers that keep a copy of their own.
    blocks_per_chunk
        Blocks of a chunk.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_offload/cpu/spec.py``.
    """
    return num_bytes // chunk_bytes_of(block_bytes, blocks_per_chunk)


def chunk_bytes_of(block_bytes: int, blocks_per_chunk: int) -> int:
    """Return the bytes of a chunk in its tier; see `num_chunks_of`."""
    pages = -(-block_bytes * blocks_per_chunk // CHUNK_ALIGNMENT_BYTES)
    return pages * CHUNK_ALIGNMENT_BYTES
