"""The CUDA C++ kernels, called through ctypes: addresses in, an error or nothing out.

Nothing here knows torch: a stream, a plane or a tensor is its address, an integer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NO_DRIVER = (35, 100)
"""cudaErrorInsufficientDriver (as without any driver), cudaErrorNoDevice."""
NOT_SUPPORTED = (36, 801)
"""cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported."""


class CudaError(UserError):
    """A call into CUDA failed; `code` is the ``cudaError_t``."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class PagedArgs(ctypes.Structure):
    """Arguments of ``kvsim_paged_attention``; see the source for shapes."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("maxima", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("max_context_len", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Addresses of a swap, laid out for C before anything is timed."""

    sources: ctypes.Array[ctypes.c_void_p]
    targets: ctypes.Array[ctypes.c_void_p]
    pairs: ctypes.Array[ctypes.c_int64]
    num_pairs: int
    page_bytes: int
    to_device: bool


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Descriptors of a batched copy: one source, target and size each."""

    sources: ctypes.Array[ctypes.c_void_p]
    targets: ctypes.Array[ctypes.c_void_p]
    sizes: ctypes.Array[ctypes.c_size_t]

    @property
    def num_descriptors(self) -> int:
        return len(self.sizes)


def swap_plan(
    planes: Sequence[tuple[int, int]],
    pairs: Sequence[tuple[int, int]],
    page_bytes: int,
    to_device: bool,
) -> SwapPlan:
    """Return the plan of a swap, one copy per plane and pair.

    Planes are addresses (source, target) of the keys, then the values, of each layer.
    """
    flat = [block for pair in pairs for block in pair]
    return SwapPlan(
        (ctypes.c_void_p * len(planes))(*(source for source, _ in planes)),
        (ctypes.c_void_p * len(planes))(*(target for _, target in planes)),
        (ctypes.c_int64 * len(flat))(*flat),
        len(pairs),
        page_bytes,
        to_device,
    )


def copy_batch(
    planes: Sequence[tuple[int, int]],
    pairs: Sequence[tuple[int, int]],
    page_bytes: int,
) -> CopyBatch:
    """Return one descriptor per plane and pair, in the order of `swap_plan`."""
    copies = [
        (source + first * page_bytes, target + second * page_bytes)
        for source, target in planes
        for first, second in pairs
    ]
    count = len(copies)
    return CopyBatch(
        (ctypes.c_void_p * count)(*(source for source, _ in copies)),
        (ctypes.c_void_p * count)(*(target for _, target in copies)),
        (ctypes.c_size_t * count)(*[page_bytes] * count),
    )


class CudaKernels(Protocol):
    """The CUDA kernels, by whichever compiler."""

    compiler: str
    """That compiled them, for provenance."""

    @property
    def has_batch_copy(self) -> bool:
        """Whether `copy_batch` can be called: CUDA 12.8 and newer."""

    def swap_blocks_loop(self, plan: SwapPlan, stream: int) -> None:
        """Copy page by page, one asynchronous copy each; blocks the host meanwhile."""

    def copy_batch(self, batch: CopyBatch, stream: int) -> None:
        """Copy all descriptors in one call, not on the legacy default stream, 0."""

    def copy_blocks(
        self,
        caches: tuple[int, int, int],
        pairs: tuple[int, int],
        page_bytes: int,
        word_bytes: int,
        stream: int,
    ) -> None:
        """Copy pairs of blocks in every layer: one launch over (layers, pairs).

        Parameters
        ----------
        caches
            Address of the table of key planes, of value planes (both on the device),
            and the number of layers.
        pairs
            Address of (num_pairs, 2) int64 on the device, and num_pairs.
        page_bytes
            Bytes of a block in one plane.
        word_bytes
            Width of an access: 1, 2, 4 or 16.
        stream
            Where to enqueue.
        """

    def paged_attention(self, args: PagedArgs, version: int, stream: int) -> None:
        """Attend with one query token a sequence; version 1, or 2 with partitions."""


def remedy_for(code: int) -> str:
    """Return the remedy for a ``cudaError_t`` or ``CUresult``."""
    if code in NO_DRIVER:
        return "run on a machine with an NVIDIA GPU and its driver"
    if code in NOT_SUPPORTED:
        return "update the driver to CUDA 12.8 or newer, or take --backend triton"
    return "an asynchronous fault may stem from an earlier call"


class CudaLibrary:
    """The loaded library; every method raises `CudaError` where CUDA refuses.

    Loading needs no driver. Methods enqueue on `stream` (a ``cudaStream_t`` as an
    integer) and do not wait.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.compiler = f"nvcc, runtime {self.runtime_version}"
        for name in ("kvsim_error_name", "kvsim_error_string"):
            getattr(self._library, name).restype = ctypes.c_char_p
        pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        signatures = {
            "kvsim_swap_blocks_loop": (
                *(pointer, pointer, number, pointer, number, wide, number, pointer),
            ),
            "kvsim_copy_batch": (pointer, pointer, pointer, ctypes.c_size_t, pointer),
            "kvsim_copy_blocks": (
                *(pointer, pointer, number, pointer, number, wide, number, pointer),
            ),
            "kvsim_paged_attention": (ctypes.POINTER(PagedArgs), number, pointer),
            "kvsim_device_count": (ctypes.POINTER(number),),
            "kvsim_driver_version": (ctypes.POINTER(number),),
        }
        for name, types in signatures.items():
            getattr(self._library, name).argtypes = types

    def _check(self, code: int, what: str) -> None:
        if code == 0:
            return
        name = self._library.kvsim_error_name(code).decode()
        text = self._library.kvsim_error_string(code).decode()
        message = f"{what} failed: {text} ({name}, {code}); {remedy_for(code)}"
        raise CudaError(message, code)

    @property
    def runtime_version(self) -> int:
        """CUDA runtime it was built with, such as 13000."""
        return int(self._library.kvsim_runtime_version())

    @property
    def has_batch_copy(self) -> bool:
        return bool(self._library.kvsim_has_batch_copy())

    def driver_version(self) -> int:
        """Return the newest CUDA version that the driver serves; 0 without a driver."""
        version = ctypes.c_int()
        code = self._library.kvsim_driver_version(ctypes.byref(version))
        self._check(code, "cudaDriverGetVersion")
        return version.value

    def device_count(self) -> int:
        count = ctypes.c_int()
        code = self._library.kvsim_device_count(ctypes.byref(count))
        self._check(code, "cudaGetDeviceCount")
        return count.value

    def swap_blocks_loop(self, plan: SwapPlan, stream: int) -> None:
        code = self._library.kvsim_swap_blocks_loop(
            plan.sources,
            plan.targets,
            len(plan.sources),
            plan.pairs,
            plan.num_pairs,
            plan.page_bytes,
            int(plan.to_device),
            stream,
        )
        self._check(code, "swap_blocks")

    def copy_batch(self, batch: CopyBatch, stream: int) -> None:
        code = self._library.kvsim_copy_batch(
            batch.targets, batch.sources, batch.sizes, batch.num_descriptors, stream
        )
        self._check(code, "cudaMemcpyBatchAsync")

    def copy_blocks(
        self,
        caches: tuple[int, int, int],
        pairs: tuple[int, int],
        page_bytes: int,
        word_bytes: int,
        stream: int,
    ) -> None:
        keys, values, num_layers = caches
        address, num_pairs = pairs
        code = self._library.kvsim_copy_blocks(
            keys, values, num_layers, address, num_pairs, page_bytes, word_bytes, stream
        )
        self._check(code, "copy_blocks")

    def paged_attention(self, args: PagedArgs, version: int, stream: int) -> None:
        code = self._library.kvsim_paged_attention(ctypes.byref(args), version, stream)
        self._check(code, f"paged_attention_v{version}")
