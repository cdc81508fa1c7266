"""Acceptance rates, published profiles, and what is drawn by them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.shared import shared
from workloads import RequestSpec, WorkloadError
from workloads.acceptance import (
    ACCEPTANCE,
    AcceptanceRates,
    ClassRates,
    ConstantRate,
    DrawnAcceptance,
    LengthRates,
    PositionRates,
    ProfileRates,
    RecordedRates,
    RequestCounts,
    acceptance_profiles,
)
from workloads.traces.kvsim import KvsimTraceReader, KvsimTraceWriter
from workloads.traces.writing import losses

if TYPE_CHECKING:
    from pathlib import Path

MODES = [
    (name, mode)
    for name, profile in acceptance_profiles().items()
    for mode in profile.lengths
]


def specs(*classes: str) -> list[RequestSpec]:
    return [
        RequestSpec(i, 0.0, ((2 * i, 8),), 9, 2 * i + 1, slo_class=name)
        for i, name in enumerate(classes)
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ConstantRate(0.5), (0.5, 0.25, 0.125)),
        (ConstantRate(1), (1, 1, 1)),
        (PositionRates([0.75, 0.5, 0.25, 0.1]), (0.75, 0.5, 0.25)),
        (RecordedRates(8, [6, 4, 0]), (0.75, 0.5, 0)),
        (LengthRates(1.875, 3), (0.5, 0.25, 0.125)),
        (LengthRates(4, 3), (1, 1, 1)),
        (ClassRates({"code": ConstantRate(1)}, ConstantRate(0)), (0, 0, 0)),
    ],
)
def test_rates_are_unconditional(
    kind: AcceptanceRates, expected: tuple[float, ...]
) -> None:
    assert kind.rates(3, "chat") == pytest.approx(expected, abs=1e-12)


def test_classes_have_rates_of_their_own() -> None:
    rates = ClassRates({"code": ConstantRate(1), "chat": ConstantRate(0)})
    drawn = DrawnAcceptance(rates, specs("chat", "code", "chat"), 4)
    assert [drawn.num_accepted(i, 1, 4) for i in range(3)] == [0, 4, 0]


@pytest.mark.parametrize(("name", "mode"), MODES)
@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_a_profile_has_its_published_length(
    name: str, mode: str, num_drafts: int
) -> None:
    profile = ProfileRates(name, thinking=mode == "thinking")
    rates = profile.rates(num_drafts, "")
    assert len(rates) == num_drafts
    assert all(after <= before for before, after in pairwise((1.0, *rates, 0.0)))
    published = acceptance_profiles()[name].lengths[mode][num_drafts - 1]
    assert 1 + sum(rates) == pytest.approx(published)


def test_profiles_are_those_that_were_published() -> None:
    folder = shared("spec_acceptance")
    published = {}
    for file in folder.glob("*.yaml"):
        text = file.read_text()
        ((model, modes),) = yaml.safe_load(text).items()
        found = re.search(r"actions/runs/(\d+)", text)
        assert found
        names = {"thinking_on": "thinking", "thinking_off": "plain"}
        published[found[1]] = (
            model,
            {names[mode]: tuple(each.values()) for mode, each in modes.items()},
        )
    ours = {
        profile.source.rpartition(" ")[2]: (profile.model, profile.lengths)
        for profile in acceptance_profiles().values()
    }
    assert ours == published


RATES = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(
    lambda rates: sorted(rates, reverse=True)
)


@given(RATES, st.integers(0, 2**64 - 1), st.integers(1, 10**6))
def test_fewer_drafts_accept_the_first_ones(
    rates: list[float], seed: int, position: int
) -> None:
    most = len(rates)
    drawn = DrawnAcceptance(PositionRates(rates), specs("", ""), most, seed=seed)
    found = [drawn.num_accepted(1, position, k) for k in range(1, most + 1)]
    assert found == [min(k, found[-1]) for k in range(1, most + 1)]
    higher = PositionRates([sqrt(rate) for rate in rates])
    better = DrawnAcceptance(higher, specs("", ""), most, seed=seed)
    assert better.num_accepted(1, position, most) >= found[-1]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_the_mean_is_that_of_the_formula(rate: float) -> None:
    drawn = DrawnAcceptance(ConstantRate(rate), specs(*[""] * 100), 4)
    counts = [drawn.num_accepted(i, j, 4) for i in range(100) for j in range(1, 201)]
    expected = 4.0 if rate == 1 else (1 - rate**5) / (1 - rate) - 1
    assert sum(counts) / len(counts) == pytest.approx(expected, abs=0.05)
    # neighbours know nothing of each other: by position, and by request
    for stride in (1, 200):
        products = [
            (a - expected) * (b - expected)
            for a, b in zip(counts, counts[stride:], strict=False)
        ]
        assert abs(sum(products) / len(products)) < 0.1


def test_draws_depend_on_seed_request_and_position_alone() -> None:
    rates = ConstantRate(0.6)
    one = DrawnAcceptance(rates, specs(*[""] * 8), 5, seed=3)
    other = DrawnAcceptance(rates, specs(*[""] * 4), 5, seed=3)
    asked = [(i, j) for i in range(4) for j in range(1, 20)]
    found = [one.num_accepted(i, j, 5) for i, j in asked]
    assert [other.num_accepted(i, j, 5) for i, j in reversed(asked)] == found[::-1]
    assert found[:12] == [3, 0, 3, 1, 3, 1, 0, 0, 0, 2, 0, 0]
    assert [
        DrawnAcceptance(rates, specs(*[""] * 4), 5, seed=4).num_accepted(i, j, 5)
        for i, j in asked
    ] != found


def test_drafts_are_found_for_a_share_of_steps() -> None:
    drawn = DrawnAcceptance(ConstantRate(0.5), specs(*[""] * 50), 3, proposal_rate=0.25)
    found = [drawn.num_proposed(i, j, 3) for i in range(50) for j in range(1, 201)]
    assert set(found) == {0, 3}
    assert sum(found) / len(found) == pytest.approx(0.75, abs=0.05)
    always = DrawnAcceptance(ConstantRate(0.5), specs(""), 3)
    assert always.num_proposed(0, 1, 3) == 3


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("constant", {"rate": 1.5}, "rate must be between 0 and 1; got 1.5"),
        ("per_position", {"rates_per_position": []}, "must hold a rate at least"),
        ("per_position", {"rates_per_position": [0.5, 0.6]}, "got 0.6 behind 0.5"),
        ("per_position", {"rates_per_position": [2]}, r"rates_per_position\[0\] must"),
        (
            "recorded",
            {"num_drafts": 9, "num_accepted_tokens_per_pos": [5, 6]},
            r"num_accepted_tokens_per_pos\[1\] must be between 0 and 5; got 6",
        ),
        (
            "recorded",
            {"num_drafts": 9, "num_accepted_tokens_per_pos": []},
            "must hold a count at least",
        ),
        (
            "length",
            {"length": 4.5, "num_speculative_tokens": 3},
            "length must be between 1 and 4; got 4.5",
        ),
        ("profile", {"name": "gpt"}, "name must be one of deepseek-v4-pro-0813-dspark"),
        ("profile", {"name": "glm-5.2-mtp", "thinking": False}, "left out or true"),
        ("by_class", {"classes": {}}, "classes must be a table"),
        ("by_class", {"classes": {"a": 1}}, "classes.a must have the method rates"),
    ],
)
def test_refusals(kind: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        ACCEPTANCE[kind](**arguments)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        (PositionRates([0.5]), "got rates of 1 and num_speculative_tokens 9"),
        (ProfileRates("glm-5.2-mtp"), "published of up to 8 drafts"),
        (ClassRates({"a": ConstantRate(1)}), "got a and a request of slo_class ''"),
    ],
)
def test_what_is_not_known_is_refused(rates: AcceptanceRates, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        DrawnAcceptance(rates, specs(""), 9)


def test_rates_of_ones_own_are_held_to_the_contract() -> None:
    class Rising:
        def rates(self, num_speculative_tokens: int, slo_class: str) -> Any:
            return (0.1, 0.2)

    with pytest.raises(WorkloadError, match=r"mend Rising\.rates"):
        DrawnAcceptance(Rising(), specs(""), 2)


def test_recorded_counts_are_those_of_their_verifications() -> None:
    counted = specs("", "")
    counted[1] = counted[1]._replace(accepted_drafts=(3, 0, 1))
    drawn = DrawnAcceptance(RequestCounts(ConstantRate(1)), counted, 4)
    position, found = 1, []
    for _ in range(6):
        found.append(drawn.num_accepted(1, position, 4))
        position += found[-1] + 1
    assert found == [3, 0, 1, 3, 0, 1]
    # in between, and with fewer drafts, as far as the text is known
    assert [drawn.num_accepted(1, position, 2) for position in range(1, 8)] == [
        2, 2, 1, 0, 0, 1, 0,
    ]  # fmt: skip
    assert drawn.num_accepted(0, 1, 4) == 4
    with pytest.raises(WorkloadError, match="by_request takes accepted_drafts"):
        DrawnAcceptance(RequestCounts(), counted, 4)


def test_recorded_counts_stand_in_a_trace(tmp_path: Path) -> None:
    lines = [
        {"kvsim_requests": 1},
        {"arrival_s": 0, "prompt": 9, "num_output_tokens": 5, "accepted_drafts": [2]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (request,) = requests = list(KvsimTraceReader(path).read())
    assert request.accepted_drafts == (2,)
    (_, line) = KvsimTraceWriter().lines(requests)
    assert json.loads(line)["accepted_drafts"] == [2]
    assert losses(requests, {"start", "prefixes"}) == [
        "how many drafts were accepted (1 of 1 requests)"
    ]
    lines[1]["accepted_drafts"] = [2, -1]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with pytest.raises(WorkloadError, match="accepted_drafts must be a list of whole"):
        list(KvsimTraceReader(path).read())


def test_the_least_rate_that_gives_a_length_is_found() -> None:
    for length, num in ((1.5, 1), (1.75, 2)):
        (rate, *_) = LengthRates(length, num).rates(num, "")
        assert 0.5 - 1e-15 < rate <= 0.5
