"""Prefix structure of independent requests, against its law."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workloads.arrivals import ARRIVALS
from workloads.draws.by_position import Draws
from workloads.draws.counts import COUNTS
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError
from workloads.lengths import LENGTHS
from workloads.prefixes import (
    PREFIXES,
    Documents,
    NoPrefixes,
    PrefixedWorkload,
    SystemPrompts,
    drawn_prefixes,
    zipf_shares,
)
from workloads.requests.columns import RequestColumns
from workloads.workload import SyntheticWorkload

TOKENS = LENGTHS["uniform"](low=10, high=500)


def source(num_requests: int = 50) -> SyntheticWorkload:
    return SyntheticWorkload(
        arrivals=ARRIVALS["poisson"](rate=1.0),
        prompt_tokens=LENGTHS["uniform"](low=1, high=50),
        output_tokens=LENGTHS["uniform"](low=1, high=50),
        num_requests=num_requests,
        seed=3,
    )


def documents(**changes: Any) -> Documents:
    arguments: dict[str, Any] = {
        "num_documents": 6,
        "tokens": TOKENS,
        "per_prompt": COUNTS["fixed"](number=2),
    }
    return Documents(**(arguments | changes))


def test_zipf_shares_are_those_of_the_law() -> None:
    assert zipf_shares(4, 0.0).tolist() == [0.25] * 4
    assert zipf_shares(3, 1.0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.5])
def test_groups_are_as_popular_as_zipf_says(zipf: float) -> None:
    prompts = SystemPrompts(8, TOKENS, zipf=zipf)
    found = Counter(p[0][0] // 2 for p in prompts.prefixes(20_000, Streams(1)))
    numbers = [found[group] for group in range(8)]
    expected = zipf_shares(8, zipf) * 20_000
    assert stats.chisquare(numbers, expected).pvalue > 0.01
    # The test must be able to fail: a slightly other exponent does.
    assert stats.chisquare(numbers, zipf_shares(8, zipf + 0.1) * 20_000).pvalue < 1e-6


def test_equal_groups_begin_alike_and_others_do_not() -> None:
    requests = PrefixedWorkload(source(300), SystemPrompts(3, TOKENS)).requests()
    heads = {request.prompt[0] for request in requests}
    assert len(heads) == len({segment for segment, _ in heads}) == 3
    tails = [request.prompt[1] for request in requests]
    assert {segment for segment, _ in tails}.isdisjoint({s for s, _ in heads})
    assert len({segment for segment, _ in tails}) == 300
    outputs = [request.output_segment for request in requests]
    assert all(segment % 2 for segment in outputs)
    for before, after in zip(source(300).requests(), requests, strict=True):
        # What is shared comes on top of the request's own length.
        assert after.prompt[1][1] == before.num_prompt_tokens
        assert after.num_prompt_tokens == before.num_prompt_tokens + after.prompt[0][1]
        assert after[3:] == before[3:]


def test_a_share_of_requests_has_no_system_prompt() -> None:
    prompts = SystemPrompts(3, TOKENS, share=0.7).prefixes(5_000, Streams(2))
    number = sum(1 for prefix in prompts if prefix)
    assert stats.binomtest(number, 5_000, 0.7).pvalue > 0.01
    alone = SystemPrompts(3, TOKENS).prefixes(5_000, Streams(2))
    # The streams are apart: who has one has the same.
    assert all(a == b for a, b in zip(prompts, alone, strict=True) if a)


def test_pairs_of_documents_are_drawn_without_replacement() -> None:
    corpus = documents(zipf=1.0, system_tokens=30)
    found = corpus.prefixes(30_000, Streams(4))
    assert {prefix[0] for prefix in found} == {(0, 30)}
    shares = zipf_shares(6, 1.0)
    law = {
        (a, b): shares[a] * shares[b] / (1 - shares[a])
        for a in range(6)
        for b in range(6)
        if a != b
    }
    pairs = Counter(tuple(s // 2 - 1 for s, _ in prefix[1:]) for prefix in found)
    assert set(pairs) == set(law)
    numbers = [pairs[pair] for pair in law]
    expected = np.array(list(law.values())) * 30_000
    assert stats.chisquare(numbers, expected).pvalue > 0.01


def test_sorted_documents_begin_alike_more_often() -> None:
    drawn = documents().prefixes(2_000, Streams(5))
    in_order = documents(order="sorted").prefixes(2_000, Streams(5))
    for a, b in zip(drawn, in_order, strict=True):
        assert sorted(a) == list(b)
    assert len(set(in_order)) == 15 < len(set(drawn)) == 30


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0, 10),
    st.integers(0, 2**32),
    st.sampled_from(["drawn", "sorted"]),
)
def test_documents_are_different_whatever_the_law(
    number: int, zipf: float, seed: int, order: Any
) -> None:
    # All of the corpus, so that the last ones drawn have next to no share.
    corpus = documents(
        num_documents=number,
        per_prompt=COUNTS["fixed"](number=number),
        zipf=zipf,
        order=order,
    )
    for prefix in corpus.prefixes(20, Streams(seed)):
        assert sorted(s for s, _ in prefix) == [2 * (d + 1) for d in range(number)]


@pytest.mark.parametrize(
    "structure",
    [
        SystemPrompts(5, TOKENS, share=0.5),
        documents(per_prompt=COUNTS["uniform"](low=0, high=4)),
    ],
)
def test_a_longer_answer_begins_with_the_shorter(structure: Any) -> None:
    long = structure.prefixes(400, Streams(6))
    assert structure.prefixes(30, Streams(6)) == long[:30]
    assert structure.prefixes(30, Streams(7)) != long[:30]


def test_no_prefixes_change_nothing() -> None:
    workload = PrefixedWorkload(source(), NoPrefixes())
    assert workload.requests() == source().requests()


def test_more_documents_than_there_are_is_refused() -> None:
    corpus = documents(per_prompt=COUNTS["uniform"](low=1, high=7))
    with pytest.raises(WorkloadError, match="at most num_documents=6; got 7"):
        corpus.prefixes(1_000, Streams(0))


class Broken:
    """A structure of a user's that breaks its contract."""

    num_texts = 2

    def __init__(self, *prefix: tuple[int, int], number: int | None = None) -> None:
        self.prefix, self.number = prefix, number

    def prefixes(self, num_prompts: int, streams: Streams) -> Any:
        del streams
        return [self.prefix] * (self.number or num_prompts)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Broken((4, 10)), r"even segments below 4.*got \(4, 10\)"),
        (Broken((1, 10)), r"even segments below 4.*got \(1, 10\)"),
        (Broken((0, 0)), r"of 1 to 1000000000 tokens; got \(0, 0\)"),
        (Broken((0, 5), number=7), "one a prompt; got 7 for 3"),
    ],
)
def test_a_broken_structure_is_found_out(structure: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        drawn_prefixes(structure, 3, Streams(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SystemPrompts(0, TOKENS), "num_groups must be between 1"),
        (lambda: SystemPrompts(2, TOKENS, zipf=-1), "zipf must be between 0"),
        (lambda: SystemPrompts(2, TOKENS, share=1.1), "share must be between 0"),
        (lambda: SystemPrompts(2, 5), "tokens must have the method quantile"),  # type: ignore[arg-type]
        (lambda: documents(order="random"), "order must be one of drawn, sorted"),
        (lambda: documents(per_prompt=2), "per_prompt must have the method quantile"),
        (lambda: documents(system_tokens=-1), "system_tokens must be between 0"),
        (
            lambda: PrefixedWorkload(source(), 3),
            "prefixes must have the method prefixes",
        ),  # type: ignore[arg-type]
    ],
)
def test_wrong_parameters_are_refused(make: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make()


def test_the_table_names_them_all() -> None:
    assert set(PREFIXES) == {"none", "system_prompts", "documents"}


def test_positions_of_a_stream_can_be_jumped_to() -> None:
    whole = Draws(Streams(9), 0, 50).uniforms("x")
    assert Draws(Streams(9), 17, 20).uniforms("x").tolist() == whole[17:37].tolist()


def test_columns_take_prefixes() -> None:
    assert isinstance(source().requests(), RequestColumns)
    requests = PrefixedWorkload(source(), SystemPrompts(1, TOKENS)).requests()
    assert len({request.prompt[0] for request in requests}) == 1
