"""Routers: each chooses the engine of a request by the rule of one release.

A router is a class with `choose(request)` and `ended(request, place)`
(`sim.fleet.engines.Router`), in a file of its own, and knows engines by their place in
the list. What it sees of them it counts itself, or hears of in the way and at the times
of the real one.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from sim.fleet.balancer import LoadBalancer
from sim.fleet.routers.aibrix_prefix import AIBrixPrefix
from sim.fleet.routers.counting import (
    LeastRequests,
    PowerOfTwo,
    RandomRouter,
    RoundRobin,
)
from sim.fleet.routers.dynamo_kv import DynamoKv
from sim.fleet.routers.llm_d import LlmD
from sim.fleet.routers.production_stack import ProductionStackPrefix
from sim.fleet.routers.ray_prefix import RayPrefix
from sim.fleet.routers.session import Session
from sim.fleet.routers.sglang_cache_aware import SGLangCacheAware

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUTERS: Mapping[str, type] = MappingProxyType(
    {
        "round_robin": RoundRobin,
        "random": RandomRouter,
        "least_requests": LeastRequests,
        "power_of_two": PowerOfTwo,
        "session": Session,
        "vllm_dp": LoadBalancer,
        "llm_d": LlmD,
        "dynamo_kv": DynamoKv,
        "sglang_cache_aware": SGLangCacheAware,
        "production_stack_prefix": ProductionStackPrefix,
        "ray_prefix": RayPrefix,
        "aibrix_prefix": AIBrixPrefix,
    }
)
"""Built-in routers by kind."""

BLIND: Final = frozenset({RoundRobin, RandomRouter})
"""Routers that choose without looking at engines, requests or what has ended."""

BY_PREFIX: Final = frozenset(
    {LlmD, DynamoKv, SGLangCacheAware, ProductionStackPrefix, RayPrefix, AIBrixPrefix}
)
"""Routers that send a prompt to where its prefix is."""
