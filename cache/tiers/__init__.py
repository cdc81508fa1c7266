"""Tiers behind the GPU's pool: where chunks of KV blocks are kept and found again."""

from __future__ import annotations

from cache.tiers.access import RequestAccess
from cache.tiers.arc import ARCTierPolicy
from cache.tiers.cpu import (
    TIER_POLICIES,
    CPUTier,
    PreparedStore,
)
from cache.tiers.device import TierDevice, TierJob
from cache.tiers.hierarchy import TierHierarchy
from cache.tiers.lookups import LookupResult
from cache.tiers.lru import LRUTierPolicy
from cache.tiers.policy import TierPolicy
from cache.tiers.secondary import (
    SECONDARY_TIERS,
    FileSystemTier,
    PoolTier,
    SecondaryTier,
)
from cache.tiers.sizes import chunk_bytes_of, num_chunks_of

__all__ = [
    "SECONDARY_TIERS",
    "TIER_POLICIES",
    "ARCTierPolicy",
    "CPUTier",
    "FileSystemTier",
    "LRUTierPolicy",
    "LookupResult",
    "PoolTier",
    "PreparedStore",
    "RequestAccess",
    "SecondaryTier",
    "TierDevice",
    "TierHierarchy",
    "TierJob",
    "TierPolicy",
    "chunk_bytes_of",
    "num_chunks_of",
]
