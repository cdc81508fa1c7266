"""One tier of KV memory under the block manager of 2023: blocks and their tables."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING

from cache.block_stack import BlockStack
from cache.errors import CacheError, NoFreeBlocksError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cache.block import KVCacheBlock
    from cache.sequences import Device, PagedSequence
    from cache.stats import BlockObserver

BlockTable = list["KVCacheBlock"]
"""Physical blocks in logical order; under a sliding window one may stand repeatedly."""


class BlockAllocator:
    """The blocks of one tier, each with a reference count.

    Blocks are numbered from 0 in either tier. The free list is a stack: the highest
    number goes first, a freed block is the next one handed out.

    Source: vLLM 0.1.0 and 0.2.7, ``vllm/core/block_manager.py``.
    """

    def __init__(self, device: Device, block_size: int, num_blocks: int) -> None:
        self.device = device
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._stack = BlockStack(range(num_blocks), device.name)

    @property
    def observer(self) -> BlockObserver | None:
        """Told which blocks move, or None."""
        return self._stack.observer

    @observer.setter
    def observer(self, observer: BlockObserver | None) -> None:
        self._stack.observer = observer

    def cached_block_ids(self) -> Iterable[int]:
        """Return the blocks that can be found by their content: none here."""
        return ()

    def allocate(self) -> KVCacheBlock:
        """Return a free block, with one reference."""
        return self._stack.take()

    def allocate_all(self, num_blocks: int) -> BlockTable:
        """Return free blocks, each with one reference, as `allocate` gives them."""
        return self._stack.take_all(num_blocks)

    def free_all(self, blocks: BlockTable) -> None:
        """Take a reference of each of different blocks away."""
        self._stack.release_all(blocks)

    def share(self, block: KVCacheBlock, num_sharers: int = 1) -> None:
        """Add references to a block in use."""
        self._own(block)
        for _ in range(num_sharers):
            self._stack.retain(block)

    def free(self, block: KVCacheBlock) -> None:
        """Take a reference away; the block is free when none is left."""
        self._own(block)
        self._stack.release(block)

    def _own(self, block: KVCacheBlock) -> None:
        if self._stack.block(block.block_id) is not block:
            raise CacheError(
                f"block {block.block_id} is not of this {self.device.name} pool; give "
                f"it to the allocator that handed it out"
            )

    def block(self, block_id: int) -> KVCacheBlock:
        """Return the block of that number."""
        return self._stack.block(block_id)

    def get_num_free_blocks(self) -> int:
        """Return how many blocks are free."""
        return self._stack.num_free_blocks

    @property
    def free_blocks(self) -> BlockTable:
        """The free blocks; the last one is the next to be handed out. O(blocks)."""
        return self._stack.free_blocks

    def check(
        self,
        tables: Iterable[Sequence[KVCacheBlock]],
        lost: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Prove that `tables` hold what is counted (invariant 2), in O(n).

        A block counts once for each table, however often it stands there.
        """
        references: Counter[int] = Counter(lost)
        for table in tables:
            for block in dict.fromkeys(table):
                self._own(block)
                references[block.block_id] += 1
        self._stack.check(references)


class Tier:
    """An allocator and the block tables that lie in its tier."""

    def __init__(
        self,
        device: Device,
        block_size: int,
        num_blocks: int,
        block_sliding_window: int | None,
    ) -> None:
        self.allocator = BlockAllocator(device, block_size, num_blocks)
        self.block_sliding_window = block_sliding_window
        # By sequence number.
        self.tables: dict[int, BlockTable] = {}
        # By block id, references that no table holds: `share` was told to lose them,
        # or they are counted for entries that repeat a block. Below 0: tables that hold
        # the block without a reference, since a repeated entry has given theirs up.
        self.lost_references: Counter[int] = Counter()

    @property
    def name(self) -> str:
        """Name of the tier in errors."""
        return self.allocator.device.name

    def distinct(self, table: BlockTable) -> Iterable[KVCacheBlock]:
        """Return the blocks of a table, each once, in order of first occurrence."""
        return table if self.block_sliding_window is None else dict.fromkeys(table)

    def num_distinct(self, seqs: Iterable[PagedSequence]) -> int:
        """Return how many blocks the unfinished of `seqs` hold here."""
        blocks: set[KVCacheBlock] = set()
        for seq in seqs:
            if not seq.is_finished():
                blocks.update(self.tables.get(seq.seq_id, ()))
        return len(blocks)

    def require_free(self, num_blocks: int, who: str) -> None:
        """Raise if fewer blocks are free, before anything changes."""
        num_free = self.allocator.get_num_free_blocks()
        if num_blocks > num_free:
            raise NoFreeBlocksError(
                f"out of memory: {who} needs {num_blocks} blocks of the "
                f"{self.allocator.device.name} pool, {num_free} are free; ask whether "
                f"it fits before"
            )

    def drop(self, seq_id: int) -> int:
        """Free the table of a sequence, front to back; return its entries, if any."""
        table = self.tables.pop(seq_id, None)
        if table is None:
            return 0
        if self.block_sliding_window is None and not self.lost_references:
            self.allocator.free_all(table)
            return len(table)
        for block in self.distinct(table):
            self._release(block)
        return len(table)

    def share(self, table: BlockTable, num_sharers: int, *, num_lost: int = 0) -> None:
        """Add references to all blocks of `table`; `num_lost` of them are lost."""
        if not (num_sharers or num_lost):
            return
        for block in dict.fromkeys(table):
            self.allocator.share(block, num_sharers)
            if num_lost:
                self._lose(block, num_lost)

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a copy of `table` for another sequence.

        A wart of 0.2.7: each entry counts a reference, also one that repeats a block,
        while giving up a table takes one a block.
        """
        for block in table:
            self.allocator.share(block)
        self._lose_repeats(table)
        return table.copy()

    def _lose(self, block: KVCacheBlock, num_references: int) -> None:
        """Note references more (or, below 0, fewer) than tables hold the block."""
        lost = self.lost_references[block.block_id] + num_references
        if lost:
            self.lost_references[block.block_id] = lost
        else:
            del self.lost_references[block.block_id]

    def _lose_repeats(self, table: BlockTable) -> None:
        """Note that references were counted for entries that repeat a block."""
        if self.block_sliding_window is not None:
            for block, num_entries in Counter(table).items():
                if num_entries > 1:
                    self._lose(block, num_entries - 1)

    def _release(self, block: KVCacheBlock) -> None:
        """Take away the reference of a table that gives `block` up.

        A block that others hold stays, though its count may say otherwise.
        """
        lost = self.lost_references.get(block.block_id, 0)
        if lost < 0 and block.ref_cnt == 1:
            self._lose(block, 1)
        else:
            self.allocator.free(block)

    def _release_repeat(self, block: KVCacheBlock) -> bool:
        """Take a reference away for an entry that is not the last of `block`."""
        num_holders = block.ref_cnt - self.lost_references.get(block.block_id, 0)
        if block.ref_cnt <= min(num_holders, 1):
            return False
        self.allocator.free(block)
        self._lose(block, -1)
        return True

    def move(
        self, seq_id: int, target: Tier, mapping: dict[KVCacheBlock, KVCacheBlock]
    ) -> None:
        """Move a table to the other tier, entry by entry: take, then free."""
        table = self.tables.pop(seq_id)
        moved: set[KVCacheBlock] = set()
        for block in table:
            if block in moved:
                # 0.2.7 moves a reference for every entry. Where none is left it stops
                # with a double free; here the block has come along all the same.
                if self._release_repeat(block):
                    target.allocator.share(mapping[block])
                    target._lose(mapping[block], 1)
                continue
            moved.add(block)
            if block in mapping:
                target.allocator.share(mapping[block])
            else:
                mapping[block] = target.allocator.allocate()
            self._release(block)
        target.tables[seq_id] = [mapping[block] for block in table]

    def reclaim(self) -> None:
        """Free blocks that no table holds and that were not given back."""
        for block_id, num_references in self.lost_references.items():
            for _ in range(num_references):
                self.allocator.free(self.allocator.block(block_id))
        self.lost_references.clear()

    def extend(self, table: BlockTable, num_blocks: int) -> BlockTable:
        """Append fresh blocks, or those of the window's last round, to `table`."""
        window = self.block_sliding_window
        if window is None:
            table += self.allocator.allocate_all(num_blocks - len(table))
        while len(table) < num_blocks:
            if window is not None and len(table) >= window:
                table.append(table[len(table) % window])
            else:
                table.append(self.allocator.allocate())
        return table

    def copy_last(self, seq: PagedSequence, table: BlockTable) -> tuple[int, int]:
        """Replace the last entry, whose block counts others, by a block of its own.

        A reference is given up, as in 0.2.7, even if entries before name the block.
        """
        self.require_free(1, f"sequence {seq.seq_id}")
        last = table.pop()
        copy = self.allocator.allocate()
        if self.block_sliding_window is not None and last in table:
            self._release_repeat(last)
        else:
            self._release(last)
        table.append(copy)
        return last.block_id, copy.block_id

    def num_stored_tokens(self, seqs: Sequence[PagedSequence]) -> tuple[int, int]:
        """Return the filled slots of blocks, and the tokens that tables reach.

        The first counts a slot once, the second once for each table that holds it.
        """
        block_size = self.allocator.block_size
        if len(seqs) == 1 and self.block_sliding_window is None:
            num_entries = len(self.tables[seqs[0].seq_id])
            num_tokens = min(seqs[0].num_computed_tokens, num_entries * block_size)
            return num_tokens, num_tokens
        full: set[KVCacheBlock] = set()
        partial: dict[KVCacheBlock, int] = {}
        num_logical_tokens = 0
        for seq in seqs:
            table = self.tables[seq.seq_id]
            num_tokens = min(seq.num_computed_tokens, len(table) * block_size)
            num_logical_tokens += num_tokens
            num_full, num_rest = divmod(num_tokens, block_size)
            full.update(table[:num_full])
            if num_rest:
                last = table[num_full]
                partial[last] = max(num_rest, partial.get(last, 0))
        num_partial_tokens = sum(
            num_rest for block, num_rest in partial.items() if block not in full
        )
        return len(full) * block_size + num_partial_tokens, num_logical_tokens

    def check(self) -> None:
        """Prove invariant 2, see `BlockAllocator.check`."""
        self.allocator.check(self.tables.values(), self.lost_references)
