"""The life cycle of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.scheduler.request import TRANSITIONS, IllegalTransitionError, RequestStatus
from tests.sim.build import request_from_spec, spec


@given(st.sampled_from(RequestStatus), st.sampled_from(RequestStatus))
def test_only_legal_transitions_happen(a: RequestStatus, b: RequestStatus) -> None:
    request = request_from_spec(spec(0, 0.0, 5, 5), 100)
    request.status = a
    if b in TRANSITIONS[a]:
        request.move_to(b)
        assert request.status is b
    else:
        with pytest.raises(IllegalTransitionError, match=f"from {a.value} to"):
            request.move_to(b)
        assert request.status is a


def test_every_status_has_its_transitions_and_ends_end() -> None:
    assert set(TRANSITIONS) == set(RequestStatus)
    for status in RequestStatus:
        assert status.is_finished == (not TRANSITIONS[status])


def test_a_preemption_keeps_the_output_and_loses_the_cache() -> None:
    request = request_from_spec(spec(0, 0.0, 5, 5), 100)
    request.move_to(RequestStatus.RUNNING)
    request.num_computed_tokens = 6
    request.num_tokens = 7
    assert request.preempt() == 6
    assert (request.num_computed_tokens, request.num_output_tokens) == (0, 2)
    assert request.num_recompute_tokens == 6


def test_the_length_limit_is_the_smaller_of_the_clients_and_the_engines() -> None:
    assert request_from_spec(spec(0, 0.0, 5, 9), 10).max_num_tokens == 10
    assert request_from_spec(spec(0, 0.0, 5, 9, max_tokens=3), 10).max_num_tokens == 8
