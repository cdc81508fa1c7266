"""Runs `interpreted_kernels` where Triton's interpreter is on: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.calibrate.missing import torch_and_triton
from tests.shared import ROOT

CASES = Path(__file__).with_name("interpreted_kernels.py")


def run_interpreted(marks: str) -> None:
    torch_and_triton()
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, str(CASES)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    run_interpreted("not slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_ratio_block_and_head_size_in_the_interpreter() -> None:
    run_interpreted("slow")
