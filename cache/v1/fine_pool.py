"""V1's block pool where blocks can be found in the middle: with several keys each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.v1.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.block import KVCacheBlock


class FineBlockPool(BlockPool):
    """A `BlockPool` in which hashes cover fewer tokens than blocks do.

    A block may be found by the hash at its end and by one inside it. `block_hash` is
    the first of its keys; all go when the block is reused.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/block_pool.py`` (`cache_partial_block`,
    `move_block_hashes`).
    """

    def __init__(
        self, num_gpu_blocks: int, *, enable_caching: bool, unhashed_first: bool = False
    ) -> None:
        super().__init__(
            num_gpu_blocks, enable_caching=enable_caching, unhashed_first=unhashed_first
        )
        self._more_keys: dict[int, list[int]] = {}  # behind the first, by block id
        self._num_key_tokens: dict[int, int] = {}  # of first keys inside blocks

    def num_key_tokens(self, block: KVCacheBlock, num_full_tokens: int) -> int | None:
        """Return the tokens that a block's first key stands for; None without a key.

        Parameters
        ----------
        block
            A block.
        num_full_tokens
            Tokens up to its end.
        """
        if block.block_hash is None:
            return None
        return self._num_key_tokens.get(block.block_id, num_full_tokens)

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[int],
        first_depth: int = 0,
    ) -> None:
        """See `BlockPool.cache_full_blocks`; shorter keys of the blocks are dropped."""
        for block in blocks:
            self.drop_keys(block)
        super().cache_full_blocks(blocks, block_hashes, first_depth)

    def cache_partial_block(
        self, block: KVCacheBlock, key: int, num_tokens: int, num_full_tokens: int
    ) -> None:
        """See `BlockPool.cache_partial_block`; a shorter first key is dropped."""
        if self.cached_blocks.has(key, block):
            return
        num_first_tokens = self.num_key_tokens(block, num_full_tokens)
        if num_first_tokens is not None and num_first_tokens < num_tokens:
            self.drop_keys(block)
        if block.block_hash is None:
            block.block_hash = key
            if num_tokens < num_full_tokens:
                self._num_key_tokens[block.block_id] = num_tokens
        else:
            self._more_keys.setdefault(block.block_id, []).append(key)
        self.cached_blocks.insert(key, block)

    def drop_keys(self, block: KVCacheBlock) -> None:
        """Let a block be found no more."""
        for key in self._keys(block):
            self.cached_blocks.remove(key, block)
        block.block_hash = None
        self._more_keys.pop(block.block_id, None)
        self._num_key_tokens.pop(block.block_id, None)

    def move_keys(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Let a block without keys be found in place of another."""
        keys, num_tokens = self._keys(source), self._num_key_tokens.get(source.block_id)
        self.drop_keys(source)
        for key in keys:
            self.cached_blocks.insert(key, target)
        if keys:
            target.block_hash = keys[0]
        if keys[1:]:
            self._more_keys[target.block_id] = keys[1:]
        if num_tokens is not None:
            self._num_key_tokens[target.block_id] = num_tokens

    def _keys(self, block: KVCacheBlock) -> list[int]:
        if block.block_hash is None:
            return []
        return [block.block_hash, *self._more_keys.get(block.block_id, ())]

    def _evict(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            if block.block_hash is not None:
                self.drop_keys(block)
                self.num_evictions += 1

    def _is_key(self, key: int, block: KVCacheBlock) -> bool:
        return key in self._keys(block)

    def _num_keys(self) -> int:
        return super()._num_keys() + sum(map(len, self._more_keys.values()))
