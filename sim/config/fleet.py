"""The table ``fleet:``: several engines behind a router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, ValidationError, model_validator

from sim.config.types import ConfigTable, Kind, shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.config.tables import EngineConfig, RunConfig

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


_ALONE: Final = (
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


def own_engine(engine: EngineConfig, pool: PoolTable) -> EngineConfig:
    """Return the engines of a pool: what all share, and the pool's own keys."""
    if not pool.engine:
        return engine
    return type(engine).model_validate(engine.model_dump() | pool.engine)


def check_fleet(config: RunConfig, in_words: Callable[[ValidationError], str]) -> None:
    """Refuse engines that fleets are not built of."""
    for place, pool in enumerate(config.fleet.pools if config.fleet else ()):
        try:
            engine = own_engine(config.engine, pool)
        except ValidationError as error:
            line = in_words(error)
            raise ValueError(f"fleet.pools.{place}.engine.{line}") from error
        for key in _ALONE:
            if (given := getattr(engine, key)) not in (1, None):
                raise ValueError(
                    f"fleet: engines with {key} are not built in a fleet, got "
                    f"{shortened(given)}; remove one of them"
                )
