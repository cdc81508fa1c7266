"""The CUDA driver through ctypes: as much of it as kernels without a host part need.

Each call returns a ``CUresult`` that is checked here. The context is the one that is
current, torch's.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

from calibrate.kernels.cuda_library import CudaError, remedy_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibrate.kernels.cuda_library import CopyBatch

_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"""


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, hints of two places, flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class Driver(Protocol):
    """What `NvrtcKernels` needs of a driver; errors are raised as `CudaError`."""

    @property
    def has_batch_copy(self) -> bool:
        """Whether batched copies are there."""
        ...

    def load(self, image: bytes, name: bytes) -> int:
        """Return the address of a kernel in device code."""
        ...

    def allow_shared(self, function: int, num_bytes: int) -> None:
        """Let a kernel have so much dynamic shared memory."""
        ...

    def launch(
        self,
        function: int,
        shape: tuple[Sequence[int], int, int],
        arguments: Sequence[object],
        stream: int,
    ) -> None:
        """Launch a kernel over (grid, threads of a block, dynamic shared bytes)."""
        ...

    def copy(self, target: int, source: int, num_bytes: int, place: int) -> None:
        """Enqueue a copy between host and device; `place` is a stream."""
        ...

    def copy_batch(self, batch: CopyBatch, stream: int) -> None:
        """Enqueue many copies at once."""
        ...


class CudaDriver:
    """``libcuda.so.1``.

    Raises
    ------
    OSError
        Where there is no driver.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        # cuMemcpyAsync finds the direction by the addresses
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy = self._library.cuMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, size, pointer)
        self._batch = getattr(self._library, "cuMemcpyBatchAsync_v2", None)
        self._old_batch = getattr(self._library, "cuMemcpyBatchAsync", None)

    @property
    def has_batch_copy(self) -> bool:
        """Whether the driver has batched copies: CUDA 12.8 and newer."""
        return self._batch is not None or self._old_batch is not None

    def load(self, image: bytes, name: bytes) -> int:
        """Return the address of a kernel in device code, which stays loaded."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(
            self._library.cuModuleLoadData(ctypes.byref(module), image),
            "cuModuleLoadData",
        )
        found = self._library.cuModuleGetFunction(ctypes.byref(function), module, name)
        self._check(found, "cuModuleGetFunction")
        return function.value or 0

    def allow_shared(self, function: int, num_bytes: int) -> None:
        """Let a kernel have so much dynamic shared memory."""
        code = self._library.cuFuncSetAttribute(
            ctypes.c_void_p(function), _MAX_DYNAMIC_SHARED, num_bytes
        )
        self._check(code, "cuFuncSetAttribute")

    def launch(
        self,
        function: int,
        shape: tuple[Sequence[int], int, int],
        arguments: Sequence[object],
        stream: int,
    ) -> None:
        """Launch a kernel; `arguments` are ctypes values."""
        grid, threads, shared_bytes = shape
        addresses = [ctypes.addressof(value) for value in arguments]  # type: ignore[arg-type]
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        code = self._library.cuLaunchKernel(
            ctypes.c_void_p(function),
            *map(ctypes.c_uint, grid),
            *map(ctypes.c_uint, (threads, 1, 1, shared_bytes)),
            ctypes.c_void_p(stream),
            table,
            None,
        )
        self._check(code, "cuLaunchKernel")

    def copy(self, target: int, source: int, num_bytes: int, place: int) -> None:
        """Enqueue a copy; the driver finds the direction by the addresses."""
        code = self._copy(target, source, num_bytes, place)
        if code:
            self._check(code, "cuMemcpyAsync")

    def copy_batch(self, batch: CopyBatch, stream: int) -> None:
        """Enqueue many copies at once, on a stream that is not the legacy default."""
        attributes = CopyAttributes(source_access_order=_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        count = ctypes.c_size_t(batch.num_descriptors)
        common = (
            *(batch.targets, batch.sources, batch.sizes, count),
            *(ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)),
        )
        place = ctypes.c_void_p(stream)
        if self._batch is not None:
            code = self._batch(*common, place)
        elif self._old_batch is not None:
            code = self._old_batch(*common, ctypes.byref(failed), place)
        else:
            code = 801
        self._check(code, "cuMemcpyBatchAsync")

    def _check(self, code: int, what: str) -> None:
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode()
        raise CudaError(f"{what} failed: {said} ({code}); {remedy_for(code)}", code)
