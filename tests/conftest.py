"""Settings of all tests."""

from __future__ import annotations

import gc

from hypothesis import settings

# Machines are noisy: an example may take its time; pytest-timeout bounds the test.
settings.register_profile("kvsim", deadline=None)
settings.load_profile("kvsim")


def pytest_collection_finish() -> None:
    """Let the collector pass over modules and tests, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
