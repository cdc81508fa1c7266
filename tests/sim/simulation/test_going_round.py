"""Requests that are computed again for ever, beside one that nothing can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sim.config.tables import parse_config
from sim.engine.steps.vain import MIN_NUM_VAIN_PREEMPTIONS, VainSteps
from sim.simulation.run import Simulation
from tests.identity.compare import assert_equal_paths, of_one_group
from tests.identity.random_configs import LISTED_TRACE
from tests.sim.config.test_config import minimal


def tight(**changes: Any) -> dict[str, Any]:
    """Return a run whose first prompt is longer than the model, and stays in the way.

    It gets slots for 112 tokens, computes them, and never ends. The second has too few
    left: it computes chunks, gives them up, and begins again.
    """
    engine = {
        "block_size": 16,
        "num_gpu_blocks_override": 12,
        "max_model_len": 112,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 36,
        "scheduler_reserve_full_isl": False,
        "enable_prefix_caching": False,
        "admission_check": False,
        "async_scheduling": False,
    }
    data: dict[str, Any] = minimal(**engine | changes)
    requests = [
        {"at": 0.01 * i, "prompt": [[2 * i, tokens]], "out": 8, "seg": 2 * i + 1}
        for i, tokens in enumerate((159, 100, 20, 20))
    ]
    data["workload"] = {"trace": {"kind": LISTED_TRACE, "requests": requests}}
    return data


@pytest.mark.parametrize("is_ahead", [False, True])
def test_one_that_begins_again_for_ever_ends_the_run(*, is_ahead: bool) -> None:
    config = parse_config(tight(async_scheduling=is_ahead))
    told = assert_equal_paths(config, reference=of_one_group).chosen.summary
    assert told["stalled"]
    assert (told["completed"], told["unfinished"]) == (0, 4)
    assert told["num_preemptions"] > 2 * MIN_NUM_VAIN_PREEMPTIONS
    (line,) = [each for each in told["warnings"] if "stalled" in each]
    assert line == (
        "the queue stalled: 3 requests wait behind one that can never be served, where "
        "a real engine hangs: request 0: a prompt of 159 tokens leaves no room for "
        "output within max_model_len 112; leave engine.admission_check on, which "
        "rejects it on arrival"
    )
    served = Simulation(parse_config(tight(admission_check=True))).run().summary
    assert (served["completed"], served["rejected"]) == (3, 1)


RANKS = [
    {"num_gpu_blocks_override": 6, "max_model_len": 100, "async_scheduling": True},
    {"num_gpu_blocks_override": 7, "max_model_len": 160, "max_num_batched_tokens": 16},
]


@pytest.mark.parametrize("engine", RANKS)
def test_ranks_in_lock_step_with_requests_that_are_stuck_end(
    engine: dict[str, Any],
) -> None:
    """A wave woke a rank, which forgot that it was stuck, and began another wave."""
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True}
    data = tight(model="Qwen/Qwen3-30B-A3B", **ranks, **engine)
    requests = data["workload"]["trace"]["requests"]
    for each, tokens in zip(requests, (219, 52, 207, 102), strict=True):
        each["prompt"][0][1] = tokens
    told = Simulation(parse_config(data)).run().summary
    assert told["stalled"]
    assert told["completed"] < 4
    assert any("request 0: a prompt of 219 tokens" in each for each in told["warnings"])


class Round:
    """Vain steps of an engine in which request 1 is preempted at the same place."""

    def __init__(self) -> None:
        self.steps = VainSteps()
        self.requests = {number: self._request(number) for number in range(2)}

    @staticmethod
    def _request(number: int) -> Any:
        numbers = {"num_tokens": 50, "num_generated_tokens": 0}
        return SimpleNamespace(request_id=number, num_computed_tokens=9, **numbers)

    def preempt_until_due(self) -> None:
        lost = cast("Any", self.requests[1])
        while not self.steps.is_due:
            each = SimpleNamespace(request=lost, num_tokens_lost=9)
            self.steps.note_preemptions([cast("Any", each)])
        self.steps.look(self.requests)


@pytest.mark.parametrize(
    "name", ["num_tokens", "num_generated_tokens", "num_computed_tokens"]
)
def test_beside_one_that_gets_on_nothing_goes_round(name: str) -> None:
    rounds = Round()
    head = rounds.requests[0]
    for _ in range(5):
        setattr(head, name, getattr(head, name) + 1)
        rounds.preempt_until_due()
        assert not rounds.steps.are_vain
    rounds.preempt_until_due()
    rounds.preempt_until_due()
    assert rounds.steps.are_vain
    rounds.steps.end()
    assert not rounds.steps.are_vain


def test_a_request_that_comes_further_does_not_go_round() -> None:
    rounds = Round()
    for lost in range(4 * MIN_NUM_VAIN_PREEMPTIONS):
        each = SimpleNamespace(request=rounds.requests[1], num_tokens_lost=lost)
        rounds.steps.note_preemptions([cast("Any", each)])
        assert not rounds.steps.is_due


def test_one_that_comes_or_ends_meanwhile_is_progress() -> None:
    rounds = Round()
    for number in range(2, 6):
        rounds.preempt_until_due()
        rounds.requests[number] = rounds.requests[0]
    del rounds.requests[2]
    rounds.preempt_until_due()
    assert not rounds.steps.are_vain
