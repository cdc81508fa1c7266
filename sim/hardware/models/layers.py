"""The memory of a layer: attention heads, or the shape of a state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

STATE_DTYPES = ("float32", "bfloat16", "float16")
"""Precisions that states are kept in."""


class LayerKind(Enum):
    """How a layer mixes tokens, and so what it remembers of them."""

    FULL_ATTENTION = "full attention"
    """Reads keys and values of all tokens."""
    SLIDING_ATTENTION = "sliding window"
    """Reads those of the last tokens."""
    CHUNKED_ATTENTION = "chunked local attention"
    """Reads those before it in a chunk of fixed position."""
    LATENT_ATTENTION = "latent attention"
    """Reads one latent vector of every token (MLA)."""
    MAMBA2 = "Mamba2"
    """Reads a state."""
    GATED_DELTA_NET = "gated delta net"
    """Reads a state."""
    MLP = "MLP"
    """Mixes no tokens: the layer is an MLP alone (Nemotron-H)."""

    @property
    def is_attention(self) -> bool:
        """Whether the layer remembers something of every token that it reads."""
        return self in _ATTENTION

    @property
    def has_state(self) -> bool:
        """Whether the layer remembers a state, whatever the number of tokens."""
        return self in _STATES


_ATTENTION = frozenset(
    {
        LayerKind.FULL_ATTENTION,
        LayerKind.SLIDING_ATTENTION,
        LayerKind.CHUNKED_ATTENTION,
        LayerKind.LATENT_ATTENTION,
    }
)
_STATES = frozenset({LayerKind.MAMBA2, LayerKind.GATED_DELTA_NET})


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Heads of an attention layer, and the widths of its keys and values."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int

    def kv_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        """Return KV heads on one rank: at least one, replicated beyond that."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """A Mamba2 layer: a short convolution, and one matrix a head."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int

    @property
    def divided(self) -> tuple[int, ...]:
        """Heads that ranks share."""
        return (self.num_heads,)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: input, and both projections of the groups."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def state_shapes(
        self, tensor_parallel_size: int = 1, num_draft_tokens: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a rank's state: the convolution's tail, the matrices.

        Groups are copied until each rank has one.
        """
        tp = tensor_parallel_size
        groups = self.num_groups if self.num_groups % tp == 0 else tp
        channels = self.inner_size + 2 * groups * self.state_size
        return (
            (self.conv_kernel - 1 + num_draft_tokens, channels // tp),
            (self.num_heads // tp, self.head_dim, self.state_size),
        )


@dataclass(frozen=True, slots=True)
class GatedDeltaNetShape:
    """A gated delta net: a short convolution, and one matrix a value head."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def divided(self) -> tuple[int, ...]:
        """Heads that ranks share."""
        return (self.num_key_heads, self.num_value_heads)

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_size

    def state_shapes(
        self, tensor_parallel_size: int = 1, num_draft_tokens: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a rank's state: the convolution's tail, the matrices."""
        tp = tensor_parallel_size
        return (
            (self.conv_kernel - 1 + num_draft_tokens, self.conv_channels // tp),
            (self.num_value_heads // tp, self.value_head_dim, self.key_head_dim),
        )


StateShape = Mamba2Shape | GatedDeltaNetShape
