"""Fifteen published points of a real vLLM 0.12 under users that ask again at once."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
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
    assert median(map(abs, errors)) <= 12.0


@pytest.mark.slow
def test_tpot_from_measured_tables(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    command = ["profile", "import", "aiconfigurator", "--system", "h100_sxm"]
    source = ["--path", str(shared("profiles/aiconfigurator"))]
    model = ["--model", "Qwen/Qwen3-32B", "--out", str(path), "--quiet"]
    assert kvsim([*command, *source, *model]) == 0
    cost = {"kind": "measured", "profile": str(path)}
    assert median(map(abs, tpot_errors(cost))) <= 12.0
