"""Skips, with a reason, where what the kernels need is not installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def torch_only() -> None:
    pytest.importorskip("torch", reason="torch is not installed: extra 'calibrate'")


def torch_and_triton() -> None:
    torch_only()
    pytest.importorskip("triton", reason="triton is not installed: extra 'calibrate'")


def nvcc() -> Path:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("nvcc is not on the PATH: no CUDA toolkit here")
    return Path(found)
