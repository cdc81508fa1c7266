"""The table ``fleet:``: several engines behind a router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from sim.config.autoscaling import AutoscalerTable, as_list
from sim.config.pairs import (
    PAIR_KEYS,
    ConnectorTable,
    LinksTable,
    ProxyTable,
    check_roles,
)
from sim.config.types import ConfigTable, Named
from sim.hardware.gpus import price_name, priced_by_name

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROLES: Final = ("serve", "prefill", "decode")
_SHARED: Final = {
    "model": "a router sends any request to any engine",
}
"""Keys of the engine that all pools share, and why."""


class PoolTable(ConfigTable):
    """Engines that are alike."""

    name: Annotated[str, Field(min_length=1)]
    replicas: Annotated[int, Field(ge=1, le=10_000)]
    role: str = "serve"
    engine: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _built(self) -> PoolTable:
        """Refuse roles that there are not, and keys that pools share."""
        if self.role not in _ROLES:
            raise ValueError(
                f"role: must be one of {', '.join(_ROLES)}, got {self.role!r}"
            )
        for key, why in _SHARED.items():
            if key in self.engine:
                raise ValueError(
                    f"engine.{key}: {why}, got {self.engine[key]!r}; set engine.{key} "
                    f"for all pools"
                )
        return self


class PricesTable(ConfigTable):
    """Prices of GPUs; the keys of a plan's prices that give them."""

    per_gpu_hour: Annotated[
        dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)
    ]
    currency: str = "USD"
    date: str = ""
    note: str = ""

    @model_validator(mode="after")
    def _priced_once(self) -> PricesTable:
        """Refuse two spellings of one GPU."""
        priced_by_name(self.per_gpu_hour)
        return self

    def of(self, gpu: str) -> float | None:
        """Return the price of a GPU an hour, however its name is spelled."""
        return priced_by_name(self.per_gpu_hour).get(price_name(gpu))


_EVENTS: Final = ("die", "drain", "start", "slow")
_FATES: Final = ("retry", "lose")


class EventTable(ConfigTable):
    """An event of one engine, at a time of the run."""

    time_s: Annotated[float, Field(ge=0)]
    kind: str
    engine: Annotated[int, Field(ge=0)]
    requests: str | None = None
    factor: Annotated[float | None, Field(ge=1e-3, le=1e6)] = None

    @model_validator(mode="after")
    def _fits(self) -> EventTable:
        """Refuse kinds that there are not, and keys of other kinds."""
        if self.kind not in _EVENTS:
            raise ValueError(
                f"kind: must be one of {', '.join(_EVENTS)}, got {self.kind!r}"
            )
        if self.requests not in {None, *_FATES}:
            raise ValueError(
                f"requests: must be one of {', '.join(_FATES)}, got {self.requests!r}"
            )
        for key, kind in (("requests", "die"), ("factor", "slow")):
            if getattr(self, key) is not None and self.kind != kind:
                raise ValueError(
                    f"{key}: is a key of {{kind: {kind}}}, got it with {self.kind}; "
                    f"remove it"
                )
        if self.kind == "slow" and self.factor is None:
            raise ValueError(
                "factor: a slow engine needs it, such as 2.0 for steps of twice the "
                "length; 1.0 ends it"
            )
        return self


class FleetTable(ConfigTable):
    """Pools of engines, and what chooses the engine of each request."""

    pools: Annotated[list[PoolTable], Field(min_length=1)]
    router: Named = Field(default_factory=lambda: {"kind": "round_robin"})
    events: list[EventTable] = Field(default_factory=list)
    autoscaler: Annotated[
        Annotated[list[AutoscalerTable], Field(min_length=1)] | None,
        BeforeValidator(as_list),
    ] = None
    decode_router: Named | None = None
    proxy: ProxyTable | None = None
    connector: ConnectorTable | None = None
    links: LinksTable | None = None
    prices: PricesTable | None = None

    @property
    def has_roles(self) -> bool:
        """Whether prompts are computed by other engines than their outputs."""
        return any(pool.role != "serve" for pool in self.pools)

    @model_validator(mode="after")
    def _roles(self) -> FleetTable:
        given = {key: getattr(self, key) for key in PAIR_KEYS}
        check_roles([pool.role for pool in self.pools], given)
        return self

    @property
    def num_engines(self) -> int:
        """Engines of all pools, as many as there may be."""
        return sum(self.most_replicas(pool) for pool in self.pools)

    def autoscaler_of(self, pool: PoolTable) -> AutoscalerTable | None:
        """Return the autoscaler of a pool, if it has one."""
        for each in self.autoscaler or ():
            if each.pool in {None, pool.name}:
                return each
        return None

    def most_replicas(self, pool: PoolTable) -> int:
        """Return how many replicas a pool has at most."""
        autoscaler = self.autoscaler_of(pool)
        return pool.replicas if autoscaler is None else autoscaler.max_replicas

    @model_validator(mode="after")
    def _names(self) -> FleetTable:
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"pools: each needs a name of its own, got '{name}' twice; rename "
                    f"one"
                )
        for key in ("router", "decode_router"):
            if (router := getattr(self, key)) is not None and "kind" not in router:
                raise ValueError(
                    f"{key}: needs a kind, such as {{kind: round_robin}}; "
                    f"'docs/fleets.md' has all"
                )
        return self

    @model_validator(mode="after")
    def _scaled(self) -> FleetTable:
        """Refuse autoscalers of pools that there are not, and pools out of bounds."""
        names = [pool.name for pool in self.pools]
        given = [each.pool for each in self.autoscaler or ()]
        for name in given:
            if name is None and len(names) > 1:
                raise ValueError(
                    f"autoscaler: of which pool, {' or '.join(names)}? set its pool"
                )
            if name not in {None, *names}:
                raise ValueError(
                    f"autoscaler.pool: must be one of {', '.join(names)}, got {name!r}"
                )
            if given.count(name) > 1:
                raise ValueError(
                    f"autoscaler: a pool has one, got several of "
                    f"{name or names[0]!r}; remove all but one"
                )
        for pool in self.pools:
            scaler = self.autoscaler_of(pool)
            least, most = (
                (1, pool.replicas)
                if scaler is None
                else (max(scaler.min_replicas, 1), scaler.max_replicas)
            )
            if not least <= pool.replicas <= most:
                raise ValueError(
                    f"pools: {pool.name} begins within the bounds of its autoscaler, "
                    f"{least} to {most} replicas, got {pool.replicas}"
                )
        return self

    def check_events(self, num_ranks: Sequence[int]) -> None:
        """Refuse events of engines that are not there.

        Parameters
        ----------
        num_ranks
            By pool, of how many engines a replica is, which come and go together.
        """
        replicas: list[tuple[PoolTable, int]] = []  # of each engine, with its number
        for pool, number in zip(self.pools, num_ranks, strict=True):
            for _ in range(self.most_replicas(pool)):
                replicas += [(pool, len(replicas))] * number
        is_off: set[int] = set()
        for event in sorted(self.events, key=lambda each: each.time_s):
            if event.engine >= len(replicas):
                raise ValueError(
                    f"events: engines are numbered from 0 to {len(replicas) - 1}, pool "
                    f"by pool, got {event.engine}"
                )
            pool, replica = replicas[event.engine]
            if self.autoscaler_of(pool) is not None:
                if event.kind in {"start", "drain"}:
                    raise ValueError(
                        f"events: engine {event.engine} has an autoscaler, which "
                        f"starts and drains it, got {event.kind}; remove it"
                    )
                continue
            is_on = replica not in is_off
            if is_on is (event.kind == "start"):
                state = "is on already" if is_on else "is off by then"
                raise ValueError(
                    f"events: engine {event.engine} {state}, got {event.kind} at "
                    f"{event.time_s} s; remove it"
                )
            if event.kind == "start":
                is_off.discard(replica)
            elif event.kind != "slow":
                is_off.add(replica)
