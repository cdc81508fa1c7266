"""V1's block pool, evicting by a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import CacheError, PolicyError, require
from cache.v1.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cache.block import KVCacheBlock
    from cache.v1.policies.base import CachePolicy


class PolicyBlockPool(BlockPool):
    """A `BlockPool` with prefix caching in which a policy says what is evicted.

    Free blocks without content are used up first, latest freed first, as in vLLM from
    0.24 on; then the policy chooses. A policy that orders them itself
    (`CachePolicy.orders_uncached`) is told of them where the release queues them with
    the others, and chooses always.

    Parameters
    ----------
    num_gpu_blocks, unhashed_first
        See `BlockPool`.
    policy
        A new one, for this pool alone.
    """

    def __init__(
        self, num_gpu_blocks: int, policy: CachePolicy, *, unhashed_first: bool
    ) -> None:
        self._tells_all = policy.orders_uncached and not unhashed_first
        super().__init__(
            num_gpu_blocks, enable_caching=True, unhashed_first=not self._tells_all
        )
        self.policy = policy
        self._incoming: Sequence[int] = ()
        if self._tells_all:
            for block in self.free_block_queue:
                policy.released(block.block_id)

    def begins(self, request_id: int) -> None:
        """Tell the policy whose blocks the next calls are about."""
        self.policy.begins(request_id)

    def expect(self, contents: Sequence[int]) -> None:
        """Note the contents of the first blocks that are taken next."""
        self._incoming = contents

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """See `BlockPool.touch`."""
        blocks = list(blocks)
        super().touch(blocks)
        for block in blocks:
            self.policy.hit(block.block_id)

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[int],
        first_depth: int = 0,
    ) -> None:
        """See `BlockPool.cache_full_blocks`."""
        super().cache_full_blocks(blocks, block_hashes)
        cached = self.policy.cached
        for depth, (block, content) in enumerate(
            zip(blocks, block_hashes, strict=True), first_depth
        ):
            cached(block.block_id, content, depth)

    def _take(self, num_blocks: int) -> list[KVCacheBlock]:
        incoming: Iterator[int] = iter(self._incoming)
        self._incoming = ()
        return [self._take_one(next(incoming, None)) for _ in range(num_blocks)]

    def _take_one(self, content: int | None) -> KVCacheBlock:
        queue = self.free_block_queue
        if not self._tells_all:
            # They stand at the front, all of them.
            front = next(iter(queue))
            if front.block_hash is None:
                return queue.popleft()
        block = self._evictable(self.policy.evict(content))
        try:
            queue.remove(block)
        except CacheError as error:
            raise PolicyError(
                f"{type(self.policy).__name__} evicts block {block.block_id} twice; "
                f"forget a block when it is evicted"
            ) from error
        return block

    def _evictable(self, block_id: int) -> KVCacheBlock:
        """Return the block that a policy, perhaps a user's, chose.

        Raises
        ------
        PolicyError
            If it is not evictable.
        """
        if isinstance(block_id, int) and 0 < block_id < self.num_gpu_blocks:
            block = self.blocks[block_id]
            if not block.ref_cnt and (self._tells_all or block.block_hash is not None):
                return block
        raise PolicyError(
            f"{type(self.policy).__name__} evicts block {block_id!r}, which is no "
            f"evictable block; evict one that was released and not hit since"
        )

    def _queue_freed(self, freed: list[KVCacheBlock]) -> None:
        super()._queue_freed(freed)
        released = self.policy.released
        for block in freed:
            if self._tells_all or block.block_hash is not None:
                released(block.block_id)

    def check(self) -> None:
        """See `BlockPool.check`; proves the policy as well."""
        super().check()
        self.policy.check()
        num_known = sum(
            self._tells_all or block.block_hash is not None
            for block in self.free_block_queue
        )
        require(
            self.policy.num_evictable == num_known,
            f"pool: the policy can evict {self.policy.num_evictable} blocks, "
            f"{num_known} are free for it",
        )
        uncached = [block.block_hash is None for block in self.free_block_queue]
        require(
            self._tells_all or uncached == sorted(uncached, reverse=True),
            "pool: a block without content is queued behind a cached one",
        )
