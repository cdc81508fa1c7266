"""Samples, beams and priorities drawn on top of a workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from workloads.arrivals import ARRIVALS
from workloads.errors import WorkloadError
from workloads.lengths import LENGTHS
from workloads.requests.columns import RequestColumns
from workloads.transforms.sampling import SampledWorkload
from workloads.workload import SyntheticWorkload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import RequestSpec


def source(num_requests: int = 2000) -> SyntheticWorkload:
    return SyntheticWorkload(
        arrivals=ARRIVALS["poisson"](rate=1.0),
        prompt_tokens=LENGTHS["uniform"](low=1, high=50),
        output_tokens=LENGTHS["uniform"](low=1, high=50),
        num_requests=num_requests,
        seed=3,
    )


def drawn(num_requests: int = 2000, **more: Any) -> Sequence[RequestSpec]:
    return SampledWorkload(source(num_requests), **more).requests()


def test_a_number_holds_for_all_and_changes_nothing_else() -> None:
    plain = source().requests()
    wide = drawn(best_of=4)
    assert {request.best_of for request in wide} == {4}
    assert {request.num_sequences for request in wide} == {4}
    for before, after in zip(plain, wide, strict=True):
        assert before.arrival_s == after.arrival_s
        assert before.prompt == after.prompt
        assert before.num_output_tokens == after.num_output_tokens


def test_shares_are_met_and_a_longer_workload_begins_with_the_shorter() -> None:
    shares = {1: 0.7, 2: 0.2, 4: 0.1}
    found = [request.best_of for request in drawn(best_of=shares)]
    for value, share in shares.items():
        assert found.count(value) / len(found) == pytest.approx(share, abs=0.03)
    assert [request.best_of for request in drawn(50, best_of=shares)] == found[:50]


def test_beams_have_no_samples_beside_them() -> None:
    requests = drawn(best_of=3, beam_width={1: 0.5, 2: 0.5}, beam_switch_share=0.2)
    beams = [request for request in requests if request.beam_width > 1]
    others = [request for request in requests if request.beam_width == 1]
    assert 800 < len(beams) < 1200
    assert {(r.best_of, r.num_sequences, r.beam_switch_share) for r in beams} == {
        (1, 2, 0.2)
    }
    assert {(r.best_of, r.num_sequences, r.beam_switch_share) for r in others} == {
        (3, 3, 0.0)
    }


def test_streams_are_independent() -> None:
    priority = {0: 0.5, 5: 0.5}
    alone = [request.priority for request in drawn(priority=priority)]
    assert {0, 5} == set(alone)
    with_beams = drawn(priority=priority, beam_width={1: 0.5, 4: 0.5}, best_of={2: 1.0})
    assert [request.priority for request in with_beams] == alone


def test_service_levels_are_names_or_shares_of_names() -> None:
    assert {request.slo_class for request in drawn(slo_class="gold")} == {"gold"}
    shares = {"interactive": 0.8, "batch": 0.2}
    requests = drawn(slo_class=shares)
    assert isinstance(requests, RequestColumns)
    found = [request.slo_class for request in requests]
    assert found.count("batch") / len(found) == pytest.approx(0.2, abs=0.03)
    assert [r.slo_class for r in drawn(50, slo_class=shares)] == found[:50]
    # A stream of its own.
    assert [r.slo_class for r in drawn(slo_class=shares, priority={0: 1.0})] == found


def test_what_is_not_drawn_stays_as_the_workload_says() -> None:
    facts = {
        "best_of": 3,
        "priority": 5,
        "slo_class": "gold",
        "max_tokens": 9,
        "beam_switch_share": 0.1,
    }

    class Recorded:
        def requests(self) -> Sequence[RequestSpec]:
            return [request._replace(**facts) for request in source(5).requests()]

    before = Recorded().requests()
    same = SampledWorkload(Recorded(), max_tokens=40).requests()
    assert same == before
    other = SampledWorkload(Recorded(), slo_class="lead", priority={7: 1.0}).requests()
    assert other == [r._replace(slo_class="lead", priority=7) for r in before]


@pytest.mark.parametrize(
    ("slo_class", "message"),
    [
        (3, "slo_class must be a name; got 3"),
        ({"": 1.0}, "slo_class must be a name; got ''"),
        ({"a": 0.5, "b": 0.4}, "slo_class: shares must add up to 1, got 0.9"),
        ({"a": 1.5, "b": -0.5}, "the share of a must be between 0 and 1"),
    ],
)
def test_wrong_service_levels_are_refused(slo_class: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        drawn(slo_class=slo_class)


def test_clients_state_a_limit() -> None:
    assert {request.max_tokens for request in drawn(max_tokens=30)} == {30}
    assert {request.max_tokens for request in drawn(best_of=2)} == {None}


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"best_of": 0}, "best_of must be .*got 0"),
        ({"beam_width": {1: 0.5, 2: 0.4}}, "beam_width: shares must add up to 1"),
        ({"beam_width": {1: 1.5, 2: -0.5}}, "the share of 1"),
        ({"best_of": {0: 1.0}}, "best_of"),
        ({"best_of": 5000}, "best_of"),
        ({"beam_switch_share": 1.5}, "beam_switch_share"),
        ({"max_tokens": 0}, "max_tokens must be .*got 0"),
        ({"priority": {}}, "priority: shares must add up to 1, got 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(more: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule):
        drawn(**more)


def test_a_priority_may_follow_from_the_service_level() -> None:
    ranks = {"gold": 0, "bronze": 5}
    requests = drawn(slo_class={"gold": 0.25, "bronze": 0.75}, priority=ranks)
    assert {(r.slo_class, r.priority) for r in requests} == {("gold", 0), ("bronze", 5)}
    assert isinstance(requests, RequestColumns)
    listed = SampledWorkload(Listed(list(requests)), priority={"gold": 7, "bronze": -1})
    changed = listed.requests()
    assert [r.slo_class for r in changed] == [r.slo_class for r in requests]
    assert [r.priority for r in changed[:50]] == [
        7 if r.slo_class == "gold" else -1 for r in requests[:50]
    ]
    assert {r.priority for r in drawn(slo_class="gold", priority=ranks)} == {0}


class Listed:
    def __init__(self, requests: list[RequestSpec]) -> None:
        self._requests = requests

    def requests(self) -> list[RequestSpec]:
        return self._requests


@pytest.mark.parametrize(
    ("priority", "rule"),
    [
        ({"gold": 0}, "must name every slo_class; got gold and a request of class ''"),
        ({"gold": 0, 1: 1}, "must have names or numbers for keys; got 1 beside names"),
        ({"gold": 0.5}, "priority.gold must be an integer"),
    ],
)
def test_ranks_that_cannot_hold_are_refused(priority: Any, rule: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        drawn(2, priority=priority)
    assert rule in str(refused.value)


def test_what_ends_an_output_is_drawn_or_the_same_for_all() -> None:
    assert all(request.ends_at_stop for request in source(20).requests())
    for request in drawn(20, output_end="length", max_tokens=30):
        assert not request.ends_at_stop
        assert request.output_limit == min(request.num_output_tokens, 30)
    requests = drawn(output_end={"stop": 0.7, "length": 0.3})
    found = [request.ends_at_stop for request in requests]
    assert found.count(True) / len(found) == pytest.approx(0.7, abs=0.03)
    limits = [request.output_limit for request in requests]
    assert isinstance(requests, RequestColumns)
    assert requests.output_limits().tolist() == limits
    assert {limit is None for limit in limits} == {True, False}


@pytest.mark.parametrize("output_end", ["eos", {"stop": 1.0, "eos": 0.0}, {"stop": 1}])
def test_only_a_stop_token_or_a_length_ends_an_output(output_end: Any) -> None:
    if output_end == {"stop": 1}:
        assert all(request.ends_at_stop for request in drawn(9, output_end=output_end))
        return
    with pytest.raises(WorkloadError, match="output_end must be one of stop, length"):
        drawn(9, output_end=output_end)
