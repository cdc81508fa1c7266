"""The shapes of a model's operations on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.precisions import expert_dtypes
from sim.errors import UserError
from sim.hardware.models.architecture import dtype_bytes

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture

EXPERT_DTYPES = ("bfloat16", "float16", "fp8", "fp8_block", "w4a16_mxfp4")
"""Precisions of routed experts that are timed."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes of a model on one of its ranks, as calibration needs them."""

    model: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    """vLLM's name: bfloat16 or float16."""
    block_size: int
    tensor_parallel_size: int = 1
    num_experts: int = 0
    """Routed experts; 0 for a dense model."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Width of one expert, as much of it as a rank holds."""
    expert_dtype: str = ""
    """Precision of the experts' weights, by the names of published tables."""
    sliding_window: int | None = None
    """Keys that sliding layers see; their attention is timed without the window."""

    @property
    def itemsize(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in the keys, or the values, of one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def omissions(self) -> tuple[str, ...]:
        """Parts of the model's steps that calibration does not time."""
        found = []
        if self.num_experts and self.expert_dtype not in EXPERT_DTYPES:
            dtype = self.expert_dtype
            found.append(f"{self.num_experts} routed experts a layer, of {dtype}")
        if self.sliding_window:
            found.append(f"attention in a window of {self.sliding_window} keys")
        if self.tensor_parallel_size > 1:
            found.append(f"all-reduce among {self.tensor_parallel_size} GPUs")
        return tuple(found)

    @property
    def gemms(self) -> dict[str, tuple[int, int]]:
        """(n, k) of each matrix, (tokens, k) times (k, n); without routed experts."""
        heads = self.num_heads * self.head_dim
        kv_heads = self.num_kv_heads * self.head_dim
        shapes = {
            "qkv": (heads + 2 * kv_heads, self.hidden_size),
            "o": (self.hidden_size, heads),
            "head": (self.vocab_size, self.hidden_size),
        }
        if not self.num_experts:
            shapes["gate_up"] = (2 * self.intermediate_size, self.hidden_size)
            shapes["down"] = (self.hidden_size, self.intermediate_size)
        return shapes


def _expert_dtype(model: ModelArchitecture) -> str:
    """Return the precision that a model's experts are timed in; empty without any."""
    if not model.num_experts:
        return ""
    names = expert_dtypes(model)
    own = "float16" if model.dtype in {"float16", "half"} else "bfloat16"
    return own if own in names else names[0]


def geometry_of(
    model: ModelArchitecture, block_size: int, tensor_parallel_size: int
) -> Geometry:
    """Return the geometry of one rank; raise UserError if it cannot be timed."""
    ranks = tensor_parallel_size
    if model.kv_lora_rank:
        raise UserError(
            f"calibration times grouped-query attention; {model.name} has latent"
            " attention (MLA): import a published profile instead"
        )
    if dtype_bytes(model.dtype) != 2:
        raise UserError(
            f"calibration times 16-bit models; {model.name} is {model.dtype}: give"
            " a config.json with dtype bfloat16 or float16"
        )
    sizes = (model.num_attention_heads, model.intermediate_size)
    if ranks < 1 or any(size % ranks for size in sizes):
        raise UserError(
            f"tensor_parallel_size must divide heads and MLP width of"
            f" {model.name}, {sizes}; got {ranks}"
        )
    if block_size < 1 or block_size & (block_size - 1):
        raise UserError(f"block_size must be a power of two; got {block_size}")
    return Geometry(
        model=model.name,
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size // ranks,
        num_heads=model.num_attention_heads // ranks,
        num_kv_heads=model.kv_heads_per_rank(ranks),
        head_dim=model.head_dim,
        vocab_size=-(-model.vocab_size // ranks),
        dtype="float16" if model.dtype in {"float16", "half"} else "bfloat16",
        block_size=block_size,
        tensor_parallel_size=ranks,
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_tok,
        expert_size=-(-model.expert_size // ranks) if model.num_experts else 0,
        expert_dtype=_expert_dtype(model),
        sliding_window=model.sliding_window if model.num_sliding_layers else None,
    )
