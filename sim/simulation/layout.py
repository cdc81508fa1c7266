"""The KV cache groups of an engine whose model has layers of several kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.v1.specs import MambaSpec
from sim.errors import ConfigError
from sim.scheduler.v1.dialect import FIRST_GROUPS_MINOR, dialect_of

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout
    from sim.config.engine import EngineConfig
    from sim.hardware.capacity import CapacityEstimate
    from sim.hardware.models.architecture import ModelArchitecture


def layout_of(
    engine: EngineConfig, model: ModelArchitecture, capacity: CapacityEstimate
) -> KVCacheLayout | None:
    """Return the groups that share the pool; None where attention is of one kind.

    Raises
    ------
    ConfigError
        If the scheduler knows no groups.
    """
    assert capacity.plan is not None
    layout = capacity.plan.layout
    spec = layout.groups[0].spec
    if len(layout.groups) == 1 and not isinstance(spec, MambaSpec):
        return layout if frees_lone_window(engine, capacity) else None
    if not engine.generation.has_kv_cache_groups:
        raise ConfigError(
            f"engine.model: {model.name} has layers of several kinds, whose blocks "
            f"the {engine.scheduler_kind} scheduler does not tell apart; use v1, or a "
            f"model with one kind"
        )
    return layout


def frees_lone_window(engine: EngineConfig, capacity: CapacityEstimate) -> bool:
    """Whether layers that all have one window give up the blocks behind it.

    They do as in the release, where that is known and no other window is given by hand;
    older releases are taken to hold windows as full attention.
    """
    assert capacity.plan is not None
    if capacity.plan.layout.keeps_all_blocks or engine.sliding_window is not None:
        return False
    has_groups = engine.generation.has_kv_cache_groups
    return has_groups and dialect_of(engine.version).minor >= FIRST_GROUPS_MINOR
