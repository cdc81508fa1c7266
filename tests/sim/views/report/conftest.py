"""Results that tests of pages report on, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sim.views.report.pages import crowded, results, swapping

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = ("--record", "blocks", "--record", "schedule")


@pytest.fixture(scope="session")
def crowded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """V1 under pressure, with blocks and schedule."""
    return results(tmp_path_factory.mktemp("runs") / "crowded", crowded(), *RECORDS)


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a few blocks more, nothing recorded on request."""
    data = crowded(num_gpu_blocks_override=60)
    return results(tmp_path_factory.mktemp("runs") / "plain", data)


@pytest.fixture(scope="session")
def swapping_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """V0 with both modes of preemption, with blocks and schedule."""
    return results(tmp_path_factory.mktemp("runs") / "swapping", swapping(), *RECORDS)
