"""Settings of all tests."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import settings

# Machines are noisy: an example may take its time; pytest-timeout bounds the test.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples where slow tests are left out; each run draws others."""
    settings.load_profile("quick" if leaves_slow_out(config) else "thorough")


def leaves_slow_out(config: pytest.Config) -> bool:
    """Whether this is what `make test` runs."""
    return bool(config.option.markexpr == "not slow")


@pytest.fixture(scope="session")
def is_quick(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests are left out, where invariants are proved less often."""
    return leaves_slow_out(request.config)


def pytest_collection(session: pytest.Session) -> None:
    """Let each worker collect a share first, so that each file is compiled once.

    In a fresh clone, pytest rewrites the asserts of a file when it is first collected,
    which takes longer than all else of a collection; the others find what was written.
    """
    config = session.config
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    place = int(worker["workerid"].removeprefix("gw"))
    files = [
        str(path)
        for each in config.args
        for path in sorted((config.rootpath / each).rglob("test_*.py"))
    ]
    share = files[place :: worker["workercount"]]
    config.args = [*share, *sorted(set(files).difference(share))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests in the same order whatever was collected first."""
    items.sort(key=lambda item: item.path)


def pytest_collection_finish() -> None:
    """Let the collector pass over modules and tests, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
