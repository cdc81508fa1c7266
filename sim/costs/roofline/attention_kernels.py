"""Which kernel of attention a GPU has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sim.hardware.gpus import GpuSpec

_HOPPER: Final = ("h100", "h200", "h800", "h20", "gh200")
_BLACKWELL: Final = ("b200", "gb200", "b300", "gb300")
"""Of data centres."""

FA2_DECODE_TILE_TOKENS: Final = 80
"""Query rows that FlashAttention 2 spends on a decode of a mixed batch: ``kBlockM``
of its split-KV kernel is 64; 80 at the efficiency of prefill fits the mixed tables of
the RTX PRO 6000."""


def is_hopper(gpu: GpuSpec) -> bool:
    """Whether it has FlashAttention 3."""
    return gpu.name.lower().startswith(_HOPPER)


def packs_heads(gpu: GpuSpec) -> bool:
    """Whether the query heads of a KV head stay together in mixed batches, too.

    FlashAttention 3 does so (``should_pack_gqa`` with varlen queries); Blackwell
    data-centre parts run decodes apart.
    """
    return is_hopper(gpu) or gpu.name.lower().startswith(_BLACKWELL)
