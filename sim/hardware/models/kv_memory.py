"""KV memory of a number of tokens: bytes over all ranks, and pools of engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cache.errors import CacheConfigError
from cache.v1.planning import plan_groups
from cache.v1.sliding_window import SlidingWindow
from cache.v1.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    kind_in_words,
)
from sim.errors import CapacityError
from sim.hardware.capacity.arguments import (
    check_parallelism,
    check_positive,
    parse_engine_version,
    resolve_dtypes,
)
from sim.hardware.capacity.kernels import checkpoint_options
from sim.hardware.capacity.keywords import DEFAULT_ENGINE_VERSION, estimate_capacity
from sim.hardware.gpus import GIB, load_gpu
from sim.hardware.models.architecture import KV_CACHE_DTYPE_BYTES, dtype_bytes
from sim.hardware.models.bundled import load_model
from sim.hardware.models.kv_layers import KVCacheOptions, kv_cache_layers

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout, KVCacheSpec
    from sim.hardware.models.architecture import ModelArchitecture


@dataclass(frozen=True, slots=True)
class LayersMemory:
    """Blocks of a prefix that layers of one kind keep.

    Parameters
    ----------
    kind
        In words.
    num_groups, num_layers
        Block tables, and layers of all of them.
    block_size
        Tokens of their blocks.
    block_bytes
        Of one block of each group, over all ranks; a pool cuts blocks for its widest
        group, so short groups take as much.
    hit_needs
        Which of them a hit needs, in words.
    keeps_all
        Whether those are all blocks of the prefix.
    has_state
        Whether a block is a state.
    tail_tokens
        Tokens before the end of a hit whose blocks it needs, where it does not need
        all; None where whatever it needs is always kept.
    """

    kind: str
    num_groups: int
    num_layers: int
    block_size: int
    block_bytes: int
    hit_needs: str
    keeps_all: bool
    has_state: bool
    tail_tokens: int | None

    @property
    def token_bytes(self) -> float:
        """Bytes of a token that a block covers."""
        return self.block_bytes / self.block_size

    def gib(self, num_tokens: float) -> float:
        return num_tokens * self.token_bytes / GIB


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory of one model's KV entries.

    Parameters
    ----------
    model, kv_cache_dtype, tensor_parallel_size
        As an engine is given them.
    token_bytes
        Of all layers that keep every token, over all ranks: entries that ranks have
        alike count once for each.
    gpu
        Of one engine, or None.
    pool_tokens
        Tokens that its pool holds, in layers that keep every token alone.
    layers
        Kinds of layers; empty where all keep every token.
    hit_tokens
        Every hit is a multiple of it, where only some layers keep every token; None
        where all do, or where all are counted as if they did.
    """

    model: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    token_bytes: int
    gpu: str | None = None
    pool_tokens: int | None = None
    layers: tuple[LayersMemory, ...] = ()
    hit_tokens: int | None = None

    def gib(self, num_tokens: float) -> float:
        return num_tokens * self.token_bytes / GIB

    @property
    def tails(self) -> tuple[int, ...]:
        """Tokens that must be kept before the end of a hit, by kind."""
        if self.hit_tokens is None:
            return ()
        return tuple(
            each.tail_tokens for each in self.layers if each.tail_tokens is not None
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, without kinds of layers."""
        told = asdict(self)
        del told["layers"]
        if self.hit_tokens is None:
            del told["hit_tokens"]
        return told


def kv_memory(
    model: str,
    gpu: str | None = None,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> KvMemory:
    """Return the bytes of a model's KV entries, and the capacity of an engine's pool.

    A model without a layer that keeps every token is counted as if all of them did.
    """
    architecture = load_model(model)
    check_positive("tensor_parallel_size", tensor_parallel_size)
    check_parallelism(architecture, tensor_parallel_size)
    _, kv_dtype = resolve_dtypes(architecture, dtype, kv_cache_dtype)
    itemsize = KV_CACHE_DTYPE_BYTES.get(kv_dtype) or dtype_bytes(kv_dtype)
    a_rank = architecture.kv_bytes_per_token(tensor_parallel_size, itemsize)
    token_bytes, hit_tokens = a_rank * tensor_parallel_size, None
    options = KVCacheOptions(
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_dtype=kv_dtype,
        **checkpoint_options(
            architecture,
            None if gpu is None else load_gpu(gpu),
            parse_engine_version(DEFAULT_ENGINE_VERSION),
        ),
    )
    layout = _layout(architecture, options)
    layers = _kinds(layout, tensor_parallel_size)
    full = [each for each in layers if each.keeps_all]
    if full:
        token_bytes = sum(each.block_bytes // each.block_size for each in full)
        hit_tokens = layout.cache_hit_alignment
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
        if full:
            pool = estimate.num_gpu_blocks * layout.bytes_per_block
            pool_tokens = pool * tensor_parallel_size // token_bytes
    return KvMemory(
        model=architecture.name,
        kv_cache_dtype=kv_dtype,
        tensor_parallel_size=tensor_parallel_size,
        token_bytes=token_bytes,
        gpu=gpu,
        pool_tokens=pool_tokens,
        layers=layers,
        hit_tokens=hit_tokens,
    )


def _layout(model: ModelArchitecture, options: KVCacheOptions) -> KVCacheLayout:
    try:
        plan = plan_groups(
            kv_cache_layers(model, options),
            block_size=options.block_size,
            max_model_len=model.max_position_embeddings,
            max_in_flight_tokens=0,
        )
    except CacheConfigError as error:
        raise CapacityError(f"{model.name}: {error}") from error
    return plan.layout


def _kinds(layout: KVCacheLayout, num_ranks: int) -> tuple[LayersMemory, ...]:
    """Return the kinds of layers that share a pool, or none where there is one."""
    if layout.keeps_all_blocks:
        return ()
    alike: dict[KVCacheSpec, list[int]] = {}
    for group in layout.groups:
        alike.setdefault(group.spec, []).append(len(group.layer_names))
    return tuple(
        LayersMemory(
            kind=kind_in_words(spec),
            num_groups=len(sizes),
            num_layers=sum(sizes),
            block_size=spec.block_size,
            block_bytes=layout.bytes_per_block * num_ranks * len(sizes),
            hit_needs=_hit_needs(spec),
            keeps_all=isinstance(spec, FullAttentionSpec | MLAAttentionSpec),
            has_state=isinstance(spec, MambaSpec),
            tail_tokens=_tail_tokens(spec),
        )
        for spec, sizes in alike.items()
    )


def _hit_needs(spec: KVCacheSpec) -> str:
    if isinstance(spec, MambaSpec):
        return "the state at its end"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "the blocks of its last chunk"
    tail = _tail_tokens(spec)
    return f"the last {(tail or 0) // spec.block_size} blocks" if tail else "all blocks"


def _tail_tokens(spec: KVCacheSpec) -> int | None:
    if isinstance(spec, SlidingWindowSpec):
        window = SlidingWindow(spec.sliding_window, spec.block_size)
        return max(window.num_blocks_for_hit, 1) * spec.block_size
    return spec.block_size if isinstance(spec, MambaSpec) else None
