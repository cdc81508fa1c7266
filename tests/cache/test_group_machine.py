"""Tables of several KV cache groups: random structures against their promises.

Blocks are conserved over groups, those that are read are held and others null, and a
hit is the longest prefix for which every group has the blocks: tried one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cache.errors import CacheConfigError
from cache.tokens import SegmentTokens
from cache.v1.block_tables import BlockTables
from cache.v1.groups.kinds import EngineLimits
from cache.v1.policies import CACHE_POLICIES
from cache.v1.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheLayout,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from cache.prompt_tree import PromptTree
    from cache.tokens import Segment, TokenIds
    from cache.v1.tables import Found

MAX_MODEL_LEN = 96
ATTENTION: dict[str, Any] = {
    "page_size_bytes": 1,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": "bfloat16",
}


def full(block_size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **ATTENTION)


def window(block_size: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **ATTENTION)


def chunked(block_size: int, tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=tokens, **ATTENTION
    )


def mamba(block_size: int, *, checkpoints: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size=block_size,
        page_size_bytes=1,
        shapes=((1,),),
        dtypes=("bfloat16",),
        mamba_cache_mode=MambaCacheMode.ALIGN,
        num_checkpoint_blocks=checkpoints,
        checkpoint_alignment=1 if checkpoints else None,
    )


def layout(
    specs: list[KVCacheSpec], num_blocks: int, unit: int | None = None
) -> KVCacheLayout:
    """Groups of one layer each; `unit` as `prefix_match_unit`."""
    sizes = [spec.block_size for spec in specs]
    whole = lcm(*sizes)
    unit = unit or gcd(*sizes)
    is_fine = any(
        isinstance(spec, MambaSpec) and spec.block_size > unit for spec in specs
    ) and all(
        isinstance(spec, MambaSpec | FullAttentionSpec) or spec.block_size == unit
        for spec in specs
    )
    groups = tuple(KVCacheGroup((f"layer {i}",), s, 1) for i, s in enumerate(specs))
    alignment = unit if is_fine else whole
    return KVCacheLayout(groups, num_blocks, 1, unit, whole, alignment)


LIMITS = EngineLimits(MAX_MODEL_LEN, 40, 40)


@dataclass(eq=False)
class Stub:
    """The least that is a `TableRequest`."""

    request_id: int
    num_prompt_tokens: int
    num_tokens: int
    tokens: TokenIds
    num_computed_tokens: int = 0
    parent_id: int = 0
    table: Any = None


def stub(request_id: int, *prompt: Segment, tree: PromptTree | None = None) -> Stub:
    num_tokens = sum(length for _, length in prompt)
    tokens = SegmentTokens(prompt, 1000 + request_id, tree)
    return Stub(request_id, num_tokens, num_tokens, tokens)


def admit(tables: BlockTables, request: Stub, num_new_tokens: int) -> bool:
    """Look up, cut and begin, as the scheduler does with its queue's head."""
    found = tables.find(request, request.num_tokens)
    num_hits = found.num_blocks * tables.hit_alignment
    num_new_tokens = min(num_new_tokens, request.num_tokens - num_hits)
    if tables.chunk_ends is not None:
        num_new_tokens = tables.cut_chunk(request, num_hits, num_new_tokens)
    num_tokens = num_hits + num_new_tokens
    needed = tables.num_needed_blocks(request, num_tokens, found, is_whole=False)
    if not num_new_tokens or needed > tables.num_free_blocks:
        return False
    num_free = tables.num_free_blocks
    tables.begin(request, num_tokens, found)
    assert num_free - tables.num_free_blocks == needed
    request.num_computed_tokens = num_tokens
    return True


def go_on(tables: BlockTables, request: Stub, num_new_tokens: int) -> bool:
    """Extend the table of a request, which samples a token at its end."""
    start = request.num_computed_tokens
    if start == request.num_tokens:
        request.num_tokens += 1
    num_new_tokens = min(num_new_tokens, request.num_tokens - start)
    if tables.chunk_ends is not None:
        num_new_tokens = tables.cut_chunk(request, start, num_new_tokens)
    end = start + num_new_tokens
    if not num_new_tokens or not tables.extend(request, end, start):
        return False
    request.num_computed_tokens = end
    return True


def needed_entries(spec: KVCacheSpec, num_tokens: int) -> range:
    """Which blocks a hit of so many tokens needs; of states, the one it ends in."""
    first, stop = 0, -(-num_tokens // spec.block_size)
    if isinstance(spec, SlidingWindowSpec):
        first = max(num_tokens - spec.sliding_window + 1, 0) // spec.block_size
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = spec.attention_chunk_size
        first = num_tokens // chunk * chunk // spec.block_size
    elif isinstance(spec, MambaSpec):
        first = max(stop - 1, 0)
    return range(first, stop)


class Prefixes:
    """Cached prefixes of a request, asked block by block."""

    def __init__(self, tables: BlockTables, request: Stub) -> None:
        self.tables = tables
        self.unit = tables.layout.hash_block_size
        self.hashes: list[int] = []
        num_hashes = (request.num_tokens - 1) // self.unit
        request.tokens.extend_block_hashes(self.hashes, num_hashes, self.unit)

    def block(self, number: int, num_tokens: int) -> Any:
        """The block of a group under the hash after so many tokens."""
        salt = self.tables.managers[number].salt
        key = self.hashes[num_tokens // self.unit - 1] ^ salt
        return self.tables.pool.get_cached_block(key)

    def has(self, number: int, num_tokens: int) -> bool:
        """Whether a group has the blocks that a hit of so many tokens needs."""
        spec = self.tables.layout.groups[number].spec
        ends = [
            (index + 1) * spec.block_size
            for index in needed_entries(spec, num_tokens)
            if (index + 1) * spec.block_size <= num_tokens
        ]
        inside = num_tokens % spec.block_size > 0
        if isinstance(spec, FullAttentionSpec):
            # A block that is found further on holds the tokens before that as well.
            whole = all(self.block(number, end) for end in ends)
            return whole and (not inside or self.reaches(number, num_tokens))
        return all(self.block(number, end) for end in (*ends, *[num_tokens] * inside))

    def reaches(self, number: int, num_tokens: int) -> bool:
        """Whether a group has the rest of the block that a hit ends in."""
        block_size = self.tables.layout.groups[number].spec.block_size
        stop = min(
            -(-num_tokens // block_size) * block_size, len(self.hashes) * self.unit
        )
        return any(
            self.block(number, end) for end in range(num_tokens, stop + 1, self.unit)
        )

    def longest(self) -> int:
        """The longest prefix of which every group has the blocks that a hit needs."""
        alignment = self.tables.hit_alignment
        most = len(self.hashes) * self.unit // alignment * alignment
        numbers = range(len(self.tables.layout.groups))
        for num_tokens in range(most, 0, -alignment):
            if all(self.has(number, num_tokens) for number in numbers):
                return num_tokens
        return 0


STRUCTURES: list[tuple[list[KVCacheSpec], int | None]] = [
    ([full(4)], None),
    ([window(4, 9)], None),
    ([window(4, 9), full(4)], None),
    ([window(2, 6), full(4)], None),
    ([full(2), window(4, 6), window(4, 6)], None),
    ([window(4, 5), window(4, 11), full(4)], None),
    ([window(4, 5), window(4, 11)], None),
    ([chunked(4, 16), chunked(4, 16), full(4)], None),
    ([chunked(4, 8), full(4)], None),
    ([mamba(8), mamba(8), full(8)], None),
    ([mamba(8), full(8)], 2),
    ([mamba(8), full(8), window(2, 5)], 2),
    ([mamba(6, checkpoints=1), full(6)], None),
    ([mamba(8, checkpoints=1), mamba(8, checkpoints=1), full(8)], 4),
    ([mamba(4, checkpoints=1), full(8)], None),
]


class GroupMachine(RuleBasedStateMachine):
    """Random requests in a pool that is full most of the time."""

    @initialize(
        structure=st.sampled_from(STRUCTURES),
        interval=st.sampled_from([None, 0, 0, 2]),
        num_blocks=st.integers(12, 60),
        enable_caching=st.sampled_from([True, True, True, False]),
    )
    def build(
        self,
        structure: tuple[list[KVCacheSpec], int | None],
        interval: int | None,
        num_blocks: int,
        enable_caching: bool,  # Hypothesis names it
    ) -> None:
        specs, unit = structure
        if not enable_caching:
            specs = [s for s in specs if not isinstance(s, MambaSpec)]
            unit = None
        planned = layout(specs, num_blocks, unit)
        self.tables = BlockTables(
            planned,
            LIMITS,
            enable_caching=enable_caching,
            retention_interval=interval and interval * planned.scheduler_block_size,
        )
        self.live: list[Stub] = []
        self.next_id = 0
        self.is_new_call = False

    @rule(
        prompt=st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=3
        ),
        num_new_tokens=st.integers(1, 40),
    )
    def arrive(self, prompt: list[Segment], num_new_tokens: int) -> None:
        request = stub(self.next_id, *prompt)
        self.next_id += 1
        found = self.tables.find(request, request.num_tokens)
        self.prove_hit(request, found)
        if admit(self.tables, request, num_new_tokens):
            self.live.append(request)
        else:
            self.tables.free(request)
        self.tables.end_call()

    def prove_hit(self, request: Stub, found: Found) -> None:
        if not self.tables.enable_caching:
            assert found.num_blocks == 0
            return
        num_tokens = found.num_blocks * self.tables.hit_alignment
        prefixes = Prefixes(self.tables, request)
        assert num_tokens == prefixes.longest()
        assert (junction := self.tables.junction(request)) == 0 or junction > num_tokens
        null_block = self.tables.pool.null_block
        for number, blocks in enumerate(found.parts):
            spec = self.tables.layout.groups[number].spec
            assert len(blocks) == -(-num_tokens // spec.block_size)
            for index in needed_entries(spec, num_tokens):
                assert blocks[index] is not null_block

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new_tokens=st.integers(1, 40))
    def grow(self, data: st.DataObject, num_new_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if request.num_computed_tokens < MAX_MODEL_LEN - 1:
            go_on(self.tables, request, num_new_tokens)
        self.tables.end_call()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), again=st.booleans())
    def leave(self, data: st.DataObject, again: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        num_free = self.tables.num_free_blocks
        num_freed = self.tables.free(request)
        assert self.tables.num_free_blocks == num_free + num_freed
        self.live.remove(request)
        if again:  # preempted, and admitted at once
            request.num_computed_tokens = 0
            if admit(self.tables, request, 40):
                self.live.append(request)
            else:
                self.tables.free(request)
            self.tables.end_call()

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "tables"):
            return
        self.tables.check(self.live)
        used = sum(manager.num_used_blocks for manager in self.tables.managers)
        assert used + self.tables.num_free_blocks == self.tables.num_usable_blocks

    @invariant()
    def what_is_read_is_held(self) -> None:
        for request in getattr(self, "live", ()):
            ids = self.tables.group_block_ids(request)
            for group, table in zip(self.tables.layout.groups, ids, strict=True):
                num_tokens = request.num_computed_tokens
                assert len(table) == -(-num_tokens // group.spec.block_size)
                assert all(table[i] for i in needed_entries(group.spec, num_tokens))
                if isinstance(group.spec, FullAttentionSpec):
                    assert 0 not in table


GroupMachine.TestCase.settings = settings(stateful_step_count=30)
TestGroups = GroupMachine.TestCase


calls = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)


@given(
    spec=st.sampled_from([full(4), window(4, 9), chunked(4, 16), mamba(4)]),
    num_groups=st.integers(2, 4),
    calls=calls,
    caching=st.booleans(),
)
def test_equal_groups_do_as_one(
    spec: KVCacheSpec,
    num_groups: int,
    calls: list[tuple[int, int, int]],
    caching: bool,  # Hypothesis names it
) -> None:
    """As long as nothing is evicted: groups take blocks from each other."""
    caching |= isinstance(spec, MambaSpec)
    num_blocks = 400 if caching else 30
    one, several = (
        BlockTables(
            layout([spec] * n, n * num_blocks + 1),
            LIMITS,
            enable_caching=caching,
            retention_interval=None,
        )
        for n in (1, num_groups)
    )
    live: list[tuple[Stub, Stub]] = []
    for kind, size, segment in calls:
        if kind == 0 or not live:
            twins = tuple(stub(len(live), (segment, size), (7, 3)) for _ in range(2))
            took = [admit(t, r, 16) for t, r in zip((one, several), twins, strict=True)]
            if took[0]:
                live.append(twins)  # type: ignore[arg-type]
        elif kind < 3:
            twins = live[size % len(live)]
            if twins[0].num_computed_tokens > MAX_MODEL_LEN - 20:
                continue
            took = [go_on(t, r, 16) for t, r in zip((one, several), twins, strict=True)]
        else:
            twins = live.pop(size % len(live))
            freed = [t.free(r) for t, r in zip((one, several), twins, strict=True)]
            took = [freed[0] * num_groups == freed[1]] * 2
        assert took[0] == took[1]
        for tables in (one, several):
            tables.end_call()
        assert several.num_free_blocks == num_groups * one.num_free_blocks
        assert several.num_contents == num_groups * one.num_contents
        for single, multiple in live:
            assert single.num_computed_tokens == multiple.num_computed_tokens
            (shape,) = one.group_block_ids(single)
            for ids in several.group_block_ids(multiple):
                assert [bool(i) for i in ids] == [bool(i) for i in shape]


def test_a_second_prompt_finds_the_junction_and_the_third_hits_it() -> None:
    """The rule of interval 0: windows are kept at the ends of prompts only."""
    tables = BlockTables(
        layout([window(4, 9), full(4)], 100), LIMITS, enable_caching=True
    )
    hits = []
    for number in range(3):
        request = stub(number, (1, 24), (10 + number, 9))
        found = tables.find(request, request.num_tokens)
        hits.append((found.num_blocks * 4, tables.junction(request)))
        tables.begin(request, request.num_tokens, found)
        tables.free(request)
    assert hits == [(0, 0), (0, 24), (24, 0)]


def test_a_hit_that_a_window_of_one_token_passes_over_costs_nothing() -> None:
    """The block is not touched, so it stays in the free queue."""
    tables = BlockTables(layout([window(4, 1)], 20), LIMITS, enable_caching=True)
    first, second = stub(0, (1, 9)), stub(1, (1, 9))
    assert admit(tables, first, 40)
    tables.free(first)
    found = tables.find(second, second.num_tokens)
    assert found.num_blocks == 2
    assert tables.num_needed_blocks(second, 9, found, is_whole=False) == 1
    assert admit(tables, second, 40)


def test_a_state_cannot_be_hit_in_the_call_that_registers_it() -> None:
    tables = BlockTables(layout([mamba(8), full(8)], 50), LIMITS, enable_caching=True)
    first, second = stub(0, (1, 16), (2, 1)), stub(1, (1, 16), (3, 1))
    assert admit(tables, first, 40)
    assert first.num_computed_tokens == 16  # its state is kept at a block's end
    found = tables.find(second, second.num_tokens)
    assert found.num_blocks == 2
    needed = tables.num_needed_blocks(second, 17, found, is_whole=False)
    assert needed > tables.num_usable_blocks
    tables.end_call()
    assert tables.num_needed_blocks(second, 17, found, is_whole=False) == 2


def test_a_hit_inside_a_block_is_copied() -> None:
    tables = BlockTables(
        layout([mamba(8), full(8)], 50, unit=2), LIMITS, enable_caching=True
    )
    first = stub(0, (1, 13))
    assert admit(tables, first, 40)
    assert first.num_computed_tokens == 8
    assert go_on(tables, first, 40)
    assert first.num_computed_tokens == 12  # the last hash of the prompt
    assert tables.end_call() == []
    assert go_on(tables, first, 1)
    ((source, _),) = tables.end_call()  # what it writes to is no longer the cache's
    assert source == tables.group_block_ids(first)[0][1]
    second = stub(1, (1, 13), (2, 5))
    assert tables.find(second, second.num_tokens).num_blocks * 2 == 12
    assert admit(tables, second, 40)
    copies = tables.end_call()
    assert [target for _, target in copies] == [
        ids[1] for ids in tables.group_block_ids(second)
    ]
    tables.check([first, second])


def test_a_state_written_inside_a_chunk_is_found_where_hits_end() -> None:
    """Of blocks shorter than the others': the state is not that of its block's end."""
    tables = BlockTables(
        layout([mamba(4, checkpoints=1), full(8)], 50), LIMITS, enable_caching=True
    )
    first, second = stub(0, (1, 13)), stub(1, (1, 13), (2, 5))
    assert admit(tables, first, 40)
    assert first.num_computed_tokens == 13
    assert tables.group_block_ids(first)[0] == [0, 0, 1, 2]  # after 8 tokens, and 13
    assert tables.num_contents == 2
    tables.end_call()
    assert tables.find(second, second.num_tokens).num_blocks * 8 == 8
    assert admit(tables, second, 40)
    assert tables.group_block_ids(second)[0][:2] == [0, 1]
    tables.check([first, second])


@pytest.mark.parametrize("interval", [-4, 6])
def test_an_interval_at_which_no_block_ends_is_refused(interval: int) -> None:
    with pytest.raises(CacheConfigError, match="must be 0 or a multiple of 4"):
        BlockTables(
            layout([window(4, 9), full(4)], 100),
            LIMITS,
            enable_caching=True,
            retention_interval=interval,
        )


def test_chunks_beside_longer_blocks_have_no_prefixes() -> None:
    """0.33 ends with an assertion at the first lookup; without caching it serves."""
    unlike = layout([chunked(4, 12), full(8)], 100)
    with pytest.raises(CacheConfigError, match="in blocks of 8 tokens, where hits end"):
        BlockTables(unlike, LIMITS, enable_caching=True)
    BlockTables(unlike, LIMITS, enable_caching=False)


def test_policies_of_several_groups_are_refused() -> None:
    with pytest.raises(CacheConfigError, match="one KV cache group, the model has 2"):
        BlockTables(
            layout([window(4, 9), full(4)], 100),
            LIMITS,
            enable_caching=True,
            policy=CACHE_POLICIES["lru"](),
        )
