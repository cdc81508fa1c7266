"""Groups of layers with states: Mamba, Mamba2, gated delta net."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.v1.groups.base import Get, GroupManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.block import KVCacheBlock
    from cache.v1.block_pool import BlockPool
    from cache.v1.fine_pool import FineBlockPool
    from cache.v1.groups.base import GroupTerms
    from cache.v1.groups.table import Copies, GroupTable
    from cache.v1.specs import MambaSpec
    from cache.v1.tables import TableRequest


def prefill_end(request: TableRequest) -> int:
    """Return the token at which decoding begins, or begins again."""
    return max(request.num_prompt_tokens, request.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where a prefill can write a state inside a chunk, beside the one at its end.

    Parameters
    ----------
    spec
        Of the layers with states.
    hash_block_size, hit_alignment
        See `cache.v1.specs.KVCacheLayout`.
    """

    spec: MambaSpec
    hash_block_size: int
    hit_alignment: int

    def within(self, start: int, end: int, before: int) -> int:
        """Return the tokens of the state that a chunk can write, or 0.

        Parameters
        ----------
        start, end
            Of the chunk, in tokens.
        before
            The state is the last one that a hit can end at before this token.
        """
        alignment, block_size = self.spec.checkpoint_alignment, self.spec.block_size
        if not self.spec.num_checkpoint_blocks or alignment is None:
            return 0
        position = (before - 1) // self.hit_alignment * self.hit_alignment
        can_write = (
            start % self.hash_block_size == 0
            and -(-end // block_size) - 2 > (start - 1) // block_size
            and start + self.hash_block_size <= position < end
            and (position - start) % alignment == 0
        )
        return position if can_write else 0


class OneStateManager(GroupManager):
    """One state a request, in one block from its first token to its last.

    Each of its draft tokens has another one.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`MambaManager`, mode ``none``).
    """

    def __init__(self, spec: MambaSpec, pool: BlockPool, terms: GroupTerms) -> None:
        super().__init__(spec, pool, terms)
        self.num_speculative_blocks = spec.num_speculative_blocks

    def longest_hit(
        self, hashes: list[int], limit: int, get: Get, salt: int, *, drops: bool = False
    ) -> tuple[list[Any], int]:
        """Find nothing: a state that is overwritten is not cached."""
        del hashes, limit, get, salt
        return [], 0

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
        num_blocks = super().num_new_blocks_of_head(
            *(request, hits, num_hit_tokens, num_tokens, num_slots),
            is_whole=is_whole,
            num_external_tokens=num_external_tokens,
        )
        return num_blocks + self.num_speculative_blocks

    def num_new_blocks(
        self,
        own: GroupTable,
        request: TableRequest,
        num_computed_tokens: int,
        num_tokens: int,
        num_slots: int,
    ) -> int:
        num_slots += self.num_speculative_blocks * self.block_size
        return super().num_new_blocks(
            own, request, num_computed_tokens, num_tokens, num_slots
        )

    def lengthen(
        self,
        own: GroupTable,
        request: TableRequest,
        num_computed_tokens: int,
        num_tokens: int,
        num_slots: int,
    ) -> None:
        num_slots += self.num_speculative_blocks * self.block_size
        super().lengthen(own, request, num_computed_tokens, num_tokens, num_slots)

    def num_stored_tokens(self, num_tokens: int, block_size: int) -> int:
        del num_tokens
        return self.num_held_blocks * block_size

    def phases(self) -> set[int]:
        return set()


class MambaManager(OneStateManager):
    """States at the ends of blocks: entry ``i`` is that after ``(i + 1) * b`` tokens.

    A chunk reads the state that it begins with and writes the one it ends with; between
    the two are null blocks. Behind the latter are the states of draft tokens, which
    move on with it. A hit needs one state. It cannot be used in the call that
    has registered it: its content does not exist before the step has run.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/single_type_kv_cache_manager.py``
    (`MambaManager`, mode ``align``).
    """

    gives_up_blocks = True

    def __init__(self, spec: MambaSpec, pool: BlockPool, terms: GroupTerms) -> None:
        super().__init__(spec, pool, terms)
        self._checkpoints = Checkpoints(
            spec, terms.hash_block_size, terms.hit_alignment
        )
        self._writes_checkpoints = spec.num_checkpoint_blocks > 0
        self._fresh: set[int | None] = set()  # keys registered in this call
        interval = terms.retention_interval
        self._num_per_segment = 1 if interval is None else interval // spec.block_size

    def num_passed_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - 1

    def phases(self) -> set[int]:
        return {0} | self.giving_phases()

    def giving_phases(self) -> set[int]:
        return {1 % self.block_size}

    # -- blocks ---------------------------------------------------------------

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
        del is_whole, num_slots
        if hits and hits[-1].block_hash in self._fresh:
            return self.pool.num_gpu_blocks + 1  # it waits for the next call
        num_drafts = self.num_speculative_blocks
        start = num_hit_tokens + num_external_tokens
        return num_drafts + self._num_missing(
            -(-num_tokens // self.block_size) - len(hits),
            self._ends_inside(hits, num_hit_tokens),
            self._checkpoint(request, start, num_tokens),
        )

    def num_missing_blocks(
        self,
        own: GroupTable | None,
        request: TableRequest,
        num_tokens: int,
        num_computed_tokens: int,
        *,
        is_whole: bool,
    ) -> int:
        del is_whole
        if own is not None:
            return self.num_new_blocks(
                *(own, request, num_computed_tokens, num_tokens, num_tokens)
            )
        checkpoint = self._checkpoint(request, num_computed_tokens, num_tokens)
        num_entries = -(-num_tokens // self.block_size)
        num_missing = self._num_missing(num_entries, 0, checkpoint)
        return num_missing + self.num_speculative_blocks

    def _held_hits(
        self, hits: list[KVCacheBlock], num_hit_tokens: int
    ) -> list[KVCacheBlock]:
        """Return all: a load, which has no use for a state before its end, counts it.

        See `GroupManager._held_hits`.
        """
        del num_hit_tokens
        return hits

    def num_new_blocks(
        self,
        own: GroupTable,
        request: TableRequest,
        num_computed_tokens: int,
        num_tokens: int,
        num_slots: int,
    ) -> int:
        del num_slots
        num_held = len(own.blocks) - self.num_speculative_blocks
        return self._num_missing(
            max(-(-num_tokens // self.block_size) - num_held, 0),
            own.shared_tail >= 0,
            self._checkpoint(request, num_computed_tokens, num_tokens),
        )

    def _num_missing(self, num_entries: int, copies: int, checkpoint: int) -> int:
        """Return how many of the missing entries are states, and not null.

        Those of drafts are there since the first allocation.
        """
        return min(num_entries + copies, 1 + copies + (checkpoint > 0))

    def _checkpoint(self, request: TableRequest, start: int, end: int) -> int:
        """Return the tokens of the state that a chunk writes inside, or 0."""
        if not self._writes_checkpoints:
            return 0
        if self.retention_interval == 0 and end < prefill_end(request):
            return 0
        return self._checkpoints.within(start, end, end)

    def lengthen(
        self,
        own: GroupTable,
        request: TableRequest,
        num_computed_tokens: int,
        num_tokens: int,
        num_slots: int,
    ) -> None:
        del num_slots
        blocks, copies = own.blocks, own.shared_tail >= 0
        own.checkpoint = self._checkpoint(request, num_computed_tokens, num_tokens)
        num_entries = -(-num_tokens // self.block_size)
        num_before = num_entries - 1 - (own.checkpoint > 0)
        num_held, num_null = len(blocks), num_before - len(blocks)
        if num_null > 0:
            blocks += [self.pool.null_block] * num_null
            self.num_null_blocks += num_null
        if self.num_speculative_blocks:
            num_entries += self.num_speculative_blocks
            if own.is_begun:
                self._move_drafts(blocks, num_held, num_before)
        num_new_blocks = max(num_entries - len(blocks), 0)
        if num_new_blocks or copies:
            new_blocks = self._take(num_new_blocks + copies)
            if copies:
                self._copy_tail(own, new_blocks.pop(0))
            blocks += new_blocks
            self.num_held_blocks += num_new_blocks
        own.is_begun = True

    def _move_drafts(
        self, blocks: list[KVCacheBlock], num_held: int, num_before: int
    ) -> None:
        """Move states of drafts to the end that lie before the state of the request.

        They were the last of `num_held` entries; that state has `num_before` before it.
        """
        null_block = self.pool.null_block
        for index in range(num_held - self.num_speculative_blocks, num_held):
            if index >= num_before:
                break
            blocks.append(blocks[index])
            blocks[index] = null_block
            self.num_null_blocks += 1

    def _copy_tail(self, own: GroupTable, copy: KVCacheBlock) -> None:
        """See `GroupManager._copy_tail`; a request keeps the block that it writes to.

        There the copy is what the cache finds from now on.
        """
        if not own.is_begun:
            super()._copy_tail(own, copy)
            return
        assert self.fine_pool is not None
        source = own.blocks[own.shared_tail]
        own.shared_tail = -1
        self.fine_pool.move_keys(source, copy)
        source.ref_cnt += 1
        self.copies.append((source, copy))
        if copy.block_hash is not None:
            self._fresh.add(copy.block_hash)

    # -- hits -----------------------------------------------------------------

    def longest_hit(
        self, hashes: list[int], limit: int, get: Get, salt: int, *, drops: bool = False
    ) -> tuple[list[Any], int]:
        block_size, alignment = self.block_size, self.hit_alignment
        unit = alignment if alignment < block_size else block_size
        num_hashes = unit // self.hash_block_size
        for index in range(limit // unit - 1, -1, -1):
            num_tokens = (index + 1) * unit
            if num_tokens % alignment:
                continue
            blocks = get(hashes[(index + 1) * num_hashes - 1] ^ salt)
            if blocks is not None:
                return [None] * ((num_tokens - 1) // block_size) + [blocks], num_tokens
        return [], 0

    def kept(self, first: int, stop: int, boundaries: Sequence[int]) -> Sequence[int]:
        num_per_segment = self._num_per_segment
        if num_per_segment == 1:
            return range(first, stop)
        alignment = self.hit_alignment
        kept = {
            boundary // alignment * alignment // self.block_size - 1
            for boundary in boundaries
        }
        if num_per_segment:
            last = num_per_segment - 1
            kept |= {i for i in range(first, stop) if i % num_per_segment == last}
        return sorted(index for index in kept if first <= index < stop)

    def register(
        self,
        own: GroupTable,
        request: TableRequest,
        hashes: list[int],
        num_tokens: int,
        junction: int,
    ) -> None:
        first = own.num_seen
        super().register(own, request, hashes, num_tokens, junction)
        stop = own.num_seen
        if self.fine_pool is not None:
            if own.checkpoint:
                self._register_checkpoint(
                    self.fine_pool, own, request, hashes, junction
                )
            else:
                self._register_end(self.fine_pool, own, request, hashes, num_tokens)
        keys = {block.block_hash for block in own.blocks[first:stop]}
        self._fresh |= keys - {None}

    def _register_checkpoint(
        self,
        pool: FineBlockPool,
        own: GroupTable,
        request: TableRequest,
        hashes: list[int],
        junction: int,
    ) -> None:
        """Give the block before the last the key of the state that it will hold."""
        position, block_size = own.checkpoint, self.block_size
        index = len(own.blocks) - 2 - self.num_speculative_blocks
        block, alignment = own.blocks[index], self.hit_alignment
        last = (request.num_prompt_tokens - 1) // alignment * alignment
        end = position // block_size - 1
        is_kept = position in {last, junction} or (
            position % block_size == 0 and end in self.kept(end, end + 1, ())
        )
        if not is_kept:
            pool.drop_keys(block)
        elif pool.num_key_tokens(block, (index + 1) * block_size) != position:
            pool.drop_keys(block)
            self._cache_state(pool, own, index, hashes, position)

    def _register_end(
        self,
        pool: FineBlockPool,
        own: GroupTable,
        request: TableRequest,
        hashes: list[int],
        num_tokens: int,
    ) -> None:
        """Register the state at the last hash of the prompt, inside a block too.

        The request writes on in that block, so the cache gets a copy of it.
        """
        unit, block_size = self.hash_block_size, self.block_size
        if (
            not num_tokens
            or num_tokens != (request.num_prompt_tokens - 1) // unit * unit
        ):
            return
        index = -(-num_tokens // block_size) - 1
        block = own.blocks[index]
        if (
            block is pool.null_block
            or pool.num_key_tokens(block, (index + 1) * block_size) == num_tokens
        ):
            return
        self._cache_state(pool, own, index, hashes, num_tokens)
        if num_tokens % block_size:
            own.shared_tail = own.num_seen = index

    def _cache_state(
        self,
        pool: FineBlockPool,
        own: GroupTable,
        index: int,
        hashes: list[int],
        num_tokens: int,
    ) -> None:
        key = hashes[num_tokens // self.hash_block_size - 1] ^ self.salt
        pool.cache_partial_block(
            own.blocks[index], key, num_tokens, (index + 1) * self.block_size
        )
        self._fresh.add(key)

    def end_call(self) -> Copies:
        self._fresh.clear()
        return super().end_call()
