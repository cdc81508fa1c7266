"""Where tests find the published data beside the project, if it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


def shared(relative: str) -> Path:
    """Return the path of a shared file, or skip the test."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"../shared/{relative} is not beside the project")
    return path
