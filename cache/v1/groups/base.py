"""The manager of a group, on which all kinds of groups build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.v1.fine_pool import FineBlockPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock
    from cache.v1.block_pool import BlockPool
    from cache.v1.groups.table import Copies, GroupTable
    from cache.v1.specs import KVCacheSpec
    from cache.v1.tables import TableRequest

Get = Any
"""From a key to a block, or to a tuple of blocks of several groups; None for a miss."""


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """Settings of the engine that a group's manager needs.

    Parameters
    ----------
    salt
        Sets the group's keys apart from those of other groups.
    hash_block_size, hit_alignment
        See `cache.v1.specs.KVCacheLayout`.
    retention_interval
        Tokens after which windows and states are kept for hits: None for every
        alignment, 0 for those of prompts and junctions only.
    most_admitted_blocks
        Most blocks that admission counts for a request, or None.
    drops_eagle_block
        Whether hits of the group lose their last block.
    proof_tokens
        Tokens behind a hit that groups which lose their last block look at, or 0.
    """

    salt: int
    hash_block_size: int
    hit_alignment: int
    retention_interval: int | None
    most_admitted_blocks: int | None
    drops_eagle_block: bool = False
    proof_tokens: int = 0


class GroupManager(ABC):
    """Tables of one group of layers that keep every block: full attention's way.

    Other kinds say which blocks are left behind (`num_passed_tokens`), which full
    blocks are registered (`kept`) and what a hit needs (`longest_hit`).

    Parameters
    ----------
    spec
        Of the group's layers.
    pool
        Shared by all groups.
    terms
        See `GroupTerms`.

    Attributes
    ----------
    copies
        Blocks to be copied before the step runs.
    num_held_blocks, num_null_blocks
        Entries of all tables, and of these the null block.
    num_used_blocks
        Blocks of the pool that the group's tables hold.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``.
    """

    gives_up_blocks = False
    """Whether blocks of a running request are ever left behind."""

    def __init__(self, spec: KVCacheSpec, pool: BlockPool, terms: GroupTerms) -> None:
        self.block_size = spec.block_size
        self.pool = pool
        self.fine_pool = pool if isinstance(pool, FineBlockPool) else None
        self.salt = terms.salt
        self.hit_alignment = terms.hit_alignment
        self.hash_block_size = terms.hash_block_size
        self.retention_interval = terms.retention_interval
        self.most_admitted_blocks = terms.most_admitted_blocks
        self.drops_eagle_block = terms.drops_eagle_block
        self._proof_tokens = terms.proof_tokens
        self.num_hashes = max(spec.block_size // terms.hash_block_size, 1)
        self.copies: Copies = []
        self._copied: list[KVCacheBlock] = []  # held, of steps that have not ended
        self.num_held_blocks = 0
        self.num_null_blocks = 0
        self.num_used_blocks = 0

    # -- differences between kinds of groups ----------------------------------

    def num_passed_tokens(self, num_computed_tokens: int) -> int:
        """Return how many leading tokens nothing reads any more."""
        del num_computed_tokens
        return 0

    def num_stored_tokens(self, num_tokens: int, block_size: int) -> int:
        """Return how many of `num_tokens` tables hold, in slots of a smaller block."""
        num_tokens -= self.num_null_blocks * self.block_size
        return num_tokens * block_size // self.block_size

    def phases(self) -> set[int]:
        """Return when a decode needs a look: its computed tokens modulo `block_size`.

        Registration aside.
        """
        return {0} | self.giving_phases()

    def giving_phases(self) -> set[int]:
        """Return those of `phases` in which blocks may be left behind."""
        return set()

    def kept(self, first: int, stop: int, boundaries: Sequence[int]) -> Sequence[int]:
        """Return which of the full blocks from `first` to `stop` are registered.

        Parameters
        ----------
        first, stop
            Indices of blocks.
        boundaries
            Tokens up to which a later request may hit; see `boundaries`.
        """
        del boundaries
        return range(first, stop)

    def boundaries(self, request: TableRequest, junction: int) -> Sequence[int]:
        """Return up to which tokens a later request may hit.

        Those of the prompt, and of the junction if there is one. Where hits lose their
        last block, a longer prompt hits no further than a block below, and the same
        prompt once more one lower if a block ends with it.
        """
        last, unit = request.num_prompt_tokens - 1, self._proof_tokens
        found = [last]
        if unit:
            ends = (last // unit * unit, (last + 1) // unit * unit)
            found = [max(end - unit, 0) for end in ends]
        if junction:
            found.append(junction)
            if self.drops_eagle_block:
                found.append(junction - self.block_size)
        return found

    @abstractmethod
    def longest_hit(
        self, hashes: list[int], limit: int, get: Get, salt: int, *, drops: bool = False
    ) -> tuple[list[Any], int]:
        """Return the longest usable prefix of at most `limit` tokens.

        Parameters
        ----------
        hashes
            Chained, of `hash_block_size` tokens each.
        limit
            In tokens.
        get, salt
            ``get(hash ^ salt)`` gives the cached blocks of a hash, or None.
        drops
            Whether the last block that is found is not used.

        Returns
        -------
        (list, int)
            Answers of `get`, None for blocks that may be missing; and the hit's tokens.
        """

    # -- admission ------------------------------------------------------------

    def keys(self, hashes: list[int]) -> list[int]:
        """Return the hashes at the ends of the group's blocks."""
        num_hashes = self.num_hashes
        return hashes if num_hashes == 1 else hashes[num_hashes - 1 :: num_hashes]

    def num_new_blocks_of_head(
        self,
        request: TableRequest,
        hits: list[KVCacheBlock],
        num_hit_tokens: int,
        num_tokens: int,
        num_slots: int,
        *,
        is_whole: bool,
        num_external_tokens: int = 0,
    ) -> int:
        """Return how many new blocks a waiting request needs, hits aside.

        Parameters
        ----------
        request
            Has no table.
        hits, num_hit_tokens
            Its cached prefix in the group.
        num_tokens, num_slots
            That its table is to hold: without and with those of its drafter.
        is_whole
            Whether that is all of it; then only what it holds at a time counts.
        num_external_tokens
            Tokens behind the hits that are to be loaded.
        """
        del num_tokens
        num_blocks = -(-num_slots // self.block_size)
        most = self.most_admitted_blocks
        if is_whole and most is not None and most < num_blocks:
            num_blocks = most
        num_computed = num_hit_tokens + num_external_tokens
        num_passed = self.num_passed_tokens(num_computed) // self.block_size
        num_blocks = max(num_blocks - max(num_passed, len(hits)), 0)
        return num_blocks + (1 if self._ends_inside(hits, num_hit_tokens) else 0)

    def num_missing_blocks(
        self,
        own: GroupTable | None,
        request: TableRequest,
        num_tokens: int,
        num_computed_tokens: int,
        *,
        is_whole: bool,
    ) -> int:
        """Return how many blocks a request lacks for so many tokens.

        If these are all of its tokens, only what it holds at a time counts.
        """
        del request, num_computed_tokens
        num_blocks, most = -(-num_tokens // self.block_size), self.most_admitted_blocks
        if is_whole and most is not None and most < num_blocks:
            num_blocks = most
        return max(num_blocks - (0 if own is None else len(own.blocks)), 0)

    def num_revived(self, hits: list[KVCacheBlock], num_hit_tokens: int) -> int:
        """Return how many of the hits are free: each is used up as a new block is."""
        null_block = self.pool.null_block
        return sum(
            [
                block.ref_cnt == 0 and block is not null_block
                for block in self._held_hits(hits, num_hit_tokens)
            ]
        )

    def _held_hits(
        self, hits: list[KVCacheBlock], num_hit_tokens: int
    ) -> list[KVCacheBlock]:
        """Return the hits but those that nothing reads any more."""
        num_passed = self.num_passed_tokens(num_hit_tokens) // self.block_size
        return hits[num_passed:] if num_passed > 0 else hits

    def _ends_inside(self, hits: list[KVCacheBlock], num_hit_tokens: int) -> bool:
        """Whether the last of the hits is a block that is not hit as a whole."""
        return bool(hits) and num_hit_tokens % self.block_size > 0

    def adopt(
        self,
        own: GroupTable,
        hits: list[KVCacheBlock],
        num_hit_tokens: int,
        num_computed_tokens: int,
    ) -> None:
        """Begin a table with its hits, and hold on to them.

        Parameters
        ----------
        own
            Empty.
        hits, num_hit_tokens
            The cached prefix.
        num_computed_tokens
            The same tokens, and those behind them that are to be loaded: what nothing
            reads of both has null blocks.
        """
        num_passed = max(self.num_passed_tokens(num_computed_tokens), 0)
        num_passed //= self.block_size
        null_block = self.pool.null_block
        held = [block for block in hits[num_passed:] if block is not null_block]
        num_free = self.pool.num_free_blocks
        self.pool.touch(held)
        self.num_used_blocks += num_free - self.pool.num_free_blocks
        own.blocks = [null_block] * num_passed + hits[num_passed:]
        own.num_passed = num_passed
        own.num_seen = num_entries = len(own.blocks)
        self.num_held_blocks += len(held)
        self.num_null_blocks += num_entries - len(held)
        if self._ends_inside(hits, num_hit_tokens):
            own.num_seen = own.shared_tail = num_entries - 1

    # -- growth ---------------------------------------------------------------

    def give_up(self, own: GroupTable, num_computed_tokens: int) -> None:
        """Put the null block in place of blocks that nothing reads any more."""
        blocks = own.blocks
        stop = self.num_passed_tokens(num_computed_tokens) // self.block_size
        stop = min(stop, len(blocks))
        if stop <= own.num_passed:
            return
        null_block, start = self.pool.null_block, own.num_passed
        own.num_passed = stop
        freed = blocks[start:stop]
        if null_block in freed:
            freed = [block for block in freed if block is not null_block]
        blocks[start:stop] = [null_block] * (stop - start)
        freed.reverse()
        if freed:
            self.num_null_blocks += len(freed)
            self._release(freed)

    def num_new_blocks(
        self,
        own: GroupTable,
        request: TableRequest,
        num_computed_tokens: int,
        num_tokens: int,
        num_slots: int,
    ) -> int:
        """Return how many new blocks a running request needs for `num_slots`."""
        del request, num_computed_tokens, num_tokens
        num_new_blocks = -(-num_slots // self.block_size) - len(own.blocks)
        return num_new_blocks if num_new_blocks > 0 else 0

    def lengthen(
        self,
        own: GroupTable,
        request: TableRequest,
        num_computed_tokens: int,
        num_tokens: int,
        num_slots: int,
    ) -> None:
        """Give a table the blocks that it lacks, which are free."""
        del request, num_computed_tokens, num_tokens
        if own.shared_tail >= 0:
            self._copy_tail(own, self._take(1)[0])
        num_new_blocks = -(-num_slots // self.block_size) - len(own.blocks)
        if num_new_blocks > 0:
            own.blocks += self._take(num_new_blocks)
            self.num_held_blocks += num_new_blocks

    def _take(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = self.pool.get_new_blocks(num_blocks)
        self.num_used_blocks += num_blocks
        return blocks

    def _copy_tail(self, own: GroupTable, copy: KVCacheBlock) -> None:
        """Put a block in place of one that is hit in part; both stay till the copy."""
        source = own.blocks[own.shared_tail]
        own.blocks[own.shared_tail] = copy
        own.shared_tail = -1
        copy.ref_cnt += 1
        self.copies.append((source, copy))

    # -- registration ---------------------------------------------------------

    def register(
        self,
        own: GroupTable,
        request: TableRequest,
        hashes: list[int],
        num_tokens: int,
        junction: int,
    ) -> None:
        """Make blocks that the first `num_tokens` tokens fill findable, where kept.

        A block has a key once the tokens are known that its key covers.
        """
        first = own.num_seen
        # A prompt beyond the model's length, if it is let in, has no blocks there.
        num_blocks = min(num_tokens // self.block_size, len(own.blocks))
        stop = min(num_blocks, len(hashes) // self.num_hashes)
        if stop <= first:
            return
        own.num_seen = stop
        kept = self.kept(first, stop, self.boundaries(request, junction))
        if not kept:
            return
        blocks, keys, salt = own.blocks, self.keys(hashes), self.salt
        null_block = self.pool.null_block
        if isinstance(kept, range) and null_block not in blocks[first:stop]:
            fresh, fresh_keys = blocks[first:stop], keys[first:stop]
            if salt:
                fresh_keys = [key ^ salt for key in fresh_keys]
        else:
            held = [index for index in kept if blocks[index] is not null_block]
            fresh = [blocks[index] for index in held]
            fresh_keys = [keys[index] ^ salt for index in held]
        self.pool.cache_full_blocks(fresh, fresh_keys, first)

    # -- release --------------------------------------------------------------

    def free(self, own: GroupTable) -> None:
        """Give up a table, its last block first."""
        null_block = self.pool.null_block
        held = own.blocks[::-1]
        if null_block in held:
            held = [block for block in held if block is not null_block]
        self.num_null_blocks -= len(own.blocks) - len(held)
        self._release(held)

    def give_back(self, own: GroupTable) -> list[KVCacheBlock]:
        """Give up a table; return its blocks, in order, which the caller frees."""
        null_block = self.pool.null_block
        held = [block for block in own.blocks if block is not null_block]
        self.num_null_blocks -= len(own.blocks) - len(held)
        self.num_held_blocks -= len(held)
        # A pool in which nothing is found counts no references.
        self.num_used_blocks -= sum([block.ref_cnt < 2 for block in held])
        return held

    def _release(self, entries: list[KVCacheBlock]) -> None:
        """Free the former entries of a table."""
        pool = self.pool
        num_free = pool.num_free_blocks
        pool.free_blocks(entries)
        self.num_held_blocks -= len(entries)
        self.num_used_blocks -= pool.num_free_blocks - num_free

    def end_call(self) -> Copies:
        """Note that the scheduler's call is over; return its copies, held still."""
        if not self.copies:
            return []
        copies, self.copies = self.copies, []
        self._copied += [block for pair in copies for block in pair]
        return copies

    def note_copied(self, copies: Copies) -> None:
        """Note that copies were let go."""
        freed = [block for pair in copies for block in pair]
        self.num_used_blocks -= sum(block.ref_cnt == 0 for block in set(freed))
        for block in freed:
            self._copied.remove(block)

    # -- proof ----------------------------------------------------------------

    def check(self, tables: Sequence[tuple[TableRequest, GroupTable]]) -> Counter[int]:
        """Prove the group's invariants; return how many tables hold each block.

        Between calls of the scheduler, in O(n).

        Parameters
        ----------
        tables
            Of every request that holds one.

        Raises
        ------
        InvariantError
            With the rule and the request.
        """
        null_block, references = self.pool.null_block, Counter[int]()
        num_entries = 0
        for request, own in tables:
            who = f"request {request.request_id}"
            num_entries += len(own.blocks)
            held = [block for block in own.blocks if block is not null_block]
            references.update(block.block_id for block in held)
            require(
                all(block is null_block for block in own.blocks[: own.num_passed]),
                f"{who}: holds a block that lies behind what is read",
            )
            known = request.table.known.hashes
            self._check_keys(who, own, known)
        num_held_blocks = references.total()
        num_null_blocks = num_entries - num_held_blocks
        require(
            (num_held_blocks, num_null_blocks)
            == (self.num_held_blocks, self.num_null_blocks),
            f"tables: {num_held_blocks} entries and {num_null_blocks} null blocks, "
            f"{self.num_held_blocks} and {self.num_null_blocks} counted",
        )
        references.update(block.block_id for block in self._copied)
        require(
            len(references) == self.num_used_blocks,
            f"tables: {len(references)} blocks held, {self.num_used_blocks} counted",
        )
        return references

    def _check_keys(self, who: str, own: GroupTable, hashes: list[int]) -> None:
        """Prove that full blocks carry their own keys, if any."""
        keys = self.keys(hashes)
        for index, block in enumerate(own.blocks):
            key = block.block_hash
            if key is None or block is self.pool.null_block:
                continue
            is_full = index < len(keys) and key == keys[index] ^ self.salt
            require(
                is_full or self.fine_pool is not None,
                f"{who}: entry {index} does not carry the hash of its block",
            )
