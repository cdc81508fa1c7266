"""The configuration of a run: typed, complete, refused with the path of the key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from sim.config.engine import EngineConfig
from sim.config.files import Overrides, find_files, override, read_yaml
from sim.config.fleet import FleetTable, PoolTable  # noqa: TC001 - pydantic's
from sim.config.front_end import FrontEndConfig  # noqa: TC001 - pydantic's
from sim.config.hints import one_line, refuse_other_kind
from sim.config.pair_tiers import check_tiers
from sim.config.pairs import PAIR_KEYS, check_drafters, check_flow
from sim.config.plugins import refuse_plugins
from sim.config.types import ConfigTable, Limit, Named
from sim.config.workload import WorkloadConfig  # noqa: TC001 - pydantic's
from sim.errors import ConfigError
from sim.hardware.gpus import price_name


class TrafficConfig(ConfigTable):
    """The part of a configuration that says what is asked for, and when."""

    workload: WorkloadConfig
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class GoodputConfig(ConfigTable):
    """Limits that a good request keeps to; see `sim.results.metrics.goodput`."""

    ttft_ms: Limit | None = None
    tpot_ms: Limit | None = None
    e2el_ms: Limit | None = None

    @model_validator(mode="after")
    def _some(self) -> GoodputConfig:
        if not self.limits_ms:
            raise ValueError("should be a latency at least, such as {ttft_ms: 2000}")
        return self

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits that are set, in milliseconds by latency."""
        return {key: value for key, value in self if value is not None}


class RunConfig(ConfigTable):
    """One simulation."""

    workload: WorkloadConfig
    engine: EngineConfig
    cost: Named = Field(default_factory=lambda: {"kind": "roofline"})
    cost_intervals: bool = True
    goodput: GoodputConfig | None = None
    objectives: dict[str, Any] | None = None
    front_end: FrontEndConfig | None = None
    fleet: FleetTable | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _engines_of_a_fleet(self) -> RunConfig:
        """Refuse engines that fleets are not built of."""
        prices = self.fleet.prices if self.fleet else None
        drafters: dict[str, Any] = {}
        for place, pool in enumerate(self.fleet.pools if self.fleet else ()):
            try:
                engine = self.engine_of(pool)
            except ValidationError as error:
                line = one_line(error, EngineConfig).removeprefix("configuration: ")
                raise ValueError(f"fleet.pools.{place}.engine.{line}") from error
            if prices is not None and prices.of(engine.gpu) is None:
                name = price_name(engine.gpu)
                raise ValueError(
                    f"fleet.prices.per_gpu_hour.{name}: there is no price for the GPU "
                    f"of pool {pool.name}; add one, in {prices.currency} an hour"
                )
            if pool.role != "serve":
                self._check_flow(engine, place)
            self._check_tier(engine, pool)
            self._check_drafts(engine, pool)
            self._check_ranks(engine)
            if pool.role != "serve":
                drafters[pool.name] = engine.speculative
        check_drafters(drafters)
        if self.fleet is not None:
            roles = {pool.name: pool.role for pool in self.fleet.pools}
            try:
                if set(roles.values()) != {"serve"}:
                    engines = dict(zip(roles, self.engines(), strict=True))
                    check_tiers(engines, roles, self.fleet)
                self.fleet.check_events([e.data_parallel_size for e in self.engines()])
            except ValueError as error:
                raise ValueError(f"fleet.{error}") from error
        return self

    def _check_ranks(self, engine: EngineConfig) -> None:
        """Refuse ranks of replicas with servers of their own."""
        servers = engine.api_server_count
        if engine.data_parallel_size > 1 and servers is not None and servers > 1:
            raise ValueError(
                f"fleet: the router chooses the rank, and no API server of the "
                f"replica, got api_server_count {servers}; remove it"
            )

    def _check_flow(self, engine: EngineConfig, place: int) -> None:
        """Refuse engines that hand no prompts on, or not in this way."""
        name, own, fleet = engine.scheduler_kind, engine.generation, self.fleet
        assert fleet is not None
        if not own.kv_flow or name != own.name:
            raise ValueError(
                f"fleet.pools.{place}.role: prefill and decode pools are built of the "
                f"v1 and sglang generations, got {name}; set engine.scheduler to one"
            )
        flow = self.engine_of(fleet.pools[0]).generation.kv_flow
        if own.kv_flow != flow:
            raise ValueError(
                f"fleet.pools.{place}.role: prompts are handed on between engines of "
                f"one generation, got {name}; set engine.scheduler for all pools"
            )
        given = {key: getattr(fleet, key) for key in PAIR_KEYS}
        try:
            check_flow(own.kv_flow, name, given)
        except ValueError as error:
            raise ValueError(f"fleet.{error}") from error

    def _check_drafts(self, engine: EngineConfig, pool: PoolTable) -> None:
        """Refuse drafts of some engines of a fleet only; see `check_drafters`, too."""
        own, shared = (
            0 if each.speculative is None else each.speculative.num_speculative_tokens
            for each in (engine, self.engine)
        )
        if own != shared and pool.role == "serve":
            raise ValueError(
                f"fleet.pools: all engines verify as many drafts a step, got "
                f"{own} of pool {pool.name} and {shared} of engine; give "
                f"speculative_config in engine, and another method at most in a pool"
            )

    def _check_tier(self, engine: EngineConfig, pool: PoolTable) -> None:
        """Refuse tiers of some engines of a fleet only; see `check_tiers`, too."""
        if engine.has_tier is not self.engine.has_tier and pool.role == "serve":
            raise ValueError(
                f"fleet.pools: all engines have a tier behind their pool or none has; "
                f"give kv_offloading_size in engine, and another size in pool "
                f"{pool.name} if you like"
            )

    def engine_of(self, pool: PoolTable) -> EngineConfig:
        """Return the engines of a pool: what all share, and the pool's own keys."""
        if not pool.engine:
            return self.engine
        return EngineConfig.model_validate(self.engine.shared_with(pool.engine))

    def engines(self) -> list[EngineConfig]:
        """Return the engine of each pool, or the only one."""
        pools = self.fleet.pools if self.fleet else ()
        return [self.engine_of(pool) for pool in pools] or [self.engine]

    def to_yaml(self) -> str:
        """Return the complete configuration, runnable again."""
        return yaml.safe_dump(self.to_data(), sort_keys=False)

    def to_data(self) -> dict[str, Any]:
        """Return the complete configuration as plain data, see `parse_config`."""
        dumped = self.model_dump()  # as JSON, the numbers that shares name were text
        workload = dumped["workload"]
        dumped["workload"] = {k: v for k, v in workload.items() if v is not None}
        for key in ("objectives", "front_end", "fleet"):
            if dumped[key] is None:
                del dumped[key]  # files as they were before runs had any
        if fleet := dumped.get("fleet"):
            dumped["fleet"] = {k: v for k, v in fleet.items() if v is not None}
        return dumped

    @property
    def front_end_s(self) -> float:
        """Seconds that requests spend outside the engine, to it and back."""
        front_end = self.front_end
        return 0.0 if front_end is None else front_end.total_s(self.engine.version)


def load_config(path: Path | str, overrides: Overrides = ()) -> RunConfig:
    """Read a configuration file.

    Parameters
    ----------
    path
        YAML file.
    overrides
        Values by dotted key, or ``key.path=value`` assignments with values in YAML;
        applied in order.

    Returns
    -------
    RunConfig
        With every key that was left out at its default.

    Raises
    ------
    ConfigError
        With the path of the key, the rule, the value and the remedy.

    Examples
    --------
    >>> from kvsim import load_config
    >>> config = load_config("examples/demo.yaml", {"engine.max_num_seqs": 128})
    >>> config.engine.model, config.engine.max_num_seqs
    ('Qwen/Qwen3-32B', 128)
    >>> load_config("examples/demo.yaml", ["engine.gpu=h100_sxm", "seed=1"]).seed
    1
    """
    return parse_config(load_data(path, overrides))


def load_data(path: Path | str, overrides: Overrides = ()) -> dict[str, Any]:
    """Read a configuration file as plain data: overridden, its files found.

    Only what the file and the overrides say is in it; see `load_config`.
    """
    path = Path(path)
    data = read_yaml(path)
    refuse_other_kind(data, path, "run")
    override(data, overrides)
    find_files(data, path.parent)
    return data


def load_traffic(path: Path | str, overrides: Overrides = ()) -> TrafficConfig:
    """Read the workload and seed of a configuration file.

    Parameters
    ----------
    path
        YAML file: a whole configuration, which is checked as a whole, or its
        ``workload`` table, if need be with ``seed``.
    overrides
        As of `load_config`.

    Raises
    ------
    ConfigError
        See `load_config`.
    """
    path = Path(path)
    data = read_yaml(path)
    override(data, overrides)
    find_files(data, path.parent)
    if "engine" in data:
        config = parse_config(data)
        return TrafficConfig(workload=config.workload, seed=config.seed)
    try:
        return TrafficConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(one_line(error, RunConfig)) from error


def parse_config(data: dict[str, Any]) -> RunConfig:
    """Validate a configuration given as plain data.

    Raises
    ------
    ConfigError
        See `load_config`.
    """
    refuse_plugins(data)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(one_line(error, RunConfig)) from error
