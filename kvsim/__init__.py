"""Discrete-event simulator of KV-cache scheduling in LLM serving engines.

The public names, handed on from `sim`; ``docs/python.md`` has a page on them::

    from kvsim import load_config, simulate

    results = simulate(load_config("examples/demo.yaml"))
    results.summary["num_preemptions"], results.preemptions
    results.plot.kv_cache_usage()

Each is imported when it is first asked for, so that ``import kvsim`` costs nothing.
Schedulers, cost models and other parts of your own subclass what
``docs/extending.md`` lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sim

if TYPE_CHECKING:
    from sim import (
        Results,
        crossover,
        estimate_capacity,
        explore,
        hit_curve,
        load_config,
        plan,
        read_profile,
        read_requests,
        simulate,
        sweep,
        validate,
    )

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


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'kvsim' has no attribute '{name}'")
    return getattr(sim, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
