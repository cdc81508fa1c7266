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
    """What KV entries of one model take.

    Parameters
    ----------
    model
        Its name.
    kv_cache_dtype
        Precision of the entries.
    tensor_parallel_size
        Ranks; entries that ranks have alike count once for each.
    token_bytes
        Bytes of a token over all layers and ranks, as if every layer looked back at
        all tokens.
    gpu
        The GPU of an engine that has this model, or None.
    pool_tokens
        Tokens that the pool of one such engine holds, or None.
    """

    model: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    token_bytes: int
    gpu: str | None = None
    pool_tokens: int | None = None

    def gib(self, num_tokens: float) -> float:
        """Return GiB of so many tokens."""
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
    """Return what KV entries of a model take, and what an engine's pool holds.

    Parameters
    ----------
    model, gpu
        As of `sim.hardware.capacity.estimate_capacity`; without a GPU no pool is known.
    block_size, tensor_parallel_size, dtype, kv_cache_dtype
        The same.

    Raises
    ------
    CapacityError, ConfigError
        As `sim.hardware.capacity.estimate_capacity`.
    """
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
