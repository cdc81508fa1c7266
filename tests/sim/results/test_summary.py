"""The summary of a run small enough to do by hand: idle time, preemption, rejection.

Engine: blocks of 4 tokens, 4 usable; a step takes 2 s. Requests: 0 and 1 with prompts
of 7 tokens and 3 to generate, 2 far too long, 3 alone after an idle stretch.

::

    step  at  batch            blocks  what
    0     0   7 + 7              4     both prompts
    1     2   1 (pos 7) + 1      4     their last slots
    2     4   1 (pos 8)          3     0 needs a third block: 1 is preempted
    -     6   0 is done with 3 tokens
    3     6   9                  3     1 again: its prompt and 2 tokens; done
    -     8   idle until 10
    4     10  4                  1     3: one token; done at 12
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cache.errors import InvariantError
from sim.config.tables import parse_config
from sim.costs.base import StepCost
from sim.costs.constant import ConstantCost
from sim.results.metrics import cache_and_queues, goodput, latencies, throughput
from sim.simulation.run import Simulation
from tests.sim.build import Run, spec
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    from sim.scheduler.batch import BatchShape


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    run = Run(
        [
            spec(0, 0.0, 7, 3),
            spec(1, 0.0, 7, 3),
            spec(2, 1.0, 50, 3),
            spec(3, 10.0, 4, 1),
        ],
        ConstantCost(step_s=2.0),
        num_gpu_blocks=5,
        block_size=4,
        max_model_len=16,
    )
    recording = run.go()
    duration_s = run.env.now
    return (
        throughput(recording.request_table, 4, duration_s)
        | latencies(recording.request_table, recording.itl)
        | cache_and_queues(recording, duration_s)
        | {"steps": recording.steps, "preemptions": recording.preemptions}
    )


def test_what_happened(summary: dict[str, Any]) -> None:
    steps = summary["steps"]
    assert steps["start_s"].tolist() == [0, 2, 4, 6, 10]
    assert steps["num_batched_tokens"].tolist() == [14, 2, 1, 9, 4]
    assert steps["num_physical_blocks"].tolist() == [4, 4, 3, 3, 1]
    assert steps["num_preempted"].tolist() == [0, 0, 1, 0, 0]
    assert steps["num_recomputed_tokens"].tolist() == [0, 0, 0, 8, 0]
    assert steps["num_finished"].tolist() == [0, 0, 1, 1, 1]
    (preemption,) = summary["preemptions"].to_dict("records")
    assert (preemption["request_id"], preemption["for_request_id"]) == (1, 0)
    assert (preemption["num_tokens_lost"], preemption["num_output_tokens"]) == (8, 2)


def test_counts_and_rates(summary: dict[str, Any]) -> None:
    assert summary["duration"] == 12
    counts = ("num_requests", "completed", "rejected", "aborted", "unfinished")
    assert [summary[name] for name in counts] == [4, 3, 1, 0, 0]
    assert summary["total_input_tokens"] == 18
    assert summary["total_output_tokens"] == 7
    assert summary["request_throughput"] == pytest.approx(3 / 12)
    assert summary["output_throughput"] == pytest.approx(7 / 12)
    assert summary["total_token_throughput"] == pytest.approx(25 / 12)
    assert summary["num_steps"] == 5
    assert summary["recomputed_tokens"] == 8
    assert summary["num_preemptions"] == summary["num_preemptions_recompute"] == 1
    assert summary["num_requests_preempted"] == 1


def test_means_are_over_time_idle_time_included(summary: dict[str, Any]) -> None:
    assert summary["kv_cache_usage_mean"] == pytest.approx(
        (4 + 4 + 3 + 3 + 1) * 2 / 4 / 12
    )
    assert summary["kv_cache_usage_max"] == 1.0
    assert summary["num_running_mean"] == pytest.approx((2 + 2 + 1 + 1 + 1) * 2 / 12)
    assert summary["num_waiting_mean"] == pytest.approx(1 * 2 / 12)
    assert summary["engine_busy_share"] == pytest.approx(10 / 12)
    # Sojourns of 6, 8 and 2 s; the rejected request was never in the system.
    assert summary["num_in_system_mean"] == pytest.approx(16 / 12)
    assert summary["mean_step_ms"] == pytest.approx(2000)


def test_latencies(summary: dict[str, Any]) -> None:
    assert summary["mean_ttft_ms"] == pytest.approx(2000)
    # TPOT: (6 - 2) / 2 and (8 - 2) / 2; a single token has none.
    assert summary["mean_tpot_ms"] == pytest.approx(2500)
    assert summary["p50_e2el_ms"] == pytest.approx(6000)
    assert summary["std_e2el_ms"] == pytest.approx(
        (((6 - 16 / 3) ** 2 + (8 - 16 / 3) ** 2 + (2 - 16 / 3) ** 2) / 3) ** 0.5 * 1e3
    )
    # ITL: 2, 2 of request 0; 2 and, across the preemption, 4 of request 1.
    assert summary["mean_itl_ms"] == pytest.approx(2500)
    assert summary["p99_itl_ms"] == pytest.approx(2000 + 2000 * 0.97)
    assert summary["std_itl_ms"] == pytest.approx((3 * 0.25 + 2.25) ** 0.5 / 2 * 1e3)


class Extrapolating:
    """Steps of 1 s; with more than 100 prompt tokens 3 s, outside of the data."""

    def step(self, shape: BatchShape) -> StepCost:
        outside = shape.num_prefill_tokens > 100
        return StepCost(3.0 if outside else 1.0, extrapolated=outside)

    def describe(self) -> dict[str, object]:
        return {}


def test_the_extrapolated_share_is_of_busy_time() -> None:
    run = Run([spec(0, 0.0, 200, 4), spec(1, 50.0, 20, 1)], Extrapolating())
    recording = run.go()
    assert recording.steps["latency_s"].tolist() == [3, 1, 1, 1, 1]
    assert recording.extrapolated_share == pytest.approx(3 / 7)
    assert recording.requests["queue_s"].tolist() == [0, 0]


def test_the_books_are_checked_against_the_queues() -> None:
    run = Run([spec(0, 0.0, 20, 4)])
    run.engine.observe(2, lambda _: setattr(run.recorder, "num_arrived", 2))
    with pytest.raises(InvariantError, match="2 requests arrived, 1 are queued"):
        run.go()


def test_usage_is_ranked_over_time(summary: dict[str, Any]) -> None:
    """Of 12 s, 2 idle: 1/4 of the blocks for 2 s, 3/4 for 4 s, all of them for 4 s."""
    found = {percent: summary[f"p{percent}_kv_cache_usage"] for percent in (5, 25, 95)}
    assert found == {5: 0.0, 25: 0.25, 95: 1.0}
    assert summary["p50_kv_cache_usage"] == summary["p75_kv_cache_usage"] - 0.25 == 0.75


def test_goodput_counts_those_within_all_limits() -> None:
    run = Run(
        [
            spec(0, 0.0, 7, 3),
            spec(1, 0.0, 7, 3),
            spec(2, 1.0, 50, 3),
            spec(3, 10.0, 4, 1),
        ],
        ConstantCost(step_s=2.0),
        num_gpu_blocks=5,
        block_size=4,
        max_model_len=16,
    )
    table = run.go().request_table
    # TTFT 2 s for all that are served; TPOT 2 s of request 0, 3 s of request 1.
    for limits, num_good in (
        ({"ttft_ms": 1999.0}, 0),
        ({"ttft_ms": 2000.0}, 3),
        ({"ttft_ms": 2000.0, "tpot_ms": 2500.0}, 2),  # request 3 has no TPOT
        ({"ttft_ms": 2000.0, "tpot_ms": 2500.0, "e2el_ms": 2500.0}, 1),
    ):
        found = goodput(table, limits, 4, 12.0)
        assert found["goodput"] == limits
        assert found["goodput_share"] == num_good / 4
        assert found["request_goodput"] == num_good / 12


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_run_that_is_stuck_is_not_busy_for_longer_than_it_lasts(
    stepwise: bool,
) -> None:
    """Its last step is in flight when it ends."""
    stuck = {"num_gpu_blocks_override": 12, "admission_check": False}
    data = minimal(**stuck, async_scheduling=True, max_model_len=1024)
    data["workload"]["synthetic"] |= {
        "num_requests": 6,
        "arrivals": {"kind": "constant", "rate": 30.0},
        "prompt_tokens": {"kind": "empirical", "values": [40, 400]},
    }
    data["cost"] = {"kind": "constant", "step_s": 0.5}
    results = Simulation(parse_config(data), stepwise=stepwise).run()
    told, steps = results.summary, results.steps
    assert told["stalled"]
    ends_s = steps["start_s"] + steps["latency_s"]
    assert ends_s.max() > told["duration"]
    waited_s = steps["start_s"].iloc[0]
    assert told["engine_busy_share"] == pytest.approx(1 - waited_s / told["duration"])
    assert told["kv_cache_usage_mean"] <= told["kv_cache_usage_max"]
