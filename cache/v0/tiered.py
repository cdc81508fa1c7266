"""GPU and CPU memory behind one range of block ids, and swaps between them.

Source: vLLM 0.7.3, ``vllm/core/block/cpu_gpu_block_allocator.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cache.errors import CacheError, ImmutableBlockError, NoFreeBlocksError, require
from cache.sequences import Device
from cache.v0.allocator import NaiveBlock, NaiveBlockAllocator
from cache.v0.prefix_caching import PrefixCachingBlockAllocator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache.tokens import TokenSlice
    from cache.v0.evictor import EvictionPolicy
    from cache.v0.interfaces import (
        Block,
        BlockAllocator,
        BlockId,
    )


class NullBlock(NaiveBlock):
    """Stands in tables for the blocks that a sliding window has dropped.

    There is one; its slots are never read or written, and it is never freed.
    """

    __slots__ = ()

    def show_token_ids(self, source: TokenSlice, start: int, num_new: int) -> None:
        raise ImmutableBlockError(
            f"block {self.block_id} is the null block: no tokens can be appended to it"
        )


class CpuGpuBlockAllocator:
    """An allocator for each tier, and swaps between; methods as of `BlockAllocator`."""

    NoFreeBlocksError = NoFreeBlocksError

    @staticmethod
    def create(
        allocator_type: str,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        *,
        eviction_policy: EvictionPolicy = "lru",
    ) -> CpuGpuBlockAllocator:
        """Return an allocator whose GPU ids are 0, 1, ... and CPU ids follow."""
        gpu_ids = range(num_gpu_blocks)
        cpu_ids = range(num_gpu_blocks, num_gpu_blocks + num_cpu_blocks)

        def tier(ids: range) -> BlockAllocator:
            if allocator_type == "naive":
                return NaiveBlockAllocator(None, len(ids), block_size, ids)
            if allocator_type == "prefix_caching":
                return PrefixCachingBlockAllocator(
                    len(ids), block_size, ids, eviction_policy
                )
            raise ValueError(
                f"no allocator type is named {allocator_type!r}; there are: naive, "
                f"prefix_caching"
            )

        return CpuGpuBlockAllocator(tier(cpu_ids), tier(gpu_ids))

    def __init__(
        self, cpu_block_allocator: BlockAllocator, gpu_block_allocator: BlockAllocator
    ) -> None:
        common = cpu_block_allocator.all_block_ids & gpu_block_allocator.all_block_ids
        if common:
            raise ValueError(
                f"block {min(common)} is in both tiers; give them ids of their own"
            )
        self._allocators = {
            Device.CPU: cpu_block_allocator,
            Device.GPU: gpu_block_allocator,
        }
        self._tier_of = {
            block_id: allocator
            for allocator in self._allocators.values()
            for block_id in allocator.all_block_ids
        }
        self._null_block: NullBlock | None = None
        self._swaps: dict[BlockId, BlockId] = {}

    # -- one tier -------------------------------------------------------------

    def tier(self, device: Device) -> BlockAllocator:
        """Return the allocator of a tier."""
        return self._allocators[device]

    def allocate_mutable_block(
        self, prev_block: Block | None, device: Device, extra_hash: int | None = None
    ) -> Block:
        return self._allocators[device].allocate_mutable_block(prev_block, extra_hash)

    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: TokenSlice,
        device: Device,
        extra_hash: int | None = None,
    ) -> Block:
        return self._allocators[device].allocate_immutable_block(
            prev_block, token_ids, extra_hash
        )

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: Sequence[TokenSlice],
        device: Device,
        extra_hash: int | None = None,
    ) -> list[Block]:
        return self._allocators[device].allocate_immutable_blocks(
            prev_block, block_token_ids, extra_hash
        )

    def allocate_immutable(
        self, prev_block: Block | None, token_ids: TokenSlice, device: Device
    ) -> Block:
        """`allocate_immutable_block` under its name before vLLM 0.6."""
        return self.allocate_immutable_block(prev_block, token_ids, device)

    def allocate_mutable(self, prev_block: Block | None, device: Device) -> Block:
        """`allocate_mutable_block` under its name before vLLM 0.6."""
        return self.allocate_mutable_block(prev_block, device)

    def allocate_chain(
        self, token_ids: TokenSlice, device: Device, extra_hash: int | None = None
    ) -> list[Block]:
        return self._allocators[device].allocate_chain(token_ids, extra_hash)

    def allocate_or_get_null_block(self) -> Block:
        """Return the block that stands for those a sliding window has dropped."""
        if self._null_block is None:
            gpu = self._allocators[Device.GPU]
            taken = gpu.allocate_mutable_block(None).block_id
            self._null_block = NullBlock(None, (), 1, gpu, taken)
        return self._null_block

    @property
    def num_evictions(self) -> int:
        """Cached GPU blocks given up for others; 0 without prefix caching."""
        gpu = self._allocators[Device.GPU]
        return getattr(gpu, "num_evictions", 0)

    @property
    def has_null_block(self) -> bool:
        """Whether `allocate_or_get_null_block` has taken its block."""
        return self._null_block is not None

    def free(self, block: Block) -> None:
        """Give up a block of either tier; the null block stays."""
        if block is self._null_block:
            return
        # A block without an id is refused by any allocator, with its name.
        self._tier(block.block_id, block.allocator).free(block)

    def fork(self, last_block: Block) -> list[Block]:
        if last_block is self._null_block:
            raise CacheError(
                f"block {last_block.block_id} is the null block: it cannot be forked"
            )
        return self._tier(last_block.block_id, last_block.allocator).fork(last_block)

    def is_shared(self, block_id: BlockId) -> bool:
        return self._tier(block_id).is_shared(block_id)

    def get_num_total_blocks(self, device: Device) -> int:
        return self._allocators[device].get_num_total_blocks()

    def get_num_free_blocks(self, device: Device) -> int:
        return self._allocators[device].get_num_free_blocks()

    def get_physical_block_id(self, device: Device, absolute_id: BlockId) -> int:
        return self._allocators[device].get_physical_block_id(absolute_id)

    @property
    def all_block_ids(self) -> frozenset[BlockId]:
        return frozenset(self._tier_of)

    # -- the GPU tier only, as in the reference -------------------------------

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        return self._allocators[Device.GPU].clear_copy_on_writes()

    def mark_blocks_as_accessed(self, block_ids: Sequence[BlockId], now: float) -> None:
        self._allocators[Device.GPU].mark_blocks_as_accessed(block_ids, now)

    def mark_blocks_as_computed(self, block_ids: Sequence[BlockId]) -> None:
        self._allocators[Device.GPU].mark_blocks_as_computed(block_ids)

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: Sequence[Sequence[BlockId]]
    ) -> list[BlockId]:
        return self._allocators[Device.GPU].get_common_computed_block_ids(
            computed_seq_block_ids
        )

    # -- prefix caching -------------------------------------------------------

    def find_cached_blocks_prefix(
        self, block_hashes: Sequence[int], device: Device = Device.GPU
    ) -> list[int]:
        return self._allocators[device].find_cached_blocks_prefix(block_hashes)

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        return self._allocators[device].get_prefix_cache_hit_rate()

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        if device is not None:
            return self._allocators[device].reset_prefix_cache()
        return all(tier.reset_prefix_cache() for tier in self._allocators.values())

    # -- swapping -------------------------------------------------------------

    def get_num_full_blocks_touched(
        self, blocks: Sequence[Block], device: Device
    ) -> int:
        return self._allocators[device].get_num_full_blocks_touched(
            self._movable(blocks)
        )

    def get_num_blocks_for_swap_in(
        self, blocks: Sequence[Block], device: Device
    ) -> int:
        return self._allocators[device].get_num_blocks_for_swap_in(
            self._movable(blocks)
        )

    def swap(
        self, blocks: Sequence[Block], src_device: Device, dst_device: Device
    ) -> dict[BlockId, BlockId]:
        """Move blocks between tiers; return new ids by old ones."""
        # Null blocks stay where they are: they hold nothing. (The reference gives the
        # null block away with the others.)
        moved = self._movable(blocks)
        source, target = self._allocators[src_device], self._allocators[dst_device]
        for block in moved:
            if block.block_id is None or self._tier(block.block_id) is not source:
                raise CacheError(
                    f"{block!r} is not on the {src_device.value}: it cannot be swapped "
                    f"from there"
                )
        num_needed = target.get_num_blocks_for_swap_in(moved)
        if num_needed > target.get_num_free_blocks():
            raise self.NoFreeBlocksError(
                f"swap without room: {num_needed} blocks are needed on the "
                f"{dst_device.value}, {target.get_num_free_blocks()} are free; ask "
                f"whether a swap is possible first"
            )
        old_ids = [block.block_id for block in moved]
        source.swap_out(moved)
        target.swap_in(moved)
        pairs = {
            old: block.block_id
            for old, block in zip(old_ids, moved, strict=True)
            if old is not None and block.block_id is not None
        }
        self._swaps.update(pairs)
        return pairs

    def get_and_reset_swaps(self) -> list[tuple[BlockId, BlockId]]:
        """Return the (source, destination) pairs swapped since the last call."""
        pairs = list(self._swaps.items())
        self._swaps.clear()
        return pairs

    # -- own proof ------------------------------------------------------------

    def check(self, references: Mapping[BlockId, int]) -> None:
        counts = Counter(dict(references))
        if self._null_block is not None and self._null_block.block_id is not None:
            counts[self._null_block.block_id] += 1
        require(counts.keys() <= self._tier_of.keys(), "a table names a foreign block")
        for allocator in self._allocators.values():
            allocator.check(counts)

    def _movable(self, blocks: Sequence[Block]) -> Sequence[Block]:
        if self._null_block is None:
            return blocks
        return [block for block in blocks if block is not self._null_block]

    def _tier(
        self, block_id: BlockId | None, default: BlockAllocator | None = None
    ) -> BlockAllocator:
        allocator = default if block_id is None else self._tier_of.get(block_id)
        if allocator is None:
            raise CacheError(f"no tier has a block {block_id}")
        return allocator
