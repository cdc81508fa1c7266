"""A request is an immutable value, cheap to make."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import RequestSpec

SPEC = RequestSpec(3, 1.5, ((6, 512), (8, 100)), 7, 9)


def test_fields_by_position_and_by_name() -> None:
    named = RequestSpec(
        request_id=3,
        arrival_s=1.5,
        prompt=((6, 512), (8, 100)),
        num_output_tokens=7,
        output_segment=9,
        max_tokens=None,
        priority=0,
        best_of=1,
        beam_width=1,
        beam_switch_share=0.0,
    )
    assert named == SPEC
    assert hash(named) == hash(SPEC)
    assert (named.request_id, named.arrival_s, named.output_segment) == (3, 1.5, 9)


@pytest.mark.parametrize("field", RequestSpec._fields)
def test_another_value_is_another_request(field: str) -> None:
    other = SPEC._replace(**{field: ((1, 1),) if field == "prompt" else 77})  # type: ignore[arg-type]
    assert other != SPEC
    assert getattr(SPEC, field) != getattr(other, field)


@pytest.mark.parametrize("field", [*RequestSpec._fields, "num_prompt_tokens", "own"])
def test_nothing_can_be_changed(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(SPEC, field, 1)


def test_repr_names_the_fields() -> None:
    assert repr(RequestSpec(0, 0.5, ((0, 5),), 4, 1)) == (
        "RequestSpec(request_id=0, arrival_s=0.5, prompt=((0, 5),), "
        "num_output_tokens=4, output_segment=1, max_tokens=None, priority=0, "
        "best_of=1, beam_width=1, beam_switch_share=0.0, slo_class='', "
        "session_id=None, previous_id=None, delay_s=0.0, ends_at_stop=True, "
        "accepted_drafts=())"
    )


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_copies_are_equal(again: Any) -> None:
    assert again(SPEC) == SPEC


def test_pickled() -> None:
    loaded = pickle.loads(pickle.dumps(SPEC))
    assert loaded == SPEC
    assert isinstance(loaded, RequestSpec)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 2**40)), max_size=5))
def test_num_prompt_tokens(segments: list[tuple[int, int]]) -> None:
    spec = SPEC._replace(prompt=tuple(segments))
    assert spec.num_prompt_tokens == sum(num_tokens for _, num_tokens in segments)


@pytest.mark.parametrize(
    ("best_of", "beam_width", "num_sequences"), [(1, 1, 1), (3, 1, 3), (1, 4, 4)]
)
def test_num_sequences(best_of: int, beam_width: int, num_sequences: int) -> None:
    spec = SPEC._replace(best_of=best_of, beam_width=beam_width)
    assert spec.num_sequences == num_sequences
