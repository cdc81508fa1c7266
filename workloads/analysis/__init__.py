"""Statistics of a workload, and the hits that a prefix cache could have.

`describe` for rates, burstiness, lengths, prefix sharing and sessions; `prefix_curve`
for hits against the size of the cache. Nothing here knows an engine or a clock:
requests are served one after the other.
"""

from __future__ import annotations

from workloads.analysis.description import Description, describe
from workloads.analysis.hit_curve import HitCurve
from workloads.analysis.prefix_curve import CacheNeed, PrefixCurve, prefix_curve

__all__ = [
    "CacheNeed",
    "Description",
    "HitCurve",
    "PrefixCurve",
    "describe",
    "prefix_curve",
]
