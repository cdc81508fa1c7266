"""How many free blocks a request takes that begins, or goes on, in several groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.block import KVCacheBlock
    from cache.v1.groups.base import GroupManager
    from cache.v1.tables import Found, TableRequest


class Needs:
    """Free blocks that requests use up, over all groups.

    Parameters
    ----------
    managers
        Of the groups.
    hit_alignment
        Tokens that the blocks of `Found` stand for.
    num_slots
        Slots for so many tokens, and for those that a drafter writes.
    """

    def __init__(
        self,
        managers: Sequence[GroupManager],
        hit_alignment: int,
        num_slots: Callable[[int], int],
    ) -> None:
        self._managers = managers
        self._hit_alignment = hit_alignment
        self._num_slots = num_slots
        self._no_hits: list[list[KVCacheBlock]] = [[] for _ in managers]

    def of_head(
        self,
        request: TableRequest,
        num_tokens: int,
        found: Found,
        *,
        is_whole: bool,
        num_external_tokens: int = 0,
    ) -> int:
        """Return how many free blocks `BlockTables.begin` would use up.

        Parameters
        ----------
        request, num_tokens, found
            See there.
        is_whole
            Whether `num_tokens` are all of the request's: then blocks that it will
            have given up by then do not count.
        num_external_tokens
            Tokens behind its hits that are to be loaded, all else being computed:
            nothing is loaded that windows have left behind then, and no drafter writes.
        """
        hits = found.parts or self._no_hits
        num_hit_tokens = found.num_blocks * self._hit_alignment
        num_blocks = found.num_revived
        if num_external_tokens:
            num_computed = num_hit_tokens + num_external_tokens
            num_blocks = sum(
                manager.num_revived(blocks, num_computed)
                for manager, blocks in zip(self._managers, hits, strict=True)
            )
        has_drafts = not (is_whole or num_external_tokens)
        num_slots = self._num_slots(num_tokens) if has_drafts else num_tokens
        for manager, blocks in zip(self._managers, hits, strict=True):
            num_blocks += manager.num_new_blocks_of_head(
                request,
                blocks,
                num_hit_tokens,
                num_tokens,
                num_slots,
                is_whole=is_whole,
                num_external_tokens=num_external_tokens,
            )
        return num_blocks

    def of_rest(
        self,
        request: TableRequest,
        num_tokens: int,
        num_computed_tokens: int,
        *,
        is_whole: bool,
    ) -> int:
        """Return how many blocks a request lacks until so many tokens are computed.

        Parameters
        ----------
        request
            With a table, or one that has lost it.
        num_tokens, is_whole
            See `of_head`.
        num_computed_tokens
            Of it, when the call began: a state is kept in mid-way of what follows.
        """
        table = request.table
        return sum(
            manager.num_missing_blocks(
                *(None if table is None else table.groups[number], request),
                *(num_tokens, num_computed_tokens),
                is_whole=is_whole,
            )
            for number, manager in enumerate(self._managers)
        )
