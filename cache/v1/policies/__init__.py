"""Eviction policies of the prefix cache, one a file."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from cache.v1.policies.arc import ARC
from cache.v1.policies.base import CachePolicy
from cache.v1.policies.clairvoyant import Clairvoyant, FutureReads
from cache.v1.policies.fifo import FIFO
from cache.v1.policies.keyed import HeldBlock, KeyedPolicy
from cache.v1.policies.lfu import LFU
from cache.v1.policies.lru import LRU
from cache.v1.policies.s3_fifo import S3FIFO
from cache.v1.policies.tiny_lfu import TinyLFU

if TYPE_CHECKING:
    from collections.abc import Mapping

CACHE_POLICIES: Mapping[str, type[CachePolicy]] = MappingProxyType(
    {
        "lru": LRU,
        "fifo": FIFO,
        "lfu": LFU,
        "s3_fifo": S3FIFO,
        "arc": ARC,
        "tiny_lfu": TinyLFU,
        "clairvoyant": Clairvoyant,
    }
)
"""Policies by the name that ``engine.evictor`` takes."""

__all__ = [
    "ARC",
    "CACHE_POLICIES",
    "FIFO",
    "LFU",
    "LRU",
    "S3FIFO",
    "CachePolicy",
    "Clairvoyant",
    "FutureReads",
    "HeldBlock",
    "KeyedPolicy",
    "TinyLFU",
]
