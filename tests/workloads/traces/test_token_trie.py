from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from workloads.traces.parsing.token_trie import TokenTrie

if TYPE_CHECKING:
    from workloads import Segment


def num_common_segment_tokens(
    one: tuple[Segment, ...], other: tuple[Segment, ...]
) -> int:
    """Return how many leading tokens two prompts share by their segments."""
    num = 0
    for (segment, tokens), (other_segment, other_tokens) in zip(
        one, other, strict=False
    ):
        if segment != other_segment:
            break
        num += min(tokens, other_tokens)
        if tokens != other_tokens:
            break
    return num


def num_common(one: list[int], other: list[int]) -> int:
    num = 0
    for token, other_token in zip(one, other, strict=False):
        if token != other_token:
            break
        num += 1
    return num


def test_literal() -> None:
    trie = TokenTrie()
    add = trie.add_prompt
    assert add(array("q", [1, 2, 3, 4])) == ((0, 4),)
    assert add(array("q", [1, 2, 9, 8])) == ((0, 2), (2, 2))
    assert add(array("q", [1, 2, 9, 7])) == ((0, 2), (2, 1), (4, 1))
    assert add(array("q", [1, 2, 3, 4, 5])) == ((0, 4), (6, 1))
    assert add(array("q", [1])) == ((0, 1),)
    assert add(array("q", [2])) == ((8, 1),)


def test_outputs_are_quoted_once_they_are_known() -> None:
    trie = TokenTrie()
    first = trie.add_prompt(array("q", [1, 2]))
    trie.add_output(first, 1, array("q", [7, 8, 9]))
    assert trie.add_prompt(array("q", [1, 2, 7, 8, 9, 4])) == ((0, 2), (1, 3), (2, 1))
    assert trie.add_prompt(array("q", [1, 2, 7, 5])) == ((0, 2), (1, 1), (4, 1))
    # Who said it first keeps it.
    trie.add_output(first, 3, array("q", [7, 8, 9]))
    assert trie.add_prompt(array("q", [1, 2, 7, 8])) == ((0, 2), (1, 2))
    # A prompt that ends within a text, and an output that goes on with it.
    inside = trie.add_prompt(array("q", [1]))
    trie.add_output(inside, 5, array("q", [2, 6]))
    assert trie.add_prompt(array("q", [1, 2, 6])) == ((0, 2), (6, 1))


few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)
# Longer than a stride of the comparison, and equal in all but a place.
long_texts = st.tuples(st.integers(1, 400), st.integers(0, 399)).map(
    lambda cut: [0 if i != cut[1] else 1 for i in range(cut[0])]
)


@given(st.lists(few_tokens | long_texts, min_size=1, max_size=12))
def test_equal_leading_tokens_are_equal_leading_segments(
    texts: list[list[int]],
) -> None:
    trie = TokenTrie()
    prompts = [trie.add_prompt(array("q", text)) for text in texts]
    for text, prompt in zip(texts, prompts, strict=True):
        assert sum(num for _, num in prompt) == len(text)
        for other, other_prompt in zip(texts, prompts, strict=True):
            common = num_common_segment_tokens(prompt, other_prompt)
            assert common == num_common(text, other)


@given(st.lists(st.tuples(few_tokens, few_tokens), min_size=1, max_size=8))
def test_outputs_never_confuse_prompts(
    calls: list[tuple[list[int], list[int]]],
) -> None:
    trie = TokenTrie()
    texts, prompts = [], []
    for i, (text, output) in enumerate(calls):
        prompt = trie.add_prompt(array("q", text))
        trie.add_output(prompt, 2 * i + 1, array("q", output))
        texts.append(text)
        prompts.append(prompt)
    for text, prompt in zip(texts, prompts, strict=True):
        for other, other_prompt in zip(texts, prompts, strict=True):
            common = num_common_segment_tokens(prompt, other_prompt)
            assert common == num_common(text, other)
