"""Which compiler makes the CUDA kernels: nvcc where it works, else NVRTC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrate.kernels.cuda_build import CudaBuildError, build_library
from calibrate.kernels.cuda_driver import CudaDriver
from calibrate.kernels.cuda_library import CudaLibrary
from calibrate.kernels.cuda_nvrtc import NvrtcKernels, compile_kernels
from calibrate.kernels.nvrtc import Nvrtc, find_nvrtc

if TYPE_CHECKING:
    from calibrate.kernels.cuda_library import CudaKernels


def cuda_kernels(capability: int) -> CudaKernels:
    """Return the kernels for one compute capability, compiled if need be.

    Parameters
    ----------
    capability
        Such as 90 for sm_90.

    Raises
    ------
    CudaBuildError
        When neither compiler is here, or both fail: what each said.
    OSError
        When what was built cannot be loaded, for want of a driver, say.
    """
    try:
        return CudaLibrary(build_library(capability))
    except CudaBuildError as error:
        path = find_nvrtc()
        if path is None:
            raise
        try:
            return by_nvrtc(path, capability)
        except CudaBuildError as other:
            raise CudaBuildError(f"{error}; {other}") from other


def by_nvrtc(path: str, capability: int) -> CudaKernels:
    """Return the kernels compiled by the NVRTC at `path`; raises as `cuda_kernels`."""
    compiler = Nvrtc(path)
    cubin = compile_kernels(compiler, capability)
    return NvrtcKernels(cubin, CudaDriver(), f"NVRTC {compiler.version}")
