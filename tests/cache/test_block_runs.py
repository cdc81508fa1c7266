"""Runs of blocks: literals, and equality with the block keys they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.hashing import BlockRuns, runs_of_pieces
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
