"""Attention of a step over the paged pool, and the moves of its blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from calibrate.gpu.attention import (
    PROGRAMS_PER_SM,
    Engines,
    attention_call,
    flash_attention,
)
from calibrate.gpu.transfers import copy_call
from calibrate.kernels import torch_ops
from calibrate.kernels.cuda_library import copy_batch, swap_plan
from calibrate.kernels.paged import PagedBatch, paged_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from calibrate.kernels.cuda_library import CudaKernels
    from calibrate.replay.log import Pairs, Step
    from calibrate.replay.packing import Packed
    from calibrate.replay.stack import Attend

    Kernel = Callable[[Tensor, PagedBatch], None]
    Call = Callable[[], None]
    Caches = Sequence[tuple[Tensor, Tensor]]
    """Keys and values of each layer."""


def step_batch(packed: Packed, pool: Tensor, num_heads: int) -> PagedBatch:
    """Return the step over the first layer's caches, its queries yet to come."""
    shape = (packed.num_tokens, num_heads, pool.shape[-1])
    query = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    tables = torch.from_numpy(packed.tables).to(pool.device, non_blocking=True)
    caches = (pool[0, 0], pool[0, 1])
    return paged_batch(query, caches, tables, packed.query_lens, packed.context_lens)


def caches_of(pool: Tensor) -> Caches:
    return [(layer[0], layer[1]) for layer in pool]


def paged_attend(
    variant: str,
    batch: PagedBatch,
    caches: Caches,
    engines: Engines,
    out: Tensor | None = None,
) -> Attend:
    """Return attention over each layer's caches, into `out` where it is given.

    "split_kv", "mixed", "sdpa" and "flash_attn" are planned once a step, other variants
    of `calibrate.gpu.attention.attention_call` once a layer.
    """
    kernel = _kernel(variant, batch, engines)
    if kernel is None:

        def kernel(into: Tensor, here: PagedBatch) -> None:
            call, found = attention_call(variant, without_gaps(here), engines)
            call()
            into.copy_(found)

    return layered(kernel, batch, caches, out)


def layered(
    kernel: Kernel, batch: PagedBatch, caches: Caches, out: Tensor | None = None
) -> Attend:
    """Return a planned kernel as attention over each layer's caches."""

    def attend(layer: int, query: Tensor) -> Tensor:
        keys, values = caches[layer]
        here = replace(batch, query=query, key_cache=keys, value_cache=values)
        # not `empty_like`: queries may be a view with gaps
        into = query.new_empty(query.shape) if out is None else out
        kernel(into, here)
        return into

    return attend


def _kernel(variant: str, batch: PagedBatch, engines: Engines) -> Kernel | None:
    """Return a kernel with its plan; None for those that plan a layer at a time."""
    if variant == "flash_attn":
        return flash_attention(batch)
    if variant == "sdpa":
        return torch_ops.attention
    if variant == "mixed":
        from calibrate.kernels.triton_mixed import (  # noqa: PLC0415
            paged_mixed,
            plan_mixed,
        )

        tiles = plan_mixed(batch)
        return lambda out, here: paged_mixed(out, without_gaps(here), tiles)
    if variant != "split_kv" or not batch.is_decode:
        return None
    from calibrate.kernels.triton_decode import (  # noqa: PLC0415
        DecodeWorkspace,
        paged_decode,
        plan_decode,
    )

    device = batch.query.device
    programs = PROGRAMS_PER_SM * engines.num_sms
    plan = plan_decode(batch.context_lens, batch.num_kv_heads, programs, device)
    workspace = DecodeWorkspace(batch.query, plan)
    return lambda out, here: paged_decode(out, without_gaps(here), plan, workspace)


def without_gaps(batch: PagedBatch) -> PagedBatch:
    """Return the batch with queries as most kernels want them.

    Flash attention and plain torch take them as they lie, among keys and values.
    """
    return replace(batch, query=batch.query.contiguous())


class Moves:
    """Swaps and copies between a pool and its host counterpart.

    Parameters
    ----------
    pool, host_pool
        (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), the host's
        pinned where the pool is on a GPU.
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
        swap = self._variant if self._library else "torch loop"
        return {"swap": swap, "copy": self._copy_backend}

    def calls(self, step: Step) -> list[Call]:
        """Return the calls that move blocks: in, out, then copies, as workers do."""
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
