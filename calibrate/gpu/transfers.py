"""Transfers between host and device, and block copies on the device."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from calibrate.harness.device import UnsupportedPointError
from calibrate.kernels import torch_ops
from calibrate.kernels.cuda_library import CudaKernels, copy_batch, swap_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from calibrate.measurement import Point

    Call = Callable[[], None]

KERNEL_SHARE = 8
"""Part of the multiprocessors that the copy kernel occupies: one in so many."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A region of the device and two of the host, moved between in pages."""

    device_bytes: Tensor
    """(n,) uint8 on the device."""
    pinned: Tensor
    """(n,) uint8 on the host, page-locked."""
    pageable: Tensor
    """(n,) uint8 on the host."""

    @property
    def host(self) -> dict[str, Tensor]:
        return {"pinned": self.pinned, "pageable": self.pageable}


class Transfers:
    """Calls that move pages between both regions, by variant."""

    def __init__(
        self, memory: Memory, library: CudaKernels | None, num_sms: int
    ) -> None:
        self.memory = memory
        self._library = library
        self._programs = max(1, num_sms // KERNEL_SHARE)
        self._back: torch.cuda.Stream | None = None

    def pairs(self, point: Point, generator: torch.Generator) -> list[tuple[int, int]]:
        """Return random pages of the source and of the target, none twice."""
        num_pages, page_bytes = point.values
        region = self.memory.device_bytes.numel()
        pages = region // page_bytes
        if num_pages > pages:
            raise UnsupportedPointError(
                f"{num_pages} pages do not fit the {pages} here"
            )
        first, second = (
            torch.randperm(pages, generator=generator)[:num_pages].tolist()
            for _ in range(2)
        )
        return list(zip(first, second, strict=True))

    def call(self, point: Point, backend: str, pairs: list[tuple[int, int]]) -> Call:
        """Return a function that enqueues a transfer by a backend on this stream.

        Of a transfer both ways, the first half of the pairs goes to the device.
        """
        at = point.curve
        host = (self.memory.host[at.text("memory")], point.values[1])
        direction = at.text("direction")
        if direction != "both":
            to_device = direction == "h2d"
            return self._one_way(at.variant, backend, host, pairs, to_device)
        half = (len(pairs) + 1) // 2
        there = self._one_way(at.variant, backend, host, pairs[:half], True)
        back = self._one_way(at.variant, backend, host, pairs[half:], False)
        return lambda: self._both(there, back)

    def _both(self, there: Call, back: Call) -> None:
        if self.memory.device_bytes.device.type != "cuda":
            there()
            back()
            return
        self._back = self._back or torch.cuda.Stream(self.memory.device_bytes.device)
        current = torch.cuda.current_stream(self.memory.device_bytes.device)
        self._back.wait_stream(current)
        with torch.cuda.stream(self._back):
            back()
        there()
        current.wait_stream(self._back)

    def _one_way(
        self,
        variant: str,
        backend: str,
        host: tuple[Tensor, int],
        pairs: list[tuple[int, int]],
        to_device: bool,
    ) -> Call:
        memory, page_bytes = host
        ends = (memory, self.memory.device_bytes)
        source, target = ends if to_device else ends[::-1]
        if backend == "torch":
            return _by_torch(source, target, pairs, page_bytes)
        if backend == "vllm":
            return _by_vllm(source, target, pairs, page_bytes)
        if backend == "triton":
            return self._by_kernel(source, target, pairs, page_bytes)
        if self._library is None:
            raise UnsupportedPointError("the CUDA kernels are not built here")
        planes = [(source.data_ptr(), target.data_ptr())]
        if variant == "loop":
            plan = swap_plan(planes, pairs, page_bytes, to_device)
            return _on_stream(source, target, self._library.swap_blocks_loop, plan)
        descriptors = copy_batch(planes, pairs, page_bytes)
        return _on_stream(source, target, self._library.copy_batch, descriptors)

    def _by_kernel(
        self,
        source: Tensor,
        target: Tensor,
        pairs: list[tuple[int, int]],
        page_bytes: int,
    ) -> Call:
        from calibrate.kernels.triton_copy import swap_words  # noqa: PLC0415

        if page_bytes % 4:
            raise UnsupportedPointError("the copy kernel moves pages of 32-bit words")
        words = [
            _paged(end, page_bytes).view(torch.int32)[None] for end in (source, target)
        ]
        device = self.memory.device_bytes.device
        table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(device)
        programs = self._programs
        return lambda: swap_words(words[0], words[1], table, programs)


def _paged(region: Tensor, page_bytes: int) -> Tensor:
    pages = region.numel() // page_bytes
    return region[: pages * page_bytes].view(pages, page_bytes)


def _by_torch(
    source: Tensor, target: Tensor, pairs: list[tuple[int, int]], page_bytes: int
) -> Call:
    pages, places = _paged(source, page_bytes), _paged(target, page_bytes)

    def call() -> None:
        for first, second in pairs:
            places[second].copy_(pages[first], non_blocking=True)

    return call


def _by_vllm(
    source: Tensor, target: Tensor, pairs: list[tuple[int, int]], page_bytes: int
) -> Call:
    """Call the engine's own ``swap_blocks``, which later releases gave a page size."""
    from vllm import _custom_ops  # noqa: PLC0415

    swap = getattr(_custom_ops, "swap_blocks", None)
    if swap is None:
        raise UnsupportedPointError("this release of vLLM has no swap_blocks")
    pages, places = _paged(source, page_bytes), _paged(target, page_bytes)
    mapping = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    sized = "block_size_in_bytes" in inspect.signature(swap).parameters
    extra = (page_bytes,) if sized else ()
    return lambda: swap(pages, places, *extra, mapping)


def _on_stream(
    source: Tensor, target: Tensor, enqueue: Callable[[Any, int], None], plan: object
) -> Call:
    """Return a call of the CUDA library on the stream that is current then."""
    device = source.device if source.device.type == "cuda" else target.device

    def call() -> None:
        enqueue(plan, torch.cuda.current_stream(device).cuda_stream)

    return call


def copy_call(
    pool: Tensor,
    pairs: list[tuple[int, int]],
    backend: str,
    library: CudaKernels | None,
) -> Call:
    """Return a function that copies pairs of blocks, none twice, in every layer.

    The pool is (num_layers, 2, num_blocks, 1, 1, elements of a page).
    """
    table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(pool.device)
    if backend == "torch":
        return lambda: torch_ops.copy_blocks(pool, pairs)
    if backend == "triton":
        from calibrate.kernels.triton_copy import copy_blocks  # noqa: PLC0415

        return lambda: copy_blocks(pool, table)
    if library is None:
        raise UnsupportedPointError("the CUDA kernels are not built here")
    return _copy_by_cuda(pool, table, library)


def _copy_by_cuda(pool: Tensor, table: Tensor, library: CudaKernels) -> Call:
    num_layers = pool.shape[0]
    planes = [
        torch.tensor([pool[layer, half].data_ptr() for layer in range(num_layers)])
        .to(pool.device)
        for half in range(2)
    ]  # fmt: skip
    page_bytes = pool[0, 0, 0].numel() * pool.element_size()
    caches = (planes[0].data_ptr(), planes[1].data_ptr(), num_layers)
    held = (pool, table, planes)  # addresses keep nothing alive

    def call() -> None:
        stream = torch.cuda.current_stream(held[0].device).cuda_stream
        pairs = (held[1].data_ptr(), held[1].shape[0])
        # the first generation moved elements, not wider words
        library.copy_blocks(caches, pairs, page_bytes, pool.element_size(), stream)

    return call
