"""The allocator with prefix caching: full blocks are found again by their content.

A block that has lost its last reference keeps its content and waits in the evictor; ids
that hold no cached content ("hashless") are used up before anything is evicted.

Source: vLLM 0.7.3, ``vllm/core/block/prefix_caching_block.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cache.errors import CacheError, NoFreeBlocksError, require
from cache.hashing import NONE_HASH, hash_block
from cache.tokens import content_of
from cache.v0.allocator import NaiveBlock, NaiveBlockAllocator
from cache.v0.evictor import NEVER_ACCESSED, KeyedEvictor, make_evictor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cache.block import KVCacheBlock
    from cache.tokens import TokenSlice
    from cache.v0.evictor import EvictionPolicy
    from cache.v0.interfaces import (
        Block,
        BlockAllocator,
        BlockId,
    )


class CacheMetricData:
    """Look-ups of full blocks at allocation, and how many were hits."""

    def __init__(self) -> None:
        self.num_queries = 0
        self.num_hits = 0

    def query(self, hit: bool) -> None:
        """Count a look-up."""
        self.num_queries += 1
        self.num_hits += hit

    def get_hit_rate(self) -> float:
        """Return hits over look-ups; 0 before the first."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0


class PrefixCachingBlockAllocator(NaiveBlockAllocator):
    """Hands out, shares and takes back blocks; full ones can be found until evicted."""

    def __init__(
        self,
        num_blocks: int | None = None,
        block_size: int = 16,
        block_ids: Iterable[BlockId] | None = None,
        eviction_policy: EvictionPolicy = "lru",
    ) -> None:
        super().__init__(PrefixCachingBlock, num_blocks, block_size, block_ids)
        self.evictor = make_evictor(eviction_policy)
        self.num_evictions = 0
        self.metric_data = CacheMetricData()
        self._cached: dict[int, KVCacheBlock] = {}
        self._last_accessed: dict[BlockId, float] = {}
        self._computed: set[BlockId] = set()
        self._touched: set[BlockId] = set()

    # -- look-up --------------------------------------------------------------

    def cached_block_ids(self) -> Iterable[int]:
        return [block.block_id for block in self._cached.values()]

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content, in use or not."""
        return len(self._cached)

    def is_block_cached(self, block: Block) -> bool:
        """Whether some block holds the same content as `block`, which is full."""
        return block.content_hash in self._cached

    def block_is_computed(self, block_id: BlockId) -> bool:
        """Whether the block may answer look-ups.

        Blocks are computed from the end of the scheduler call that filled them on, and
        all blocks in the evictor are.
        """
        if self._stack.block(block_id).ref_cnt:
            return block_id in self._computed
        return block_id in self.evictor

    def get_last_accessed(self, block_id: BlockId) -> float:
        """Return when a block in use was last marked as accessed, in seconds."""
        return self._last_accessed.get(block_id, NEVER_ACCESSED)

    def find_cached_blocks_prefix(self, block_hashes: Sequence[int]) -> list[int]:
        # A binary search for the first miss, as in the reference: right as long as no
        # block is cached without those before it.

        def is_miss(block_hash: int) -> bool:
            block = self._cached.get(block_hash)
            return block is None or not self.block_is_computed(block.block_id)

        return list(block_hashes[: bisect_left(block_hashes, True, key=is_miss)])

    def get_computed_block_ids(
        self, prev_computed_block_ids: Sequence[BlockId], block_ids: Sequence[BlockId]
    ) -> list[BlockId]:
        """Return the leading blocks of a table that are computed."""
        found = list(prev_computed_block_ids)
        for block_id in block_ids[len(found) :]:
            block = self._stack.block(block_id)
            if block.block_hash is None or not self.block_is_computed(block_id):
                break
            found.append(block_id)
        return found

    def mark_blocks_as_accessed(self, block_ids: Sequence[BlockId], now: float) -> None:
        for block_id in block_ids:
            if not self._stack.block(block_id).ref_cnt and block_id not in self.evictor:
                raise CacheError(
                    f"block {block_id} is free: only blocks in use, or cached, are "
                    f"accessed"
                )
        for block_id in block_ids:
            if block_id in self.evictor:
                self.evictor.update(block_id, now)
            else:
                self._last_accessed[block_id] = now

    def mark_blocks_as_computed(self, block_ids: Sequence[BlockId]) -> None:
        # `block_ids` is ignored, as in vLLM 0.7.3. So is (a wart that is kept) whether
        # the blocks were evicted and taken anew since they were filled.
        self._computed |= self._touched
        self._touched.clear()

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: Sequence[Sequence[BlockId]]
    ) -> list[BlockId]:
        common: list[BlockId] = []
        lists = [ids for ids in computed_seq_block_ids if ids]
        for same_entry in zip(*lists, strict=False):
            if len(set(same_entry)) > 1:
                break
            common.append(same_entry[0])
        return common

    def get_prefix_cache_hit_rate(self) -> float:
        return self.metric_data.get_hit_rate()

    def reset_prefix_cache(self) -> bool:
        if self.get_num_free_blocks() < self.get_num_total_blocks():
            return False
        while self.evictor.num_blocks:
            self._stack.put_back(self._evict())
        self._computed.clear()
        self._touched.clear()
        self.metric_data = CacheMetricData()
        return True

    # -- numbers --------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        return self._stack.num_free_blocks + self.evictor.num_blocks

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        return sum(block.is_full and self._costs_a_block(block) for block in blocks)

    def get_num_blocks_for_swap_in(self, blocks: Sequence[Block]) -> int:
        # A block that is cached and in use costs nothing; one that is cached and unused
        # is taken out of the free ones. Equal contents cost once.
        wanted = {
            block.content_hash
            for block in blocks
            if block.is_full and self._costs_a_block(block)
        }
        return len(wanted) + sum(not block.is_full for block in blocks)

    # -- life of a block ------------------------------------------------------

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        key = block.content_hash
        if key is None or block.block_id is None:
            raise CacheError(
                f"{block!r} cannot be promoted: only a full block in use is immutable"
            )
        own = self._stack.block(block.block_id)
        known = self._cached.get(key)
        if known is own:
            return own.block_id
        if known is None:
            self._register(own, key)
            return own.block_id
        self._release(own, block)
        self._add_reference(known)
        return known.block_id

    def _place(self, block: Block) -> None:
        block.allocator = self
        key = block.content_hash if block.is_full else None
        if key is None:
            block.block_id = self.take().block_id
            return
        known = self._cached.get(key)
        self.metric_data.query(known is not None)
        if known is not None:
            self._add_reference(known)
        else:
            known = self.take()
            self._register(known, key)
        block.block_id = known.block_id

    def _register(self, physical: KVCacheBlock, key: int) -> None:
        physical.block_hash = key
        self._cached[key] = physical
        self._touched.add(physical.block_id)

    def _add_reference(self, cached: KVCacheBlock) -> None:
        if cached.ref_cnt:
            self._stack.retain(cached)
            return
        self.evictor.remove(cached.block_id)
        self._stack.revive(cached)
        self._computed.add(cached.block_id)

    def take(self) -> KVCacheBlock:
        if self._stack.num_free_blocks:
            physical = self._stack.take()
        elif self.evictor.num_blocks:
            physical = self._evict()
            self.num_evictions += 1
            self._stack.retake(physical)
        else:
            raise NoFreeBlocksError(
                f"out of memory: none of {self.get_num_total_blocks()} blocks is free "
                f"or can be evicted"
            )
        self._computed.discard(physical.block_id)
        return physical

    def _evict(self) -> KVCacheBlock:
        block_id, key = self.evictor.evict()
        del self._cached[key]
        physical = self._stack.block(block_id)
        physical.block_hash = None
        return physical

    def _release(self, physical: KVCacheBlock, block: Block) -> None:
        if self._stack.drop(physical):
            return
        block_id = physical.block_id
        last_accessed = self._last_accessed.pop(block_id, NEVER_ACCESSED)
        if physical.block_hash is None:
            self._stack.put_back(physical)
            return
        self.evictor.add(
            block_id, physical.block_hash, block.num_tokens_total, last_accessed
        )

    def _costs_a_block(self, block: Block) -> bool:
        """Whether placing a full block here takes one of the free blocks."""
        key = block.content_hash
        known = None if key is None else self._cached.get(key)
        return known is None or not known.ref_cnt

    # -- own proof ------------------------------------------------------------

    def check(self, references: Mapping[BlockId, int]) -> None:
        held = frozenset(i for i in self._ids if i in self.evictor)
        require(
            len(held) == self.evictor.num_blocks, "the evictor holds foreign blocks"
        )
        self._stack.check(references, outside=held)
        if isinstance(self.evictor, KeyedEvictor):
            self.evictor.check()
        for block_id in self._ids:
            physical = self._stack.block(block_id)
            key = physical.block_hash
            require(
                key is None or self._cached.get(key) is physical,
                "block {} has a key under which it is not cached",
                block_id,
            )
            require(
                physical.ref_cnt or (key is not None) == (block_id in held),
                "block {} is unused: it must be in the evictor if and only if it is "
                "cached",
                block_id,
            )
            require(
                physical.ref_cnt or block_id not in self._last_accessed,
                "block {} is unused, but has a last access",
                block_id,
            )
        require(
            all(block.block_hash == key for key, block in self._cached.items()),
            "a cached block has another key than it is cached under",
        )


def hash_block_tokens(
    is_first_block: bool,
    prev_block_hash: int | None,
    cur_block_token_ids: TokenSlice,
    extra_hash: int | None = None,
) -> int:
    """Return the key of a full block."""
    content = (is_first_block, content_of(cur_block_token_ids))
    return hash_block(
        NONE_HASH if prev_block_hash is None else prev_block_hash,
        content if extra_hash is None else (*content, extra_hash),
    )


@runtime_checkable
class FindsByContent(Protocol):
    """The calls that a block makes to its allocator."""

    def block_is_computed(self, block_id: BlockId) -> bool:
        """Whether the block may answer look-ups."""
        ...

    def get_last_accessed(self, block_id: BlockId) -> float:
        """Return when a block in use was last marked as accessed, in seconds."""
        ...


class PrefixCachingBlock(NaiveBlock):
    """A block that is found by its content once it is full.

    Parameters are those of `NaiveBlock`.
    """

    __slots__ = ("_content_hash",)

    hash_block_tokens = staticmethod(hash_block_tokens)

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: TokenSlice,
        block_size: int,
        allocator: BlockAllocator,
        block_id: BlockId | None = None,
        *,
        extra_hash: int | None = None,
    ) -> None:
        super().__init__(
            prev_block,
            token_ids,
            block_size,
            allocator,
            block_id,
            extra_hash=extra_hash,
        )
        self._content_hash: int | None = None

    def view(self, prev_block: Block | None) -> Block:
        block = super().view(prev_block)
        if isinstance(block, PrefixCachingBlock):
            block._content_hash = self._content_hash  # not to be hashed again
        return block

    @property
    def content_hash(self) -> int | None:
        if self._content_hash is not None or not self.is_full:
            return self._content_hash
        prev_hash = None
        if self.prev_block is not None:
            prev_hash = self.prev_block.content_hash
            if prev_hash is None:
                return None
        self._content_hash = hash_block_tokens(
            self.prev_block is None, prev_hash, self.token_ids, self.extra_hash
        )
        return self._content_hash

    @property
    def computed(self) -> bool:
        allocator = self.allocator
        return (
            isinstance(allocator, FindsByContent)
            and self.block_id is not None
            and self.content_hash is not None
            and allocator.block_is_computed(self.block_id)
        )

    @property
    def last_accessed(self) -> float:
        allocator = self.allocator
        if self.block_id is None or not isinstance(allocator, FindsByContent):
            return NEVER_ACCESSED
        return allocator.get_last_accessed(self.block_id)
