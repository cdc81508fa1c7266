"""Runs that several tests export; they are not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sim.views.exports.runs import run

if TYPE_CHECKING:
    from pathlib import Path

RECORDED = ("--record", "schedule", "--itl", "exact")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables only."""
    return run(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with its schedule and the time of every token."""
    return run(tmp_path_factory.mktemp("recorded"), *RECORDED)


@pytest.fixture(scope="session")
def swapping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generation that swaps, recorded."""
    engine = {"scheduler": "v0", "preemption_mode": "swap", "swap_space": 1.0}
    return run(tmp_path_factory.mktemp("swapping"), *RECORDED, **engine)
