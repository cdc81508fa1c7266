"""Fifteen published points of a real vLLM 0.12 under users that ask again at once."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.scheduler.generation import SCHEDULE_REQUEST_S
from sim.simulation.simulate import simulate
from tests.shared import shared
from tests.truth.runs import closed_loop_points

if TYPE_CHECKING:
    from pathlib import Path


def tpot_errors(cost: dict[str, Any]) -> list[float]:
    """Return the signed errors of TPOT in percent, a point each."""
    errors = []
    for point in closed_loop_points():
        summary = simulate(point.config(cost)).summary
        assert summary["completed"] == 10 * point.num_users
        errors.append(100.0 * (summary["mean_tpot_ms"] / point.mean_tpot_ms - 1.0))
    return errors


def test_tpot_from_the_datasheet() -> None:
    errors = tpot_errors({"kind": "roofline"})
    assert len(errors) == 15
    assert median(map(abs, errors)) <= 6.2
    assert max(map(abs, errors)) <= 15.3


def test_a_scheduler_in_every_step_brings_each_point_nearer() -> None:
    """But two of 8 users, 1 and 2 % too long for it: 15 us, timed elsewhere."""
    ours = tpot_errors({"kind": "roofline"})
    without = tpot_errors({"kind": "roofline", "schedule_request_s": 0.0})
    assert median(map(abs, without)) >= median(map(abs, ours)) + 4.0
    for point, near, far in zip(closed_loop_points(), ours, without, strict=True):
        assert abs(near) <= (2.3 if point.num_users == 8 and near > 0 else abs(far))


def test_a_norm_of_queries_and_keys_brings_the_points_nearer() -> None:
    """2 us a layer, of kernel tables alone."""
    ours = tpot_errors({"kind": "roofline"})
    without = tpot_errors({"kind": "roofline", "qk_norm_latency_s": 0.0})
    assert median(map(abs, without)) >= median(map(abs, ours)) + 0.6


@pytest.mark.parametrize(
    ("num_requests", "one_at_a_time", "beside"),
    [(32, 1014, 1025), (64, 1853, 1896), (128, 3048, 3177), (256, 4039, 4258)],
)
def test_a_scheduler_beside_the_gpu_saves_what_it_takes_of_each_request(
    num_requests: int, one_at_a_time: int, beside: int
) -> None:
    """Tokens/s of vLLM on two A100s, published in its pull request 23914."""
    step_s, quicker_s = num_requests / one_at_a_time, num_requests / beside
    saved_s = (step_s - quicker_s) / num_requests
    assert 0.7 * SCHEDULE_REQUEST_S <= saved_s <= 0.9 * SCHEDULE_REQUEST_S


@pytest.mark.slow
def test_tpot_from_measured_tables(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    command = ["profile", "import", "aiconfigurator", "--system", "h100_sxm"]
    source = ["--path", str(shared("profiles/aiconfigurator"))]
    model = ["--model", "Qwen/Qwen3-32B", "--out", str(path), "--quiet"]
    assert kvsim([*command, *source, *model]) == 0
    cost = {"kind": "measured", "profile": str(path)}
    assert median(map(abs, tpot_errors(cost))) <= 4.2
