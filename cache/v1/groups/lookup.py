"""The longest prefix that all groups have cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cache.v1.block_pool import first_of
from cache.v1.groups.full import FullAttentionManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock
    from cache.v1.block_pool import BlockPool
    from cache.v1.groups.base import GroupManager
    from cache.v1.specs import KVCacheLayout


class Hit(NamedTuple):
    """The cached prefix of a request.

    Attributes
    ----------
    blocks
        By group; null blocks for tokens that nothing reads.
    num_tokens
        Of the prefix that all groups have.
    longest
        Of the longest prefix that one kind of layer has.
    """

    blocks: list[list[KVCacheBlock]]
    num_tokens: int
    longest: int

    @property
    def junction(self) -> int:
        """Where other requests with the longest prefix resume, once all groups keep it.

        0 if that is where this hit ends already.
        """
        return self.longest if self.longest > self.num_tokens else 0


class Bucket:
    """Groups with equal layers, which are looked up together.

    Parameters
    ----------
    managers
        By number of the group.
    pool
        Finds cached blocks.
    """

    def __init__(self, managers: dict[int, GroupManager], pool: BlockPool) -> None:
        self.numbers = tuple(managers)
        self.manager = next(iter(managers.values()))
        self.is_full = isinstance(self.manager, FullAttentionManager)
        self.drops_eagle_block = self.manager.drops_eagle_block
        self._null_block = pool.null_block
        self._get_one = pool.cached_blocks.get
        self._get_any = pool.cached_blocks.get_any
        self._salts = tuple(manager.salt for manager in managers.values())

    def longest_hit(
        self, hashes: list[int], limit: int, *, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Return the blocks of each group, and how many tokens all of them have.

        With `drops` the last block that is found is not used.
        """
        null_block, find = self._null_block, self.manager.longest_hit
        if len(self._salts) == 1:
            salt = self._salts[0]
            found, num_tokens = find(hashes, limit, self._get_any, salt, drops=drops)
            blocks = [null_block if each is None else first_of(each) for each in found]
            return [blocks], num_tokens
        found, num_tokens = find(hashes, limit, self._get_all, 0, drops=drops)
        nulls = (null_block,) * len(self._salts)
        columns = zip(*(nulls if row is None else row for row in found), strict=True)
        return [list(blocks) for blocks in columns] or [
            [] for _ in self._salts
        ], num_tokens

    def _get_all(self, block_hash: int) -> list[KVCacheBlock] | None:
        get, found = self._get_one, []
        for salt in self._salts:
            block = get(block_hash ^ salt)
            if block is None:
                return None
            found.append(block)
        return found


class Lookup:
    """Looks requests up in all groups of a layout.

    Parameters
    ----------
    layout
        Its groups with equal specs make a bucket.
    managers
        Of the groups.
    pool
        Finds cached blocks.

    Attributes
    ----------
    buckets
        Full attention first.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/kv_cache_coordinator.py``
    (`HybridKVCacheCoordinator`: `find_longest_cache_hit` and
    `find_longest_cache_hit_per_group`).
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        managers: Sequence[GroupManager],
        pool: BlockPool,
    ) -> None:
        by_spec: dict[Any, dict[int, GroupManager]] = {}
        for number, group in enumerate(layout.groups):
            by_spec.setdefault(group.spec, {})[number] = managers[number]
        buckets = [Bucket(members, pool) for members in by_spec.values()]
        self.buckets = sorted(buckets, key=lambda bucket: not bucket.is_full)
        self._num_groups = len(managers)
        self._hash_block_size = layout.hash_block_size
        # Full attention trims to whatever the only other kind has.
        self._needs_one_pass = len(buckets) == 1 or (
            len(buckets) == 2 and self.buckets[0].is_full
        )

    def longest_hit(self, hashes: list[int], limit: int) -> Hit:
        """Return the longest common prefix of at most `limit` tokens.

        Each bucket takes what the one before it leaves, until a pass changes nothing.
        One that loses its last block looks a block further than the others, where
        there are others, and loses it once for each length that is tried.
        """
        blocks: list[list[KVCacheBlock]] = [[] for _ in range(self._num_groups)]
        full_hits: dict[Bucket, int] = {}
        proved: set[Bucket] = set()
        num_hashed = len(hashes) * self._hash_block_size
        num_tokens, longest = limit, 0
        while True:
            candidate = num_tokens
            for bucket in self.buckets:
                if bucket in full_hits:
                    candidate = min(candidate, full_hits[bucket])
                    continue
                before, drops = candidate, bucket.drops_eagle_block
                drops = drops and bucket not in proved
                if drops and self._num_groups > 1:
                    before = min(candidate + bucket.manager.block_size, num_hashed)
                found, num_found = bucket.longest_hit(hashes, before, drops=drops)
                if drops:
                    proved.add(bucket)
                elif num_found < candidate:
                    proved.clear()
                candidate = num_found
                for number, column in zip(bucket.numbers, found, strict=True):
                    blocks[number] = column
                if bucket.is_full:
                    full_hits[bucket] = candidate
                longest = max(longest, candidate)
            if candidate >= num_tokens:
                break
            num_tokens = candidate
            if self._needs_one_pass:
                break
        for bucket in full_hits:
            num_blocks = -(-num_tokens // bucket.manager.block_size)
            for number in bucket.numbers:
                del blocks[number][num_blocks:]
        return Hit(blocks, num_tokens, longest)

    def hit_of_full(self, hashes: list[int], limit: int) -> tuple[Hit, bool] | None:
        """Return what full attention has, and whether others reach less far; no drafts.

        Every kind is looked up by itself, and has its own hit in `Hit.blocks`.

        Returns
        -------
        (Hit, bool) or None
            None where another kind reaches farther than full attention.
        """
        blocks: list[list[KVCacheBlock]] = [[] for _ in range(self._num_groups)]
        reached: list[int] = []
        for bucket in self.buckets:
            found, num_tokens = bucket.longest_hit(hashes, limit, drops=False)
            reached.append(num_tokens)
            for number, column in zip(bucket.numbers, found, strict=True):
                blocks[number] = column
        of_full = reached[0]
        if max(reached) > of_full:
            return None
        return Hit(blocks, of_full, of_full), min(reached) < of_full
