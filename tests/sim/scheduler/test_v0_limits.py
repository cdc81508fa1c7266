"""Requests that the V0 scheduler can never serve (invariant 7)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scheduler.base import PreemptionMode
from sim.scheduler.v0.scheduler import Scheduler
from tests.sim.scheduler.group_steps import Steps, make

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


def steps(**changes: Any) -> Steps:
    return Steps(make(Scheduler, **changes))


@pytest.mark.parametrize(
    ("changes", "request_", "message"),
    [
        ({"max_num_seqs": 2}, {"width": 3}, "3 sequences cannot run within max_num_s"),
        ({"max_model_len": 9}, {}, "prompt of 10 tokens exceeds max_model_len 9"),
        ({"max_num_batched_tokens": 9}, {}, "set enable_chunked_prefill"),
        ({"max_num_batched_tokens": 39}, {}, "may grow to 40 tokens could not be"),
        (
            {
                "max_num_batched_tokens": 9,
                "enable_chunked_prefill": True,
                "preemption_mode": SWAP,
            },
            {},
            "comes back as a whole only",
        ),
        ({"num_gpu_blocks": 10}, {}, "1 x 40 tokens take 11 blocks"),
        ({"num_gpu_blocks": 12, "watermark": 0.25}, {}, "take 13 blocks"),
        ({"num_gpu_blocks": 12, "num_lookahead_slots": 5}, {}, "take 14 blocks"),
        ({}, {"width": 2}, "2 x 40 tokens take 22 blocks"),
    ],
)
def test_what_can_never_be_served_is_refused_with_a_reason(
    changes: dict[str, Any], request_: dict[str, Any], message: str
) -> None:
    run = steps(**changes)
    error = run.scheduler.admission_error(run.add(10, 30, **request_))
    assert error is not None
    assert message in error
    assert steps().scheduler.admission_error(run.add(10, 30)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 100},
        {"max_num_batched_tokens": 30},
        {"max_num_batched_tokens": 30, "enable_chunked_prefill": True},
        {"num_lookahead_slots": 5, "max_num_batched_tokens": 100},
        {"watermark": 0.2, "sliding_window": 8, "max_num_batched_tokens": 100},
    ],
)
def test_the_longest_servable_sequence_passes_and_one_token_more_does_not(
    changes: dict[str, Any],
) -> None:
    run = steps(max_model_len=200, **changes)
    longest = run.scheduler.max_servable_tokens
    assert longest > 20
    assert run.scheduler.admission_error(run.add(9, longest - 9)) is None
    assert run.scheduler.admission_error(run.add(9, longest - 8)) is not None
    run.scheduler.abort(run.requests[1])
    run.run()
    assert run.requests[0].num_tokens == longest
