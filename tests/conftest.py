"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Machines are noisy: an example may take its time; pytest-timeout bounds the test.
settings.register_profile("kvsim", deadline=None)
settings.load_profile("kvsim")
