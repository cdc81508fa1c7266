"""The physical KV block."""

from __future__ import annotations


class KVCacheBlock:
    """One physical block: ``block_size`` token slots in every layer of the model.

    Source: vLLM 0.11.2, ``vllm/v1/core/kv_cache_utils.py`` (`KVCacheBlock`).
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "next_free_block",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        # Key under which the block is in the prefix cache, or None.
        self.block_hash: int | None = None
        # Neighbours in the free queue; None outside of it. Living in the block, they
        # let the queue drop a block from its middle in O(1) without allocating.
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    @property
    def block_number(self) -> int:
        """`block_id` under its name in vLLM up to 0.5 (`PhysicalTokenBlock`)."""
        return self.block_id

    @property
    def ref_count(self) -> int:
        """`ref_cnt` under its name in vLLM up to 0.5."""
        return self.ref_cnt

    def __repr__(self) -> str:
        return (
            f"KVCacheBlock(id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"hash={self.block_hash})"
        )
