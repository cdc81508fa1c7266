"""The pool of physical blocks, with reference counts and the prefix-cache index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.block import KVCacheBlock
from cache.errors import CacheError, DoubleFreeError, NoFreeBlocksError, require
from cache.v1.free_queue import FreeKVCacheBlockQueue

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from cache.stats import BlockObserver


def first_of(found: KVCacheBlock | dict[int, KVCacheBlock]) -> KVCacheBlock:
    """Return the block that was cached first, of what `get_any` has found."""
    return next(iter(found.values())) if type(found) is dict else found  # type: ignore[return-value]


class PrefixCacheIndex:
    """From block hash to the blocks that carry it, first cached first.

    Several blocks may hold the same tokens (two requests computed them side by
    side). Tables are append-only, so duplicates are kept and the oldest one answers.
    """

    __slots__ = ("_blocks", "get_any")

    def __init__(self) -> None:
        # A lone block, the usual case, is stored bare: half the memory.
        self._blocks: dict[int, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self.get_any = self._blocks.get
        """Return what `first_of` makes a block, or None."""

    def get(self, block_hash: int) -> KVCacheBlock | None:
        """Return the block that was cached first under `block_hash`. O(1)."""
        found = self._blocks.get(block_hash)
        return None if found is None else first_of(found)

    def insert(self, block_hash: int, block: KVCacheBlock) -> None:
        """Add `block` behind those that carry the same hash. O(1)."""
        found = self._blocks.setdefault(block_hash, block)
        if found is block:
            return
        if isinstance(found, KVCacheBlock):
            found = self._blocks[block_hash] = {found.block_id: found}
        found[block.block_id] = block

    def insert_new(
        self, block_hashes: Iterable[int], blocks: Iterable[KVCacheBlock]
    ) -> None:
        """Do as `insert` for blocks that carry no hash yet, one by one.

        Raises
        ------
        CacheError
            If a block has a hash already; nothing changes for it and those behind.
        """
        index = self._blocks
        for block_hash, block in zip(block_hashes, blocks, strict=True):
            if block.block_hash is not None:
                raise CacheError(f"block {block.block_id} is cached already")
            block.block_hash = block_hash
            if index.setdefault(block_hash, block) is not block:
                self.insert(block_hash, block)

    def remove_all(self, blocks: Iterable[KVCacheBlock]) -> int:
        """Drop blocks, and their hashes; return how many of them had one."""
        index, num_dropped = self._blocks, 0
        for block in blocks:
            block_hash = block.block_hash
            if block_hash is not None:
                if index.get(block_hash) is block:
                    del index[block_hash]
                else:
                    self.remove(block_hash, block)
                block.block_hash = None
                num_dropped += 1
        return num_dropped

    def remove(self, block_hash: int, block: KVCacheBlock) -> None:
        """Drop `block`. O(1).

        Raises
        ------
        CacheError
            If the block is not indexed under `block_hash`.
        """
        found = self._blocks.get(block_hash)
        if found is block:
            del self._blocks[block_hash]
        elif isinstance(found, dict) and found.get(block.block_id) is block:
            del found[block.block_id]
            if not found:
                del self._blocks[block_hash]
        else:
            raise CacheError(f"block {block.block_id} is not in the prefix cache")

    def has(self, block_hash: int, block: KVCacheBlock) -> bool:
        """Whether `block` is indexed under a hash. O(1)."""
        found = self._blocks.get(block_hash)
        if isinstance(found, dict):
            return block.block_id in found
        return found is block

    def __len__(self) -> int:
        """Return the number of distinct hashes."""
        return len(self._blocks)

    def blocks(self) -> Iterable[tuple[int, KVCacheBlock]]:
        """Yield ``(hash, block)`` for every indexed block."""
        for block_hash, found in self._blocks.items():
            if isinstance(found, KVCacheBlock):
                yield block_hash, found
            else:
                for block in found.values():
                    yield block_hash, block


class BlockPool:
    """All GPU blocks of an engine.

    Parameters
    ----------
    num_gpu_blocks
        Size of the pool, the null block included. At least 2.
    enable_caching
        Whether freed full blocks stay findable by their hash until reused.
    unhashed_first
        Whether freed blocks without a hash go to the front of the free queue: no hit
        can come of them, so they are reused before anything is evicted (vLLM from
        0.24 on). Otherwise all freed blocks join the back.

    Attributes
    ----------
    null_block
        Block 0, a placeholder that is never handed out, as in the real engine: one
        block of the pool holds no request's tokens.
    observer
        Told which blocks move, or None.
    on_cached
        Called with the hashes of full blocks that have become findable, or None.

    Notes
    -----
    A block keeps its hash while it waits in the free queue and loses it when it is
    taken for reuse: eviction is nothing but reuse of the queue's front.
    Source: vLLM 0.11.2, ``vllm/v1/core/block_pool.py`` (`BlockPool`).
    """

    def __init__(
        self, num_gpu_blocks: int, *, enable_caching: bool, unhashed_first: bool = False
    ) -> None:
        if num_gpu_blocks < 2:
            raise CacheError(
                f"a pool needs at least 2 blocks (one is the null block), "
                f"got {num_gpu_blocks}"
            )
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.unhashed_first = unhashed_first
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_blocks = PrefixCacheIndex()
        self.null_block = self.free_block_queue.popleft()
        self.num_usable_blocks = num_gpu_blocks - 1
        self.num_evictions = 0
        self.observer: BlockObserver | None = None
        self.on_cached: Callable[[Sequence[int]], object] | None = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds, cached ones included."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_usable_blocks - self.free_block_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks that tables hold, 0 to 1."""
        return self.num_used_blocks / self.num_usable_blocks

    def get_cached_block(self, block_hash: int) -> KVCacheBlock | None:
        """Return the cached block with this hash, used or free, or None."""
        return self.cached_blocks.get(block_hash)

    def cached_block_ids(self) -> Iterable[int]:
        """Return all blocks that can be found by their content. O(n)."""
        return [block.block_id for _, block in self.cached_blocks.blocks()]

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the free queue, evicting what they cached.

        Raises
        ------
        NoFreeBlocksError
            If fewer blocks are free; nothing changes.
        """
        if num_blocks > self.num_free_blocks:
            raise NoFreeBlocksError(
                f"cannot take {num_blocks} blocks: {self.num_free_blocks} of "
                f"{self.num_usable_blocks} are free"
            )
        blocks = self._take(num_blocks)
        for block in blocks:
            block.ref_cnt = 1
        observer = self.observer
        if self.enable_caching:
            if observer is not None:
                _tell(observer.evicted, [b for b in blocks if b.block_hash is not None])
            self._evict(blocks)
        if observer is not None:
            _tell(observer.taken, blocks)
        return blocks

    def _take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks out of the queue, with what they hold."""
        return self.free_block_queue.popleft_n(num_blocks)

    def _evict(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_evictions += self.cached_blocks.remove_all(blocks)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block, reviving those in the free queue."""
        queue = self.free_block_queue
        if self.observer is not None:
            blocks = list(blocks)
            _tell(self.observer.revived, [b for b in blocks if b.ref_cnt == 0])
        for block in blocks:
            if block.ref_cnt == 0:
                queue.remove(block)
            block.ref_cnt += 1

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[int],
        first_depth: int = 0,
    ) -> None:
        """Make full blocks findable under their hashes.

        Parameters
        ----------
        blocks, block_hashes
            Equally long; each block must be in use and not cached yet.
        first_depth
            Blocks before the first of them in its table, for eviction policies.

        Raises
        ------
        CacheError
            If a block has a hash already; nothing changes for it and those behind.
        """
        del first_depth
        self.cached_blocks.insert_new(block_hashes, blocks)
        if self.on_cached is not None:
            self.on_cached(block_hashes)

    def free_blocks(self, ordered_blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one reference of each block; those left with none join the queue.

        Parameters
        ----------
        ordered_blocks
            Blocks of one table, in eviction order: of those that go to the same end
            of the queue, what stands first is reused first.

        Raises
        ------
        DoubleFreeError
            If a block has no reference to drop, or stands there more often than it has
            references; nothing changes.
        """
        freed = []
        for index, block in enumerate(ordered_blocks):
            num_left = block.ref_cnt = block.ref_cnt - 1
            if num_left == 0:
                freed.append(block)
            elif num_left < 0:
                for dropped in ordered_blocks[: index + 1]:
                    dropped.ref_cnt += 1
                how = (
                    "to be freed more often than it is held"
                    if block in ordered_blocks[:index]
                    else "free already"
                )
                raise DoubleFreeError(
                    f"block {block.block_id} is {how}; free a table once"
                )
        self._queue_freed(freed)

    def take_block(self) -> KVCacheBlock:
        """Do as `get_new_blocks` for one block, without an observer."""
        block = self.free_block_queue.popleft()
        block.ref_cnt = 1
        if block.block_hash is not None:
            self._evict((block,))
        return block

    def drop_block(self, block: KVCacheBlock) -> object:
        """Do as `free_blocks` for one block; return whether others hold it still."""
        block.ref_cnt -= 1
        if block.ref_cnt:
            return True
        if self.unhashed_first and block.block_hash is None:
            self.free_block_queue.prepend(block)
        else:
            self.free_block_queue.append_n((block,))
        return False

    def _queue_freed(self, freed: list[KVCacheBlock]) -> None:
        """Put blocks that lost their last reference where the release puts them."""
        queue = self.free_block_queue
        if self.observer is not None:
            _tell(self.observer.released, freed)
        if not self.unhashed_first:
            queue.append_n(freed)
        elif not self.enable_caching:
            queue.prepend_n(freed)
        else:
            queue.prepend_n([block for block in freed if block.block_hash is None])
            queue.append_n([block for block in freed if block.block_hash is not None])

    def check(self) -> None:
        """Prove invariant 2 for the pool in O(n).

        Free plus referenced blocks are all usable blocks, the queue holds exactly
        the unreferenced ones, and the index exactly the hashed ones.

        Raises
        ------
        InvariantError
            With the rule and the block.
        """
        self.free_block_queue.check()
        free_ids = {block.block_id for block in self.free_block_queue}
        require(0 not in free_ids, "pool: the null block is in the free queue")
        for block in self.blocks[1:]:
            require(
                block.ref_cnt >= 0,
                "pool: block {} has {} references",
                block.block_id,
                block.ref_cnt,
            )
            require(
                (block.ref_cnt == 0) == (block.block_id in free_ids),
                "pool: block {} has {} references and is {}in the free queue",
                block.block_id,
                block.ref_cnt,
                "not " if block.ref_cnt == 0 else "",
            )
        num_hashed = self._num_keys()
        num_indexed = 0
        for block_hash, block in self.cached_blocks.blocks():
            num_indexed += 1
            require(
                self._is_key(block_hash, block),
                "pool: block {} is indexed under a hash not its own",
                block.block_id,
            )
        require(
            num_indexed == num_hashed,
            f"pool: blocks carry {num_hashed} hashes, {num_indexed} are indexed",
        )
        require(
            self.enable_caching or num_hashed == 0,
            "pool: blocks are cached with prefix caching off",
        )

    def check_references(self, references: Counter[int]) -> None:
        """Prove that each block is counted as often as tables hold it, in O(n).

        Parameters
        ----------
        references
            By block id, the tables that hold it.

        Raises
        ------
        InvariantError
            With the block.
        """
        for block in self.blocks[1:]:
            require(
                block.ref_cnt == references[block.block_id],
                "block {}: {} references counted, {} tables hold it",
                block.block_id,
                block.ref_cnt,
                references[block.block_id],
            )

    def _is_key(self, key: int, block: KVCacheBlock) -> bool:
        return block.block_hash == key

    def _num_keys(self) -> int:
        return sum(block.block_hash is not None for block in self.blocks)


def _tell(report: Callable[[list[int]], None], blocks: Sequence[KVCacheBlock]) -> None:
    """Tell an observer which blocks move, if any do."""
    if blocks:
        report([block.block_id for block in blocks])
