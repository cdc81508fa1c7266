"""The CUDA kernels where no nvcc is: compiled by NVRTC, launched by the driver.

The kernels are those of ``kvsim_cuda.cu``. What its host part does is done here, in
Python: the loop of single copies then takes the host a little longer for each, which a
profile can tell by its ``cuda_kernels``.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from calibrate.kernels.cuda_compile import (
    SOURCE,
    CudaBuildError,
    Nvrtc,
    build_library,
    find_nvrtc,
)
from calibrate.kernels.cuda_library import CudaError, CudaLibrary, remedy_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibrate.kernels.cuda_compile import Cubin
    from calibrate.kernels.cuda_library import (
        CopyBatch,
        CudaKernels,
        PagedArgs,
        SwapPlan,
    )

_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"""
THREADS = 128
PARTITION = 512
HEAD_DIMS = (64, 128, 256)
_TYPES = ("__half", "__nv_bfloat16")
_WORDS = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 16: "uint4"}
_INVALID = 1


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, hints of two places, flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """Calls into ``libcuda.so.1`` that raise `CudaError`.

    OSError where there is none.
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
        """Whether batched copies are there: CUDA 12.8 and newer."""
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
        """Launch over (grid, threads, dynamic shared bytes).

        Arguments are of ctypes.
        """
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
        """Enqueue many copies at once, not on the legacy default stream."""
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


def _paged(dtype: int, head_dim: int, partitioned: bool) -> str:
    split = str(partitioned).lower()
    return f"kvsim::paged_attention_kernel<{_TYPES[dtype]}, {head_dim}, {split}>"


def _reduce(dtype: int, head_dim: int) -> str:
    return f"kvsim::reduce_partitions_kernel<{_TYPES[dtype]}, {head_dim}>"


def _copy(word_bytes: int) -> str:
    return f"kvsim::copy_blocks_kernel<{_WORDS[word_bytes]}>"


def kernel_names() -> list[str]:
    """Return every kernel that can be asked for, as the compiler is told."""
    attention = [
        name
        for dtype in range(len(_TYPES))
        for head_dim in HEAD_DIMS
        for name in (
            _paged(dtype, head_dim, False),
            _paged(dtype, head_dim, True),
            _reduce(dtype, head_dim),
        )
    ]
    return attention + [_copy(width) for width in _WORDS]


def compile_kernels(compiler: Nvrtc, capability: int) -> Cubin:
    source = SOURCE.read_text(encoding="utf-8")
    return compiler.compile(source, capability, kernel_names())


class NvrtcKernels:
    """The interface of `CudaLibrary` over device code and a driver."""

    def __init__(self, cubin: Cubin, driver: CudaDriver, compiler: str) -> None:
        self.compiler = compiler
        self._cubin = cubin
        self._driver = driver
        self._functions: dict[str, int] = {}

    @property
    def has_batch_copy(self) -> bool:
        return self._driver.has_batch_copy

    def swap_blocks_loop(self, plan: SwapPlan, stream: int) -> None:
        size, copy = plan.page_bytes, self._driver.copy
        pairs = list(zip(plan.pairs[::2], plan.pairs[1::2], strict=True))
        for source, target in zip(plan.sources, plan.targets, strict=True):
            for first, second in pairs:
                copy(target + second * size, source + first * size, size, stream)

    def copy_batch(self, batch: CopyBatch, stream: int) -> None:
        if batch.num_descriptors:
            self._driver.copy_batch(batch, stream)

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
        if num_layers == 0 or num_pairs == 0:
            return
        if word_bytes not in _WORDS or page_bytes % word_bytes:
            raise CudaError(
                f"copy_blocks takes words of {', '.join(map(str, _WORDS))} bytes that"
                f" divide a page; got {word_bytes} in {page_bytes}",
                _INVALID,
            )
        words = page_bytes // word_bytes
        arguments = (
            *map(ctypes.c_uint64, (keys, values, address)),
            ctypes.c_int64(words),
        )
        shape = ((num_layers, num_pairs, 1), min(words, 1024), 0)
        self._driver.launch(self._function(_copy(word_bytes)), shape, arguments, stream)

    def paged_attention(self, args: PagedArgs, version: int, stream: int) -> None:
        if version not in {1, 2} or args.dtype not in {0, 1}:
            raise CudaError("paged_attention has versions 1 and 2", _INVALID)
        if args.num_seqs == 0:
            return
        if args.head_dim not in HEAD_DIMS:
            raise CudaError(f"paged_attention takes heads of {HEAD_DIMS}", _INVALID)
        function = self._function(_paged(args.dtype, args.head_dim, version == 2))
        rows = (args.num_heads, args.num_seqs)
        if version == 1:
            shared_bytes = 4 * args.max_context_len
            self._driver.allow_shared(function, shared_bytes)
            shape = ((*rows, 1), THREADS, shared_bytes)
            self._driver.launch(function, shape, (args,), stream)
            return
        parts = max(1, -(-args.max_context_len // PARTITION))
        shape = ((*rows, parts), THREADS, 4 * PARTITION)
        self._driver.launch(function, shape, (args,), stream)
        self._driver.launch(
            self._function(_reduce(args.dtype, args.head_dim)),
            ((*rows, 1), THREADS, 0),
            (args, ctypes.c_int(parts)),
            stream,
        )

    def _function(self, name: str) -> int:
        if name not in self._functions:
            lowered = self._cubin.names[name]
            self._functions[name] = self._driver.load(self._cubin.image, lowered)
        return self._functions[name]


def cuda_kernels(capability: int) -> CudaKernels:
    """Return the kernels for one capability: of nvcc where it works, else of NVRTC.

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
    compiler = Nvrtc(path)
    cubin = compile_kernels(compiler, capability)
    return NvrtcKernels(cubin, CudaDriver(), f"NVRTC {compiler.version}")
