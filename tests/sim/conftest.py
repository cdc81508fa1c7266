from __future__ import annotations

import pytest

from sim.plots import Tables  # noqa: TC001
from tests.sim.plot_tables import a_run


@pytest.fixture(scope="session")
def full_run() -> Tables:
    """A long run with preemptions of both modes; copy what you change."""
    return a_run(20_000, modes=("recompute", "swap"))
