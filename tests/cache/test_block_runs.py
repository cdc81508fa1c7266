"""Runs of blocks: literals, and equality with the block keys they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.hashing import BlockRuns, runs_of_pieces
from cache.prompt_tree import PromptTree, runs_of_stretches
from cache.tokens import (
    OPEN_END,
    HashedRuns,
    ListTokens,
    RunTokens,
    Segment,
    SegmentTokens,
    TokenRuns,
)

prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 20)), min_size=1, max_size=4
)


def identities(runs: BlockRuns, num_blocks: int) -> list[tuple[int, int]]:
    """The (run key, index) of each of the leading blocks."""
    found: list[tuple[int, int]] = []
    start = 0
    for key, end in zip(runs.keys, runs.ends, strict=True):
        stop = min(end, num_blocks)
        found += [(key, index - start) for index in range(start, stop)]
        start = end
    return found


def test_runs_end_with_segments_and_with_blocks_that_span_them() -> None:
    pieces = [(14, 0, 40), (80, 0, 60)]
    assert runs_of_pieces(pieces, 16).ends == [2, 3, 6]


def test_a_generated_answer_is_a_run_without_end() -> None:
    runs = SegmentTokens([(2, 32)], 3).block_runs(16)
    assert runs.ends == [2, 2 + OPEN_END // 16]


def test_a_block_may_span_many_segments() -> None:
    runs = runs_of_pieces([(1, 0, 3), (2, 0, 0), (3, 0, 4), (5, 7, 9)], 8)
    assert runs.ends == [1, 2]


def test_tokens_that_fill_no_block_have_no_runs() -> None:
    runs = runs_of_pieces([(1, 0, 3), (2, 0, 4)], 8)
    assert (runs.keys, runs.ends) == ([], [])
    with pytest.raises(CacheError, match="these tokens fill 0 blocks, not 1"):
        runs.cover(1)


def test_a_stream_cut_earlier_begins_the_same_run() -> None:
    short = SegmentTokens([(7, 300)], 9).block_runs(16)
    long = SegmentTokens([(7, 512)], 9).block_runs(16)
    assert short.keys[0] == long.keys[0]
    assert (short.ends[0], long.ends[0]) == (18, 32)
    assert short.keys[1] != long.keys[1]


def test_what_follows_depends_on_how_much_came_before() -> None:
    one = SegmentTokens([(7, 16), (8, 32)], 9).block_runs(16)
    two = SegmentTokens([(7, 32), (8, 32)], 9).block_runs(16)
    assert one.keys[0] == two.keys[0]
    assert one.keys[1] != two.keys[1]


def test_other_tokens_have_runs_of_one_block() -> None:
    tokens = [1, 2, 3, 4]
    runs = HashedRuns(ListTokens(tokens), 2)
    runs.cover(1)
    assert runs.ends == [1]
    tokens += [5, 6]
    runs.cover(3)
    runs.cover(2)
    assert runs.ends == [1, 2, 3]
    hashes: list[int] = []
    ListTokens(tokens).extend_block_hashes(hashes, 3, 2)
    assert runs.keys == hashes


@given(prompts, prompts, st.integers(1, 9))
def test_equal_runs_are_equal_block_keys(
    one: list[Segment], two: list[Segment], block_size: int
) -> None:
    keys, runs = [], []
    for prompt in (one, two):
        tokens = SegmentTokens(prompt, 0)
        num_blocks = sum(length for _, length in prompt) // block_size + 3
        hashes: list[int] = []
        tokens.extend_block_hashes(hashes, num_blocks, block_size)
        keys.append(hashes)
        runs.append(identities(tokens.block_runs(block_size), num_blocks))
        assert len(runs[-1]) == num_blocks
    for mine, others, run, other in zip(*keys, *runs, strict=False):
        assert (mine == others) == (run == other)


@given(prompts, st.integers(1, 9))
def test_pieces_of_equal_tokens_have_equal_runs(
    prompt: list[Segment], block_size: int
) -> None:
    # The runs of `TokenRuns` are merged where a segment goes on; one that begins anew
    # is not the same stream going on.
    whole = TokenRuns.from_segments(prompt)
    num_blocks = len(whole) // block_size
    joined = whole[:5] + whole[5:]
    expected = identities(SegmentTokens(prompt, 9).block_runs(block_size), num_blocks)
    assert identities(RunTokens(joined).block_runs(block_size), num_blocks) == expected


A_BLOCK = 16
ANSWER = (1, OPEN_END)


def ends_of(tree: PromptTree, *segments: Segment) -> list[int]:
    """Where runs of a text are left, in tokens, but for the last one's."""
    return [left for _, left in tree.stretches(segments)[:-1]]


def test_a_run_of_a_tree_ends_where_a_prompt_leaves_it() -> None:
    tree = PromptTree()
    assert ends_of(tree, (14, 40), (16, 40), (80, 20), ANSWER) == []
    assert ends_of(tree, (14, 40), (16, 40), (30, 9), (32, 50), (3, OPEN_END)) == [80]
    quoting = (14, 40), (16, 40), (30, 9), (32, 50), (3, 12), (34, 7), (5, OPEN_END)
    assert ends_of(tree, *quoting) == [80, 80 + 9 + 50 + 12]
    assert ends_of(tree, *quoting) == [80, 80 + 9 + 50 + 12]
    assert len(tree) == 3


def test_a_text_that_goes_on_within_a_segment_leaves_there() -> None:
    tree = PromptTree()
    assert ends_of(tree, (14, 40), (16, 5), ANSWER) == []
    assert ends_of(tree, (14, 44), (16, 5), ANSWER) == [40]
    assert ends_of(tree, (14, 30), (16, 5), ANSWER) == [30]
    assert ends_of(tree, (14, 47), (18, 5), ANSWER) == [40, 44]
    assert ends_of(tree, (14, 45), (18, 5), ANSWER) == [40, 44, 45]


def test_a_block_is_of_the_run_that_ends_it() -> None:
    runs = runs_of_stretches([(7, 20), (8, 31), (9, 47), (10, OPEN_END)], A_BLOCK)
    assert runs.keys == [7, 9, 10]
    assert runs.ends == [1, 2, OPEN_END // A_BLOCK]


@given(
    st.lists(st.tuples(prompts, st.integers(0, 2)), min_size=2, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=2),
)
def test_equal_runs_of_a_tree_are_equal_block_keys(
    texts: list[tuple[list[Segment], int]], block_sizes: list[int]
) -> None:
    tree = PromptTree()
    every = [SegmentTokens(prompt, written, tree) for prompt, written in texts]
    for block_size in block_sizes:
        keys, runs = [], []
        for tokens in every:
            num_tokens = sum(length for _, length in tokens.segments[:-1])
            num_blocks = num_tokens // block_size + 3
            hashes: list[int] = []
            tokens.extend_block_hashes(hashes, num_blocks, block_size)
            keys += hashes
            runs += identities(tokens.block_runs(block_size), num_blocks)
        pairs = set(zip(keys, runs, strict=True))
        assert len(pairs) == len(set(keys)) == len(set(runs))
