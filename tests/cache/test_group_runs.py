"""Runs of blocks beside windows do as tables that go block by block, call by call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cache.errors import NoFreeBlocksError
from cache.prompt_tree import PromptTree
from cache.tokens import SegmentTokens
from cache.v1.block_tables import BlockTables
from cache.v1.runs.group_tables import GroupRunTables
from tests.cache.run_twins import Calls
from tests.cache.test_group_machine import (
    LIMITS,
    MAX_MODEL_LEN,
    Stub,
    admit,
    chunked,
    full,
    go_on,
    layout,
    mamba,
    stub,
    window,
)

if TYPE_CHECKING:
    from cache.tokens import Segment
    from cache.v1.specs import KVCacheSpec

STRUCTURES = [
    [window(4, 9), full(4)],
    [full(4), window(4, 2)],
    [window(3, 8), full(3), window(3, 8)],
    [window(4, 5), window(4, 11), full(4)],
    [full(2), window(2, 9), window(2, 3), window(2, 9)],
    [full(1), window(1, 4)],
]

segments = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=3
)


class GroupRunMachine(RuleBasedStateMachine):
    """Two tables, the same calls; prompts quote what others were given or wrote."""

    @initialize(
        specs=st.sampled_from(STRUCTURES),
        interval=st.sampled_from([None, 0, 0, 0, 2]),
        num_blocks=st.integers(8, 90),
        observed=st.booleans(),
        in_tree=st.booleans(),
    )
    def build(
        self,
        specs: list[KVCacheSpec],
        interval: int | None,
        num_blocks: int,
        observed: bool,  # Hypothesis names it
        in_tree: bool,
    ) -> None:
        self.tree = PromptTree() if in_tree else None
        planned = layout(specs, num_blocks)
        assert GroupRunTables.serves(planned)
        interval = interval and interval * planned.block_size
        blocks = BlockTables(
            planned, LIMITS, enable_caching=True, retention_interval=interval
        )
        runs = GroupRunTables(planned, LIMITS, retention_interval=interval)
        self.tables = (blocks, runs)
        self.calls = (Calls(), Calls())
        if observed:
            for tables, calls in zip(self.tables, self.calls, strict=True):
                tables.observer = calls
        self.live: list[tuple[Stub, Stub]] = []
        self.waiting: list[tuple[Stub, Stub]] = []
        self.prompts: list[list[Segment]] = []

    @rule(prompt=segments, num_new_tokens=st.integers(1, 40))
    def arrive(self, prompt: list[Segment], num_new_tokens: int) -> None:
        self.ask(prompt, num_new_tokens)

    @precondition(lambda self: self.prompts)
    @rule(
        data=st.data(),
        answer=st.integers(0, 12),
        rest=st.integers(1, 9),
        num_new_tokens=st.integers(1, 40),
    )
    def come_back(
        self, data: st.DataObject, answer: int, rest: int, num_new_tokens: int
    ) -> None:
        index = data.draw(st.integers(0, len(self.prompts) - 1))
        written = [(1000 + index, answer)] if answer else []
        self.ask([*self.prompts[index], *written, (3, rest)], num_new_tokens)

    def ask(self, prompt: list[Segment], num_new_tokens: int) -> None:
        if sum(length for _, length in prompt) >= MAX_MODEL_LEN - 1:
            return
        number = len(self.prompts)
        self.prompts.append(prompt)
        pair = stub(number, *prompt), stub(number, *prompt, tree=self.tree)
        self.admit(pair, num_new_tokens)

    def admit(self, pair: tuple[Stub, Stub], num_new_tokens: int) -> None:
        blocks, runs = self.tables
        lacks = [t.lacks(r) for t, r in zip(self.tables, pair, strict=True)]
        found = [
            t.find(r, r.num_tokens) for t, r in zip(self.tables, pair, strict=True)
        ]
        assert found[0][:2] == found[1][:2]
        assert blocks.junction(pair[0]) == runs.junction(pair[1])
        took = [
            admit(t, r, num_new_tokens) for t, r in zip(self.tables, pair, strict=True)
        ]
        assert took[0] == took[1]
        assert lacks[0] == lacks[1]
        if took[0]:
            self.live.append(pair)
            return
        for tables, request in zip(self.tables, pair, strict=True):
            tables.refused(request, request.num_tokens)
        self.waiting.append(pair)

    @precondition(lambda self: self.waiting)
    @rule(num_new_tokens=st.integers(1, 40), withdraws=st.booleans())
    def ask_again(self, num_new_tokens: int, withdraws: bool) -> None:
        pair = self.waiting.pop(0)
        if withdraws:
            for tables, request in zip(self.tables, pair, strict=True):
                assert tables.free(request) == 0
        else:
            self.admit(pair, num_new_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new_tokens=st.sampled_from([1, 1, 1, 3, 30]))
    def grow(self, data: st.DataObject, num_new_tokens: int) -> None:
        pair = data.draw(st.sampled_from(self.live))
        if pair[0].num_computed_tokens < MAX_MODEL_LEN - 1:
            took = [
                go_on(t, r, num_new_tokens)
                for t, r in zip(self.tables, pair, strict=True)
            ]
            assert took[0] == took[1]
            if not took[0]:  # as if its last token had not come
                for request in pair:
                    request.num_tokens = max(
                        request.num_prompt_tokens, request.num_computed_tokens
                    )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), again=st.booleans())
    def leave(self, data: st.DataObject, again: bool) -> None:
        pair = data.draw(st.sampled_from(self.live))
        freed = [t.free(r) for t, r in zip(self.tables, pair, strict=True)]
        assert freed[0] == freed[1]
        self.live.remove(pair)
        if again:  # preempted, and asks at once
            for request in pair:
                request.num_computed_tokens = 0
            self.admit(pair, 40)

    @invariant()
    def both_are_equal(self) -> None:
        if not hasattr(self, "tables"):
            return
        blocks, runs = self.tables
        assert blocks.free_block_ids() == runs.free_block_ids()
        assert sorted(blocks.cached_block_ids()) == sorted(runs.cached_block_ids())
        for name in (
            "num_free_blocks",
            "num_logical_blocks",
            "num_evictions",
            "num_contents",
        ):
            assert getattr(blocks, name) == getattr(runs, name), name
        assert blocks.num_used_blocks_by_group() == runs.num_used_blocks_by_group()
        assert blocks.num_stored_tokens(999) == runs.num_stored_tokens(999)
        for one, other in self.live:
            assert blocks.group_block_ids(one) == runs.group_block_ids(other)
            assert blocks.block_ids(one) == runs.block_ids(other)
            for name in ("num_blocks", "num_shared_blocks", "num_registered_blocks"):
                assert getattr(blocks, name)(one) == getattr(runs, name)(other), name
        assert self.calls[0].told == self.calls[1].told
        for calls in self.calls:
            calls.told.clear()
        blocks.check([one for one, _ in self.live])
        runs.check([other for _, other in self.live])


GroupRunMachine.TestCase.settings = settings(stateful_step_count=40)
TestGroupRuns = GroupRunMachine.TestCase


@pytest.mark.parametrize(
    "specs",
    [
        [full(4)],
        [window(4, 9)],
        [window(2, 6), full(4)],
        [full(4), full(4), window(4, 9)],
        [full(4), window(4, 1)],
        [chunked(4, 16), full(4)],
        [mamba(8), full(8)],
    ],
)
def test_other_groups_go_block_by_block(specs: list[KVCacheSpec]) -> None:
    assert not GroupRunTables.serves(layout(specs, 30))


def test_what_does_not_fit_changes_nothing() -> None:
    tables = GroupRunTables(
        layout([window(4, 9), full(4)], 12), LIMITS, retention_interval=0
    )
    request = stub(0, (1, 30))
    found = tables.find(request, 30)
    with pytest.raises(NoFreeBlocksError, match="cannot take 16 blocks: 11 of 11"):
        tables.begin(request, 30, found)
    assert request.table is None
    tables.check([])


def test_a_prompt_of_token_ids_has_a_run_for_each_block() -> None:
    tables = GroupRunTables(
        layout([window(4, 9), full(4)], 40), LIMITS, retention_interval=0
    )
    first = stub(0, (1, 21))
    assert isinstance(first.tokens, SegmentTokens)
    assert admit(tables, first, 40)
    second = stub(1, (1, 21), (2, 3))
    found = tables.find(second, 24)
    assert found.num_blocks == 5
    assert admit(tables, second, 40)
    assert tables.group_block_ids(second)[0][:3] == [0, 0, 0]
    tables.check([first, second])
