"""Attention variants: how each backend is called on a batch."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch

from calibrate.graphs import GRAPH_TOKENS
from calibrate.harness.device import UnsupportedPointError
from calibrate.kernels import torch_ops
from calibrate.kernels.cuda_library import CudaKernels, PagedArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from calibrate.kernels.paged import PagedBatch

    Call = Callable[[], None]
    Kernel = Callable[[Tensor, PagedBatch], None]

PROGRAMS_PER_SM = 4
"""Programs of the split decode that a multiprocessor holds at once."""
PARTITION = 512
"""Tokens of a partition of ``paged_attention_v2``."""
WORKSPACE_BYTES = 256 << 20
MAX_SPLITS = 32
"""Of a context in flash attention, where an engine captures graphs (vLLM's
``flash_attn_max_num_splits_for_cuda_graph``)."""
MAX_SHARED_BYTES = 220 << 10
"""Scores that ``paged_attention_v1`` keeps in shared memory, at most."""


class Engines:
    """Buffers of attention variants; `library` holds the CUDA kernels."""

    def __init__(
        self, device: torch.device, num_sms: int, library: CudaKernels | None
    ) -> None:
        self.num_sms = num_sms
        self.library = library
        self._device = device
        self._workspace: Tensor | None = None

    def workspace(self) -> Tensor:
        """Return FlashInfer's scratch memory: one for all, since calls run in turn."""
        if self._workspace is None:
            self._workspace = torch.empty(
                WORKSPACE_BYTES, dtype=torch.uint8, device=self._device
            )
        return self._workspace


def attention_call(
    variant: str, batch: PagedBatch, engines: Engines
) -> tuple[Call, Tensor]:
    """Return a function that enqueues one call, and its output (poisoned before).

    Variants are "split_kv", "mixed", "paged_v1", "paged_v2", "flashinfer", "flash_attn"
    (of vLLM), and "sdpa". Raises UnsupportedPointError where one cannot take the batch.
    """
    out = torch.full_like(batch.query, float("nan"))
    if variant == "split_kv":
        return _split_kv(out, batch, engines.num_sms), out
    if variant == "mixed":
        return _mixed(out, batch), out
    if variant in {"paged_v1", "paged_v2"} and engines.library is not None:
        return _paged(out, batch, int(variant[-1]), engines.library), out
    if variant == "flashinfer":
        return _flashinfer(out, batch, engines.workspace()), out
    if variant == "flash_attn":
        return _flash_attn(out, batch), out
    if variant == "sdpa":
        return lambda: torch_ops.attention(out, batch), out
    raise UnsupportedPointError(f"there is no attention variant {variant!r} here")


def _split_kv(out: Tensor, batch: PagedBatch, num_sms: int) -> Call:
    from calibrate.kernels.triton_decode import (  # noqa: PLC0415
        DecodeWorkspace,
        paged_decode,
        plan_decode,
    )

    if not batch.is_decode:
        raise UnsupportedPointError("split_kv takes one query token a sequence")
    plan = plan_decode(
        batch.context_lens,
        batch.num_kv_heads,
        PROGRAMS_PER_SM * num_sms,
        batch.query.device,
    )
    workspace = DecodeWorkspace(batch.query, plan)
    return lambda: paged_decode(out, batch, plan, workspace)


def _mixed(out: Tensor, batch: PagedBatch) -> Call:
    from calibrate.kernels.triton_mixed import (  # noqa: PLC0415
        paged_mixed,
        plan_mixed,
    )

    plan = plan_mixed(batch)
    return lambda: paged_mixed(out, batch, plan)


def _paged(out: Tensor, batch: PagedBatch, version: int, library: CudaKernels) -> Call:
    longest = max(batch.context_lens)
    if not batch.is_decode or batch.head_dim not in {64, 128, 256}:
        raise UnsupportedPointError(
            "paged_attention takes one query token a sequence and heads of 64, 128 or"
            f" 256; got heads of {batch.head_dim}"
        )
    if version == 1 and 4 * longest > MAX_SHARED_BYTES:
        raise UnsupportedPointError(
            f"scores of {longest} keys do not fit shared memory in paged_attention_v1"
        )
    rows = (batch.num_seqs, batch.num_heads, -(-longest // PARTITION))
    count = rows if version == 2 else (0,)
    float_options: dict[str, Any] = {
        "dtype": torch.float32,
        "device": batch.query.device,
    }
    sums = torch.empty(count, **float_options)
    maxima = torch.empty(count, **float_options)
    partial = torch.empty((*count, batch.head_dim), **float_options)
    args = PagedArgs(
        out=out.data_ptr(),
        query=batch.query.data_ptr(),
        key_cache=batch.key_cache.data_ptr(),
        value_cache=batch.value_cache.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        context_lens=batch.contexts.data_ptr(),
        partial=partial.data_ptr(),
        sums=sums.data_ptr(),
        maxima=maxima.data_ptr(),
        block_stride=batch.key_cache.stride(0),
        token_stride=batch.key_cache.stride(1),
        head_stride=batch.key_cache.stride(2),
        num_seqs=batch.num_seqs,
        num_heads=batch.num_heads,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        block_size=batch.block_size,
        max_blocks=batch.block_tables.stride(0),
        max_context_len=longest,
        scale=batch.head_dim**-0.5,
        dtype=int(batch.query.dtype == torch.bfloat16),
    )
    held = (out, batch, partial, sums, maxima)  # addresses keep nothing alive

    def call() -> None:
        stream = torch.cuda.current_stream(held[0].device).cuda_stream
        library.paged_attention(args, version, stream)

    return call


def _flashinfer(out: Tensor, batch: PagedBatch, workspace: Tensor) -> Call:
    """Plan FlashInfer's wrappers over the batch; planning is not timed."""
    import flashinfer  # noqa: PLC0415

    device = batch.query.device
    size = batch.block_size
    counts = [-(-length // size) for length in batch.context_lens]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    width = batch.block_tables.shape[1]
    held = torch.arange(width)[None, :] < torch.tensor(counts)[:, None]
    indices = batch.block_tables[held.to(device)].contiguous()
    last = [(length - 1) % size + 1 for length in batch.context_lens]
    pages = (
        starts.to(device),
        indices,
        torch.tensor(last, dtype=torch.int32).to(device),
    )
    heads = (batch.num_heads, batch.num_kv_heads, batch.head_dim)
    caches = (batch.key_cache, batch.value_cache)
    dtypes = {
        "q_data_type": batch.query.dtype,
        "kv_data_type": batch.key_cache.dtype,
    }
    if batch.is_decode:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=batch.group >= 4
        )
        decode.plan(*pages, *heads, size, **dtypes)
        return lambda: decode.run(batch.query, caches, out=out)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(batch.query_starts, *pages, *heads, size, causal=True, **dtypes)
    return lambda: prefill.run(batch.query, caches, out=out)


def _flash_attn(out: Tensor, batch: PagedBatch) -> Call:
    kernel = flash_attention(batch)
    return lambda: kernel(out, batch)


def flash_attention(batch: PagedBatch, longest: int | None = None) -> Kernel:
    """Plan vLLM's paged flash attention for all layers, as its v1 engine does.

    The third version is scheduled once a step, and cuts contexts into a fixed number of
    splits at most where an engine captures graphs: what a graph then allocates fits all
    steps. `longest` are the most keys that a graph may see; the batch's own by default.

    Source: vLLM 0.26 ``v1/attention/backends/flash_attn.py``
    (`FlashAttentionMetadataBuilder.build`).
    """
    from vllm import vllm_flash_attn  # noqa: PLC0415

    function = vllm_flash_attn.flash_attn_varlen_func
    chosen: dict[str, Any] = {**_flash_attn_version(function)}
    longest_query = max(batch.query_lens)
    longest = longest or max(batch.context_lens)
    if chosen.get("fa_version") == 3 and "num_splits" in _parameters(function):
        most = MAX_SPLITS if sum(batch.query_lens) <= GRAPH_TOKENS else 0
        chosen["num_splits"] = most
        chosen["scheduler_metadata"] = vllm_flash_attn.get_scheduler_metadata(
            batch_size=batch.num_seqs,
            max_seqlen_q=longest_query,
            max_seqlen_k=longest,
            num_heads_q=batch.num_heads,
            num_heads_kv=batch.num_kv_heads,
            headdim=batch.head_dim,
            cache_seqlens=batch.contexts,
            qkv_dtype=batch.key_cache.dtype,
            cu_seqlens_q=batch.query_starts,
            page_size=batch.block_size,
            causal=True,
            num_splits=most,
        )

    def kernel(out: Tensor, here: PagedBatch) -> None:
        function(
            q=here.query,
            k=here.key_cache,
            v=here.value_cache,
            out=out,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=longest_query,
            seqused_k=batch.contexts,
            max_seqlen_k=longest,
            softmax_scale=batch.head_dim**-0.5,
            causal=True,
            block_table=batch.block_tables,
            **chosen,
        )

    return kernel


def _flash_attn_version(function: Callable[..., object]) -> dict[str, int]:
    """Return the version that the engine takes here: left out, it would be the second.

    The helper that chooses it moved between releases.
    """
    if "fa_version" not in _parameters(function):
        return {}
    for place in ("v1.attention.backends", "attention.utils"):
        try:
            helper = importlib.import_module(f"vllm.{place}.fa_utils")
        except ImportError:
            continue
        version = helper.get_flash_attn_version()
        return {} if version is None else {"fa_version": int(version)}
    return {}


def _parameters(function: Callable[..., object]) -> Collection[str]:
    return inspect.signature(function).parameters
