"""Swaps and copies of a step, by the kernels that an engine has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from calibrate.gpu.transfers import copy_call
from calibrate.kernels import torch_ops
from calibrate.kernels.cuda_library import copy_batch, swap_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from calibrate.kernels.cuda_library import CudaKernels
    from calibrate.replay.log import Pairs, Step

    Call = Callable[[], None]


class Moves:
    """Swaps and copies between a pool and its host counterpart.

    Parameters
    ----------
    pool
        (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), the GPU's.
    host_pool
        The same of the CPU's blocks, pinned where the pool is on a GPU.
    library
        The CUDA kernels, or None: torch copies then.
    swap_variant
        "loop", one copy a page, or "batch".
    copy_backend
        "cuda", "triton" or "torch".
    """

    def __init__(
        self,
        pool: Tensor,
        host_pool: Tensor,
        library: CudaKernels | None,
        swap_variant: str,
        copy_backend: str,
    ) -> None:
        self.pool = pool
        self.host_pool = host_pool
        self._library = library
        self._variant = swap_variant
        self._copy_backend = copy_backend

    @property
    def variants(self) -> dict[str, str]:
        """How blocks are moved."""
        swap = self._variant if self._library else "torch loop"
        return {"swap": swap, "copy": self._copy_backend}

    def calls(self, step: Step) -> list[Call]:
        """Return what moves the step's blocks: in, out, then copies, as workers do."""
        calls = []
        if step.swap_in:
            calls.append(self._swap(self.host_pool, self.pool, step.swap_in, True))
        if step.swap_out:
            calls.append(self._swap(self.pool, self.host_pool, step.swap_out, False))
        if step.copies:
            backend = self._copy_backend
            pairs = list(step.copies)
            calls.append(copy_call(self.pool, pairs, backend, self._library))
        return calls

    def _swap(
        self, source: Tensor, target: Tensor, pairs: Pairs, to_device: bool
    ) -> Call:
        library = self._library
        if library is None:
            return lambda: torch_ops.swap_blocks(source, target, pairs)
        planes = [
            (source[layer, half].data_ptr(), target[layer, half].data_ptr())
            for layer in range(source.shape[0])
            for half in range(2)
        ]
        page_bytes = source[0, 0, 0].numel() * source.element_size()
        device = self.pool.device
        if self._variant == "batch" and library.has_batch_copy:
            batch = copy_batch(planes, pairs, page_bytes)
            return lambda: library.copy_batch(batch, _stream(device))
        plan = swap_plan(planes, pairs, page_bytes, to_device)
        return lambda: library.swap_blocks_loop(plan, _stream(device))


def _stream(device: torch.device) -> int:
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream
