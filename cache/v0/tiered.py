"""GPU and CPU memory behind one range of block ids, and swaps between them.

Source: vLLM 0.7.3, ``vllm/core/block/cpu_gpu_block_allocator.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cache.errors import CacheError, ImmutableBlockError, require
from cache.sequences import Device
from cache.v0.allocator import NaiveBlockAllocator
from cache.v0.interfaces import (
    Block,
    BlockAllocator,
    BlockId,
    DeviceAwareBlockAllocator,
)
from cache.v0.naive_block import NaiveBlock
from cache.v0.prefix_caching import PrefixCachingBlockAllocator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cache.tokens import TokenSlice
    from cache.v0.evictor import EvictionPolicy


class NullBlock(NaiveBlock):
    """Stands in tables for the blocks that a sliding window has dropped.

    There is one; its slots are never read or written, and it is never freed.
    """

    __slots__ = ()

    def show_token_ids(self, source: TokenSlice, start: int, num_new: int) -> None:
        """Refuse: nothing is written to the null block."""
        raise ImmutableBlockError(
            f"block {self.block_id} is the null block: no tokens can be appended to it"
        )


class CpuGpuBlockAllocator(DeviceAwareBlockAllocator):
    """An allocator for each tier, and swaps between the two.

    Parameters
    ----------
    cpu_block_allocator
        Of the CPU tier.
    gpu_block_allocator
        Of the GPU tier; the ids of the two must differ.
    """

    @staticmethod
    def create(
        allocator_type: str,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        *,
        eviction_policy: EvictionPolicy = "lru",
    ) -> CpuGpuBlockAllocator:
        """Return an allocator whose GPU ids are 0, 1, ... and CPU ids follow.

        Parameters
        ----------
        allocator_type
            "naive" or "prefix_caching".
        num_gpu_blocks, num_cpu_blocks
            Sizes of the tiers.
        block_size
            Tokens a block.
        eviction_policy
            Of prefix caching, a name of `cache.v0.evictor.EVICTORS`, or what makes an
            evictor.

        Raises
        ------
        ValueError
            If there is no such type or policy.
        """
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
        """See `BlockAllocator.allocate_mutable_block`."""
        return self._allocators[device].allocate_mutable_block(prev_block, extra_hash)

    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: TokenSlice,
        device: Device,
        extra_hash: int | None = None,
    ) -> Block:
        """See `BlockAllocator.allocate_immutable_block`."""
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
        """See `BlockAllocator.allocate_immutable_blocks`."""
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
        """See `BlockAllocator.allocate_chain`."""
        return self._allocators[device].allocate_chain(token_ids, extra_hash)

    def allocate_or_get_null_block(self) -> Block:
        """Return the null block; the first call takes a GPU block for good.

        Raises
        ------
        NoFreeBlocksError
            If there is no null block yet, and no free GPU block; nothing changes.
        """
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
        """Give up a block of either tier; the null block stays.

        Raises
        ------
        DoubleFreeError
            If the block was given up before; nothing changes.
        """
        if block is self._null_block:
            return
        # A block without an id is refused by any allocator, with its name.
        self._tier(block.block_id, block.allocator).free(block)

    def fork(self, last_block: Block) -> list[Block]:
        """See `BlockAllocator.fork`; the null block cannot be forked."""
        if last_block is self._null_block:
            raise CacheError(
                f"block {last_block.block_id} is the null block: it cannot be forked"
            )
        return self._tier(last_block.block_id, last_block.allocator).fork(last_block)

    def is_shared(self, block_id: BlockId) -> bool:
        """See `BlockAllocator.is_shared`."""
        return self._tier(block_id).is_shared(block_id)

    def get_num_total_blocks(self, device: Device) -> int:
        """See `BlockAllocator.get_num_total_blocks`."""
        return self._allocators[device].get_num_total_blocks()

    def get_num_free_blocks(self, device: Device) -> int:
        """See `BlockAllocator.get_num_free_blocks`."""
        return self._allocators[device].get_num_free_blocks()

    def get_physical_block_id(self, device: Device, absolute_id: BlockId) -> int:
        """Return the index within the tier of a block, from 0."""
        return self._allocators[device].get_physical_block_id(absolute_id)

    @property
    def all_block_ids(self) -> frozenset[BlockId]:
        """All ids of both tiers."""
        return frozenset(self._tier_of)

    # -- the GPU tier only, as in the reference -------------------------------

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """See `BlockAllocator.clear_copy_on_writes`."""
        return self._allocators[Device.GPU].clear_copy_on_writes()

    def mark_blocks_as_accessed(self, block_ids: Sequence[BlockId], now: float) -> None:
        """See `BlockAllocator.mark_blocks_as_accessed`."""
        self._allocators[Device.GPU].mark_blocks_as_accessed(block_ids, now)

    def mark_blocks_as_computed(self, block_ids: Sequence[BlockId]) -> None:
        """See `BlockAllocator.mark_blocks_as_computed`."""
        self._allocators[Device.GPU].mark_blocks_as_computed(block_ids)

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: Sequence[Sequence[BlockId]]
    ) -> list[BlockId]:
        """See `BlockAllocator.get_common_computed_block_ids`."""
        return self._allocators[Device.GPU].get_common_computed_block_ids(
            computed_seq_block_ids
        )

    # -- prefix caching -------------------------------------------------------

    def find_cached_blocks_prefix(
        self, block_hashes: Sequence[int], device: Device = Device.GPU
    ) -> list[int]:
        """See `BlockAllocator.find_cached_blocks_prefix`."""
        return self._allocators[device].find_cached_blocks_prefix(block_hashes)

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """See `BlockAllocator.get_prefix_cache_hit_rate`."""
        return self._allocators[device].get_prefix_cache_hit_rate()

    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget all cached blocks of a tier, or of both; False if some were in use."""
        if device is not None:
            return self._allocators[device].reset_prefix_cache()
        return all(tier.reset_prefix_cache() for tier in self._allocators.values())

    # -- swapping -------------------------------------------------------------

    def get_num_full_blocks_touched(
        self, blocks: Sequence[Block], device: Device
    ) -> int:
        """See `BlockAllocator.get_num_full_blocks_touched`."""
        return self._allocators[device].get_num_full_blocks_touched(
            self._movable(blocks)
        )

    def get_num_blocks_for_swap_in(
        self, blocks: Sequence[Block], device: Device
    ) -> int:
        """See `BlockAllocator.get_num_blocks_for_swap_in`."""
        return self._allocators[device].get_num_blocks_for_swap_in(
            self._movable(blocks)
        )

    def swap(
        self, blocks: Sequence[Block], src_device: Device, dst_device: Device
    ) -> dict[BlockId, BlockId]:
        """Move blocks between tiers.

        Null blocks stay where they are: they hold nothing. (The reference gives the
        null block away with the others.)

        Parameters
        ----------
        blocks
            Of one table, all in `src_device`; their ids change.
        src_device, dst_device
            From where to where.

        Returns
        -------
        dict
            New ids by old ones, in table order; also kept for `get_and_reset_swaps`.

        Raises
        ------
        NoFreeBlocksError
            If they do not all fit `dst_device`; nothing changes.
        CacheError
            If one of them is not in `src_device`; nothing changes.
        """
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
        """Prove invariant 2 for both tiers in O(n).

        Parameters
        ----------
        references
            By block id, how many table entries name it; those that name the null block
            are not to be counted.

        Raises
        ------
        InvariantError
            With the rule and the block.
        """
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
