"""Attention of a step in all layers: planned once, as an engine prepares a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from calibrate.gpu.attention import PROGRAMS_PER_SM, Engines, attention_call
from calibrate.kernels import torch_ops
from calibrate.kernels.paged import PagedBatch, paged_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from calibrate.replay.packing import Packed
    from calibrate.replay.stack import Attend

    Kernel = Callable[[Tensor, PagedBatch], None]


def step_batch(packed: Packed, pool: Tensor, num_heads: int) -> PagedBatch:
    """Return the step over the first layer's caches, its queries yet to come."""
    shape = (packed.num_tokens, num_heads, pool.shape[-1])
    query = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    tables = torch.from_numpy(packed.tables).to(pool.device, non_blocking=True)
    caches = (pool[0, 0], pool[0, 1])
    return paged_batch(query, caches, tables, packed.query_lens, packed.context_lens)


def paged_attend(
    variant: str, batch: PagedBatch, pool: Tensor, engines: Engines
) -> Attend:
    """Return attention over each layer's caches.

    Parameters
    ----------
    variant
        As `calibrate.gpu.attention.attention_call` names it. "split_kv", "mixed" and
        "sdpa" are planned once a step; the others once a layer.
    batch
        Of `step_batch`.
    pool
        All layers.
    engines
        What variants need beside the batch.
    """
    kernel = _kernel(variant, batch, engines)

    def attend(layer: int, query: Tensor) -> Tensor:
        here = replace(
            batch,
            query=query,
            key_cache=pool[layer, 0],
            value_cache=pool[layer, 1],
        )
        if kernel is None:
            call, out = attention_call(variant, here, engines)
            call()
            return out
        out = torch.empty_like(query)
        kernel(out, here)
        return out

    return attend


def _kernel(variant: str, batch: PagedBatch, engines: Engines) -> Kernel | None:
    """Return a kernel with its plan; None for those that plan a layer at a time."""
    if variant == "sdpa":
        return torch_ops.attention
    if variant == "mixed":
        from calibrate.kernels.triton_mixed import (  # noqa: PLC0415
            paged_mixed,
            plan_mixed,
        )

        tiles = plan_mixed(batch)
        return lambda out, here: paged_mixed(out, here, tiles)
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
    return lambda out, here: paged_decode(out, here, plan, workspace)
