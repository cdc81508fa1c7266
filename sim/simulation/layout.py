"""The KV cache groups of an engine whose model has layers of several kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.errors import ConfigError
from sim.scheduler.v1 import V1

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout
    from sim.config.tables import EngineConfig
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
    kinds = {kind for kind in model.layer_kinds if kind.is_attention or kind.has_state}
    assert capacity.plan is not None
    # Older releases hold windows as full attention: one group of layers alike.
    alike = len(kinds) == 1 or len(capacity.plan.layout.groups) == 1
    if alike and not any(kind.has_state for kind in kinds):
        return None
    if engine.generation.name != V1.name and not engine.generation.is_hosted:
        raise ConfigError(
            f"engine.model: {model.name} has layers of several kinds, whose blocks "
            f"the {engine.scheduler_kind} scheduler does not tell apart; use v1, or a "
            f"model with one kind"
        )
    return capacity.plan.layout
