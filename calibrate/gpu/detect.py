"""Detection of the GPU and of backends, with a remedy where one is missing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from calibrate.harness.device import MissingError
from calibrate.kernels.cuda_compile import find_nvcc, find_nvrtc

if TYPE_CHECKING:
    from calibrate.harness.device import Device

DRY = "or look at it with --dry-run"


def find_gpu(seed: int) -> Device:
    """Return the GPU, ready to be timed; raise `MissingError` if that fails."""
    if importlib.util.find_spec("torch") is None:
        raise MissingError(
            "timing kernels needs torch, which is not installed: pip install"
            f" 'kvsim[calibrate]', {DRY}"
        )
    import torch  # noqa: PLC0415

    if torch.version.cuda is None:
        raise MissingError(
            f"timing kernels needs CUDA, but torch {torch.__version__} is built"
            f" without it: install a CUDA build of torch, {DRY}"
        )
    if not torch.cuda.is_available():
        raise MissingError(
            "timing kernels needs an NVIDIA GPU and its driver, and torch finds none:"
            f" run it on such a machine, {DRY}"
        )
    from calibrate.gpu.device import GpuDevice  # noqa: PLC0415

    return GpuDevice.on_gpu(backends_here(), seed)


def backends_here() -> dict[str, str]:
    """Return a message for each missing backend, empty text for those that are here."""
    needs = {
        "vllm": "vllm is not installed",
        "flashinfer": "flashinfer is not installed: pip install flashinfer-python",
        "triton": "triton is not installed: pip install triton",
    }
    found = {
        name: "" if importlib.util.find_spec(name) else missing
        for name, missing in needs.items()
    }
    compiler = find_nvcc() or find_nvrtc()
    found["cuda"] = "" if compiler else "no nvcc, no NVRTC: install the CUDA toolkit"
    found["torch"] = ""
    return found
