"""Tiers behind the GPU's pool: where chunks of KV blocks are kept and found again."""

from __future__ import annotations

from cache.tiers.access import RequestAccess
from cache.tiers.arc import ARCTierPolicy
from cache.tiers.cpu import (
    TIER_POLICIES,
    CPUTier,
    LookupResult,
    PreparedStore,
    num_chunks_of,
)
from cache.tiers.lru import LRUTierPolicy
from cache.tiers.policy import TierPolicy

__all__ = [
    "TIER_POLICIES",
    "ARCTierPolicy",
    "CPUTier",
    "LRUTierPolicy",
    "LookupResult",
    "PreparedStore",
    "RequestAccess",
    "TierPolicy",
    "num_chunks_of",
]
