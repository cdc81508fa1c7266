"""Which KV cache the layers of a model need, and how groups of them share one pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

ELEMENT_BYTES: dict[str, int] = {
    "uint8": 1,
    "int8": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}
"""Bytes of an element of a cache, by its type; FP8 and FP4 are kept as ``uint8``."""


class MambaCacheMode(Enum):
    """When states of Mamba and linear-attention layers are kept."""

    NONE = "none"
    """One state a request, overwritten as it grows: without prefix caching."""
    ALIGN = "align"
    """The state at the end of every block that a step stops at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The cache of one layer.

    Parameters
    ----------
    block_size
        Tokens a block.
    page_size_bytes
        Bytes of one block of one layer, padding included.
    is_draft
        Whether the layer is a drafter's; it may share a group with the target's.
    """

    block_size: int
    page_size_bytes: int
    is_draft: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token that a block covers.

    Parameters
    ----------
    num_kv_heads, head_size
        Of one rank.
    dtype
        Of an element, as the engine names it.
    """

    num_kv_heads: int
    head_size: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that reads all tokens.

    Parameters
    ----------
    sliding_window, attention_chunk_size
        What the layer reads in truth, where the hybrid manager is off and its blocks
        are kept all the same.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(AttentionSpec):
    """A layer that keeps one latent vector a token, on every rank alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer that reads the last `sliding_window` tokens, the token included."""

    sliding_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer that reads what precedes a token in its chunk of fixed position."""

    attention_chunk_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer with a state: Mamba, Mamba2, gated delta net.

    Parameters
    ----------
    shapes, dtypes
        Of the state's arrays on one rank.
    mamba_cache_mode
        When states are kept.
    num_checkpoint_blocks
        1 where a prefill can write a second state, in the middle of a chunk.
    checkpoint_alignment
        Tokens after which it can write one, counted from the chunk's first.
    num_speculative_blocks
        States that a request holds for its draft tokens, one each.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_cache_mode: MambaCacheMode
    num_checkpoint_blocks: int = 0
    checkpoint_alignment: int | None = None
    num_speculative_blocks: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, without padding."""
        arrays = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * ELEMENT_BYTES[dtype] for shape, dtype in arrays)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one block table between them.

    Parameters
    ----------
    layer_names
        In order of depth.
    spec
        Of each of them; of the first, where their pages differ in size.
    bytes_per_block
        Of one block of all of its layers.
    is_eagle_group
        Whether layers of a drafter are among them.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    bytes_per_block: int
    is_eagle_group: bool = False


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Groups, and the pool that they draw their blocks from.

    Parameters
    ----------
    groups
        In the order in which they are served.
    num_blocks
        Size of the pool, the null block included.
    bytes_per_block
        Of one block id over all layers of the widest group, on one rank.
    hash_block_size
        Tokens a block hash covers.
    scheduler_block_size
        Tokens after which blocks of all groups end.
    cache_hit_alignment
        Every cached prefix is a multiple of it.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/kv_cache_interface.py`` (`KVCacheConfig`) and
    ``vllm/v1/core/kv_cache_utils.py`` (`resolve_kv_cache_block_sizes`).
    """

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    bytes_per_block: int
    hash_block_size: int
    scheduler_block_size: int
    cache_hit_alignment: int

    @classmethod
    def of_one_group(
        cls, num_blocks: int, block_size: int, sliding_window: int | None = None
    ) -> KVCacheLayout:
        """Return a pool for layers of one kind, whose bytes do not matter."""
        spec: KVCacheSpec = (
            FullAttentionSpec(block_size=block_size, **_NO_BYTES)
            if sliding_window is None
            else SlidingWindowSpec(
                block_size=block_size, sliding_window=sliding_window, **_NO_BYTES
            )
        )
        group = KVCacheGroup(("layers",), spec, 0)
        return cls((group,), num_blocks, 0, block_size, block_size, block_size)

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block."""
        return min(group.spec.block_size for group in self.groups)

    @property
    def has_hits_inside_blocks(self) -> bool:
        """Whether a hit may end inside a block, which is then copied."""
        return self.cache_hit_alignment < self.scheduler_block_size

    @property
    def keeps_all_blocks(self) -> bool:
        """Whether it has one group, of layers that read all tokens."""
        specs = [group.spec for group in self.groups]
        return len(specs) == 1 and isinstance(
            specs[0], FullAttentionSpec | MLAAttentionSpec
        )


def kind_in_words(spec: KVCacheSpec) -> str:
    """Return which layers a spec is for."""
    if isinstance(spec, MambaSpec):
        return f"a state (kept: {spec.mamba_cache_mode.value})"
    if isinstance(spec, SlidingWindowSpec):
        return f"sliding window of {spec.sliding_window:,}"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"chunks of {spec.attention_chunk_size:,}"
    return (
        "latent attention" if isinstance(spec, MLAAttentionSpec) else "full attention"
    )


_NO_BYTES: dict[str, Any] = {
    "page_size_bytes": 0,
    "num_kv_heads": 0,
    "head_size": 0,
    "dtype": "",
}
