"""What becomes of errors of a call: the point is left out, or the device is lost."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from calibrate.harness.device import DeviceFaultError, UnsupportedPointError, said
from calibrate.kernels.cuda_library import CudaError

if TYPE_CHECKING:
    from collections.abc import Iterator

REFUSALS = ("OutOfResources", "CompilationError", "PTXASError")
"""Triton's errors, which cannot be named without importing it."""


@contextmanager
def refusing(device: torch.device) -> Iterator[None]:
    """Run the body; say of its error whether a point or the device is lost.

    An error of ours is neither, and passes as it is.

    Raises
    ------
    UnsupportedPointError
        Where the body did not fit or was refused, and the device is well.
    DeviceFaultError
        Where the device answers nothing more.
    """
    try:
        yield
    except UnsupportedPointError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise UnsupportedPointError("it does not fit the device's memory") from error
    except Exception as error:
        if is_broken(device):
            raise DeviceFaultError(said(error)) from error
        known = isinstance(error, RuntimeError | CudaError)
        if known or type(error).__name__ in REFUSALS:
            raise UnsupportedPointError(said(error)) from error
        raise


def is_broken(device: torch.device) -> bool:
    """Return whether every call fails from now on, as after an illegal address."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
