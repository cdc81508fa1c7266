"""KV memory of a number of tokens: bytes over all ranks, and pools of engines."""

from __future__ import annotations

from dataclasses import dataclass

from sim.hardware.capacity.arguments import (
    check_parallelism,
    check_positive,
    resolve_dtypes,
)
from sim.hardware.capacity.estimate import estimate_capacity
from sim.hardware.gpus import GIB
from sim.hardware.models.architecture import KV_CACHE_DTYPE_BYTES, dtype_bytes
from sim.hardware.models.bundled import load_model


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What KV entries of one model take."""

    model: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    token_bytes: int
    """Over all layers, as if each looked back at all tokens, and over all ranks:
    entries that ranks have alike count once for each."""
    gpu: str | None = None
    pool_tokens: int | None = None
    """Tokens that the pool of one engine on such a GPU holds."""

    def gib(self, num_tokens: float) -> float:
        return num_tokens * self.token_bytes / GIB


def kv_memory(
    model: str,
    gpu: str | None = None,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> KvMemory:
    """Return what KV entries of a model take, and what an engine's pool holds."""
    architecture = load_model(model)
    check_positive("tensor_parallel_size", tensor_parallel_size)
    check_parallelism(architecture, tensor_parallel_size)
    _, kv_dtype = resolve_dtypes(architecture, dtype, kv_cache_dtype)
    itemsize = KV_CACHE_DTYPE_BYTES.get(kv_dtype) or dtype_bytes(kv_dtype)
    a_rank = architecture.kv_bytes_per_token(tensor_parallel_size, itemsize)
    pool_tokens = None
    if gpu is not None:
        estimate = estimate_capacity(
            architecture,
            gpu,
            tensor_parallel_size=tensor_parallel_size,
            block_size=block_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
        gpu, pool_tokens = estimate.gpu, estimate.kv_cache_tokens
    return KvMemory(
        model=architecture.name,
        kv_cache_dtype=kv_dtype,
        tensor_parallel_size=tensor_parallel_size,
        token_bytes=a_rank * tensor_parallel_size,
        gpu=gpu,
        pool_tokens=pool_tokens,
    )
