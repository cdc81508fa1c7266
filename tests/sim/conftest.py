"""Fixtures of several test files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.views.plots import Tables  # noqa: TC001
from tests.sim.config.test_config import minimal, write
from tests.sim.views.plots.directories import pressed_sweep, two_runs
from tests.sim.views.plots.tables import a_run

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pressed_sweep", "two_runs"]


@pytest.fixture(scope="session")
def full_run() -> Tables:
    """A long run with preemptions of both modes; copy what you change."""
    return a_run(20_000, modes=("recompute", "swap"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run of a second with preemptions."""
    data = minimal(num_gpu_blocks_override=40, max_model_len=600)
    data["workload"]["synthetic"] |= {
        "num_requests": 120,
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 200},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 120},
    }
    return write(tmp_path, data)
