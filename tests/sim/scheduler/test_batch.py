"""Counts of a batch, against a count query by query."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.scheduler.batch import Batch


@given(
    num_before=st.integers(0, 60),
    num_new_tokens=st.integers(1, 60),
    window=st.none() | st.integers(1, 80),
)
def test_a_chunk_counts_as_its_queries_do(
    num_before: int, num_new_tokens: int, window: int | None
) -> None:
    batch = Batch(0, window)
    batch.add(num_new_tokens, num_before + num_new_tokens)
    keys_by_query = [
        set(range(max(0, position - (window or position)), position))
        for position in range(num_before + 1, num_before + num_new_tokens + 1)
    ]
    num_pairs = sum(map(len, keys_by_query))
    num_keys = len(set().union(*keys_by_query))
    shape = batch.shape()
    if num_new_tokens == 1:
        assert (shape.num_decodes, shape.num_decode_context_tokens) == (1, num_pairs)
        return
    assert (shape.num_prefills, shape.num_prefill_tokens) == (1, num_new_tokens)
    assert shape.num_prefill_context_tokens == num_keys
    assert shape.num_prefill_attention_pairs == num_pairs
