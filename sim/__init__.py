"""The clock, the engine, the schedulers, and what is recorded.

The names below are what scripts and notebooks need; `docs/python.md` is their page::

    from sim import load_config, simulate

    results = simulate(load_config("examples/demo.yaml"))
    results.summary["num_preemptions"], results.preemptions
    results.plot.kv_cache_usage()

Each is imported when it is first asked for, so that ``import sim`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cache.moved import register_moved

if TYPE_CHECKING:
    from sim.api import (
        Results,
        crossover,
        explore,
        hit_curve,
        plan,
        read_requests,
        simulate,
        sweep,
        validate,
    )
    from sim.config.tables import load_config
    from sim.costs.measured.profile import read_profile
    from sim.hardware.capacity import estimate_capacity

__all__ = [
    "Results",
    "crossover",
    "estimate_capacity",
    "explore",
    "hit_curve",
    "load_config",
    "plan",
    "read_profile",
    "read_requests",
    "simulate",
    "sweep",
    "validate",
]

register_moved("sim.cost", "sim.costs")

_HOMES = dict.fromkeys(__all__, "sim.api") | {
    "estimate_capacity": "sim.hardware.capacity",
    "load_config": "sim.config.tables",
    "read_profile": "sim.costs.measured.profile",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sim' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
