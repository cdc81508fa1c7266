"""The CUDA kernels where no nvcc is: compiled by NVRTC, launched by the driver.

The kernels are those of ``kvsim_cuda.cu``. What its host part does is done here, in
Python: the loop of single copies then takes the host a little longer for each, which a
profile can tell by its ``cuda_kernels``.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from calibrate.kernels.cuda_build import SOURCE
from calibrate.kernels.cuda_library import CudaError

if TYPE_CHECKING:
    from calibrate.kernels.cuda_driver import Driver
    from calibrate.kernels.cuda_library import CopyBatch, PagedArgs, SwapPlan
    from calibrate.kernels.nvrtc import Cubin, Nvrtc

THREADS = 128
PARTITION = 512
HEAD_DIMS = (64, 128, 256)
_TYPES = ("__half", "__nv_bfloat16")
_WORDS = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 16: "uint4"}
_INVALID = 1


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
    """Return the device code of all kernels; see `Nvrtc.compile`."""
    source = SOURCE.read_text(encoding="utf-8")
    return compiler.compile(source, capability, kernel_names())


class NvrtcKernels:
    """The interface of `CudaLibrary` over device code and a driver.

    Parameters
    ----------
    cubin
        From `compile_kernels`.
    driver
        That loads and launches it.
    compiler
        Its name and version, for provenance.
    """

    def __init__(self, cubin: Cubin, driver: Driver, compiler: str) -> None:
        self.compiler = compiler
        self._cubin = cubin
        self._driver = driver
        self._functions: dict[str, int] = {}

    @property
    def has_batch_copy(self) -> bool:
        """Whether the driver has batched copies (12.8 and newer)."""
        return self._driver.has_batch_copy

    def swap_blocks_loop(self, plan: SwapPlan, stream: int) -> None:
        """Copy page by page, one asynchronous copy each; blocks the host meanwhile."""
        size, copy = plan.page_bytes, self._driver.copy
        pairs = list(zip(plan.pairs[::2], plan.pairs[1::2], strict=True))
        for source, target in zip(plan.sources, plan.targets, strict=True):
            for first, second in pairs:
                copy(target + second * size, source + first * size, size, stream)

    def copy_batch(self, batch: CopyBatch, stream: int) -> None:
        """Copy all descriptors in one call, not on the legacy default stream, 0."""
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
        """Copy pairs of blocks in every layer; see `CudaLibrary.copy_blocks`."""
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
        """Attend with one query token a sequence; version 1, or 2 with partitions."""
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
