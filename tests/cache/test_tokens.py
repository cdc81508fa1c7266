"""Symbolic token identity: equal keys if and only if equal token prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.tokens import (
    ListTokens,
    RunTokens,
    Segment,
    SegmentTokens,
    TokenIds,
    TokenRuns,
)

segments = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=5
).map(tuple)


def keys(
    prompt: tuple[Segment, ...],
    num_blocks: int,
    block_size: int,
    output: int = 99,
    lookahead: int = 0,
) -> list[int]:
    hashes: list[int] = []
    SegmentTokens(prompt, output).extend_block_hashes(
        hashes, num_blocks, block_size, lookahead
    )
    return hashes


def keys_of(
    tokens: TokenIds, num_blocks: int, block_size: int, lookahead: int
) -> list[int]:
    hashes: list[int] = []
    tokens.extend_block_hashes(hashes, num_blocks, block_size, lookahead)
    return hashes


def spelled(prompt: tuple[Segment, ...], length: int) -> list[tuple[int, int]]:
    """Token i of segment s as (s, i): what the segments stand for."""
    tokens = [(s, i) for s, n in prompt for i in range(n)]
    return (tokens + [(99, i) for i in range(length)])[:length]


@given(segments, segments, st.integers(1, 17), st.integers(0, 9), st.integers(0, 2))
def test_keys_are_equal_exactly_where_prefixes_are(
    a: tuple[Segment, ...],
    b: tuple[Segment, ...],
    block_size: int,
    num_blocks: int,
    lookahead: int,
) -> None:
    keys_a = keys(a, num_blocks, block_size, lookahead=lookahead)
    keys_b = keys(b, num_blocks, block_size, lookahead=lookahead)
    for n in range(num_blocks):
        length = (n + 1) * block_size + lookahead
        equal = spelled(a, length) == spelled(b, length)
        assert (keys_a[n] == keys_b[n]) == equal


@given(
    segments,
    st.integers(1, 17),
    st.lists(st.integers(0, 4), max_size=6),
    st.integers(0, 1),
)
def test_growing_in_steps_gives_the_keys_of_one_go(
    prompt: tuple[Segment, ...], block_size: int, growth: list[int], lookahead: int
) -> None:
    tokens = SegmentTokens(prompt, 99)
    hashes: list[int] = []
    num_blocks = 0
    for more in growth:
        num_blocks += more
        tokens.extend_block_hashes(hashes, num_blocks, block_size, lookahead)
        tokens.extend_block_hashes(hashes, num_blocks - 1, block_size, lookahead)
    assert hashes == keys(prompt, num_blocks, block_size, lookahead=lookahead)


def test_a_trace_block_of_512_tokens_is_the_same_at_any_block_size() -> None:
    shared = ((4, 512), (6, 512))
    for block_size in (16, 32, 128, 512):
        num_blocks = 1024 // block_size
        first = keys((*shared, (8, 512)), num_blocks + 1, block_size)
        second = keys((*shared, (10, 512)), num_blocks + 1, block_size)
        assert first[:num_blocks] == second[:num_blocks]
        assert first[num_blocks] != second[num_blocks]


def test_a_follow_up_finds_the_answer_that_it_quotes() -> None:
    first = keys(((2, 20),), 3, 16, output=5)  # 20 prompt tokens, 28 generated
    follow_up = keys(((2, 20), (5, 28), (8, 30)), 3, 16)
    assert follow_up == first


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4))
def test_plain_lists_work_too(tokens: list[int], block_size: int) -> None:
    num_blocks = len(tokens) // block_size
    hashes: list[int] = []
    ListTokens(tokens).extend_block_hashes(hashes, num_blocks, block_size)
    runs = TokenRuns([(token, index, 1) for index, token in enumerate(tokens)])
    for lookahead in (0, 1):
        ahead = [
            keys_of(tokens, num_blocks, block_size, lookahead)
            for tokens in (ListTokens(tokens), RunTokens(runs))
        ]
        assert len(set(ahead[0])) == len(set(ahead[1])) == num_blocks
    changed = [*tokens[:-1], 7] if tokens else []
    others: list[int] = []
    ListTokens(changed).extend_block_hashes(others, num_blocks, block_size)
    for n in range(num_blocks):
        end = (n + 1) * block_size
        assert (hashes[n] == others[n]) == (tokens[:end] == changed[:end])
