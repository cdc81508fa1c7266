"""Settings of all tests."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

# Machines are noisy: an example may take its time; pytest-timeout bounds the test.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples where slow tests are left out; each run draws others."""
    is_quick = config.option.markexpr == "not slow"
    settings.load_profile("quick" if is_quick else "thorough")


def pytest_collection_finish() -> None:
    """Let the collector pass over modules and tests, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
