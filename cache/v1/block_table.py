"""The blocks of a request in all groups, and its hashes and look-ups."""

from __future__ import annotations

from cache.v1.groups.table import GroupTable


class Known:
    """Block hashes of a request, and results of its latest look-up.

    Attributes
    ----------
    hashes
        Chained, of its leading full hash blocks.
    junction, longest
        See `cache.v1.groups.lookup.Hit`; of the latest look-up.
    least_blocks, next_key
        New blocks that it needs as long as this key is not cached; see
        `cache.v1.refusals.Refusals`.
    """

    __slots__ = ("hashes", "junction", "least_blocks", "longest", "next_key")

    def __init__(self) -> None:
        self.hashes: list[int] = []
        self.junction = 0
        self.longest = 0
        self.least_blocks = 0
        self.next_key: int | None = None


class BlockTable:
    """The blocks of a request.

    Attributes
    ----------
    groups
        A table for each group.
    known
        Of its content.
    num_registered_tokens
        Tokens that were looked at for registration.
    """

    __slots__ = ("groups", "known", "num_registered_tokens")

    def __init__(self, num_groups: int, known: Known) -> None:
        self.groups = [GroupTable() for _ in range(num_groups)]
        self.known = known
        self.num_registered_tokens = 0

    def ids_of(self, group: int) -> list[int]:
        """Return the blocks in a group, 0 where none is."""
        return [block.block_id for block in self.groups[group].blocks]
