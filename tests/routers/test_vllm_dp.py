"""Our balancer of ranks beside decisions of vLLM 0.33.0's own."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

from sim.engine.balancer import FrontEnd, Load
from tests.shared import shared

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_decisions_are_those_of_the_real_balancer() -> None:
    """From each state that it was in, the same rank, and the same start after it."""
    num_decisions = 0
    for case in _cases():
        front_end = FrontEnd(case["n"], 0, case["client_count"])
        for step in case["steps"]:
            front_end.hear([Load(*count) for count in step["counts"]])
            front_end.num_in_flight = list(step["inflight"])
            front_end.start = step["start"]
            chosen = step["chosen"]
            assert front_end.choose() == chosen
            assert front_end.waiting[chosen] > step["counts"][chosen][0]
            num_decisions += 1
    assert num_decisions == 10_000


def test_starts_move_on_as_the_real_ones() -> None:
    for case in _cases():
        starts = [step["start"] for step in case["steps"]]
        number, num_ranks = starts[0], case["n"]
        assert starts == [(number + i) % num_ranks for i in range(len(starts))]


def _cases() -> Iterator[dict[str, Any]]:
    path = shared("fleets/oracles/vllm_0330_dplb_decisions.jsonl.gz")
    with gzip.open(path, "rt") as rows:
        for row in rows:
            yield json.loads(row)
