"""The table ``fleet:``: several engines behind a router."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from sim.config.types import ConfigTable, Kind

_NOT_BUILT: Final = {
    "links": "prefill and decode pools",
    "autoscaler": "replicas that come and go",
    "events": "replicas that fail",
}
_ROLES: Final = ("serve", "prefill", "decode")
_SHARED: Final = {
    "model": "a router sends any request to any engine",
    "scheduler": "pools of several generations are not built",
}
"""Keys of the engine that all pools share, and why."""

ALONE: Final = (
    "data_parallel_size",
    "speculative_config",
    "kv_offloading_size",
    "kv_transfer_config",
)
"""Keys of engines that are not built in fleets."""


class PoolTable(ConfigTable):
    """Engines that are alike."""

    name: Annotated[str, Field(min_length=1)]
    replicas: Annotated[int, Field(ge=1, le=10_000)]
    role: str = "serve"
    engine: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _built(self) -> PoolTable:
        """Refuse roles that are not built, and keys that pools share."""
        if self.role not in _ROLES:
            raise ValueError(
                f"role: must be one of {', '.join(_ROLES)}, got {self.role!r}"
            )
        if self.role != "serve":
            raise ValueError(
                f"role: pools that prefill or decode only are not built, got "
                f"{self.role}; set it to serve, or leave it out"
            )
        for key, why in _SHARED.items():
            if key in self.engine:
                raise ValueError(
                    f"engine.{key}: {why}, got {self.engine[key]!r}; set engine.{key} "
                    f"for all pools"
                )
        return self


class FleetTable(ConfigTable):
    """Pools of engines, and what chooses the engine of each request."""

    pools: Annotated[list[PoolTable], Field(min_length=1)]
    router: Kind = Field(default_factory=lambda: {"kind": "round_robin"})

    @property
    def num_engines(self) -> int:
        """Engines of all pools."""
        return sum(pool.replicas for pool in self.pools)

    @model_validator(mode="before")
    @classmethod
    def _not_built(cls, data: object) -> object:
        for key, what in _NOT_BUILT.items():
            if isinstance(data, dict) and data.get(key) is not None:
                raise ValueError(f"{key}: {what} are not built; remove it")
        return data

    @model_validator(mode="after")
    def _names(self) -> FleetTable:
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"pools: each needs a name of its own, got '{name}' twice; rename "
                    f"one"
                )
        if "kind" not in self.router:
            raise ValueError(
                "router: needs a kind, such as {kind: round_robin}; 'docs/fleets.md' "
                "has all"
            )
        return self
