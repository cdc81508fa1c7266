"""The knee of a sweep over load, by power."""

from __future__ import annotations

from typing import Any

from sim.studies.sweeps.knee import knees

RATE = "workload.synthetic.rate_scale"


def queue(rate: float, **more: Any) -> dict[str, Any]:
    """Return a run of an M/M/1 queue that serves 10/s: its knee is at half of that."""
    latency_ms = 1e3 / (10.0 - rate)
    return {RATE: rate, "request_throughput": rate, "mean_e2el_ms": latency_ms, **more}


def test_a_queue_has_its_knee_at_half_its_capacity() -> None:
    rows = [queue(rate) for rate in (1.0, 3.0, 5.0, 7.0, 9.0) for _ in range(2)]
    assert list(knees(rows, [RATE])) == [
        "the knee is at rate_scale 5: 5 requests/s in 200 ms on average; beyond, "
        "latency grows by more than throughput"
    ]


def test_a_range_that_has_no_knee_says_so() -> None:
    low = [queue(rate) for rate in (1.0, 2.0, 3.0)]
    assert list(knees(low, [RATE])) == [
        "no knee up to rate_scale 3: throughput still grows by more than latency"
    ]
    high = [queue(rate) for rate in (6.0, 7.0, 8.0)]
    assert list(knees(high, [RATE])) == [
        "rate_scale 6, the least, is at the knee or beyond: try less load"
    ]


def test_every_curve_has_its_sentence() -> None:
    rows = [
        queue(rate, **{"engine.block_size": size})
        for size in (16, 32)
        for rate in (4.0, 5.0, 6.0)
    ]
    told = list(knees(rows, ["engine.block_size", RATE]))
    assert [line.partition(":")[0] for line in told] == [
        "engine.block_size = 16",
        "engine.block_size = 32",
    ]


def test_without_load_or_with_two_points_nothing_is_said() -> None:
    assert not list(knees([queue(1.0), queue(2.0)], [RATE]))
    assert not list(knees([queue(1.0)] * 3, ["engine.block_size"]))
