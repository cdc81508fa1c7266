"""Tokens and blocks of running sequence groups, for victim policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cache.sequences import SequenceStatus
from sim.scheduler.groups.accounting import num_lost_tokens

if TYPE_CHECKING:
    from sim.scheduler.groups.sequence import GroupBlockManager, SequenceGroup
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig


class GroupCache(Protocol):
    """A scheduler of sequence groups, as `GroupHoldings` asks it."""

    cache_config: CacheConfig
    block_manager: GroupBlockManager

    def is_shared(self, block_id: int) -> bool:
        """Whether several tables hold a block."""
        ...

    def group_of(self, request: Request) -> SequenceGroup:
        """Return the sequences of a request."""
        ...


class GroupHoldings:
    """Tokens and blocks of a running sequence group; see `Holdings`."""

    def __init__(self, scheduler: GroupCache) -> None:
        self._scheduler = scheduler

    def num_output_tokens(self, request: Request) -> int:
        return request.num_generated_tokens

    def num_computed_tokens(self, request: Request) -> int:
        return num_lost_tokens(self._group(request).get_seqs(SequenceStatus.RUNNING))

    def num_blocks(self, request: Request) -> int:
        return len(self._block_ids(self._group(request)))

    def num_shared_tokens(self, request: Request) -> int:
        # Blocks that the sequences of a group share are theirs, and go with the group.
        seqs = self._group(request).get_seqs(SequenceStatus.RUNNING)
        if not self._scheduler.cache_config.enable_prefix_caching or len(seqs) > 1:
            return 0
        num_shared = 0
        for block_id in self._scheduler.block_manager.get_block_table(seqs[0]):
            if not self._scheduler.is_shared(block_id):
                break
            num_shared += 1
        return num_shared * self._scheduler.cache_config.block_size

    def _group(self, request: Request) -> SequenceGroup:
        return self._scheduler.group_of(request)

    def _block_ids(self, group: SequenceGroup) -> set[int]:
        table_of = self._scheduler.block_manager.get_block_table
        return {
            id_
            for seq in group.get_seqs(SequenceStatus.RUNNING)
            for id_ in table_of(seq)
        }
