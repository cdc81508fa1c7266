"""Skips, with a reason, where what the kernels need is not installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def torch_only() -> None:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: extra 'calibrate'"
    )
    torch.set_num_threads(1)  # the tensors are small, and tests share their machine


def torch_and_triton() -> None:
    torch_only()
    pytest.importorskip("triton", reason="triton is not installed: extra 'calibrate'")


def nvcc() -> Path:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("nvcc is not on the PATH: no CUDA toolkit here")
    return Path(found)
