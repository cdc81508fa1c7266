"""The engine's KV offloading: a tier of host memory, its connector, and its link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator

from sim.config.types import ConfigTable, Count, Positive, Whole

if TYPE_CHECKING:
    from sim.scheduler.generation import Generation

Rate = Annotated[float, Field(ge=0)]

CONNECTOR = "OffloadingConnector"
NATIVE = "native"
TIERING = "TieringOffloadingSpec"


class ConnectorExtraTable(ConfigTable):
    """The native connector's own keys, under vLLM's names."""

    spec_name: Literal["CPUOffloadingSpec", "TieringOffloadingSpec"] = (
        "CPUOffloadingSpec"
    )
    cpu_bytes_to_use: Positive | None = None
    block_size: Count | None = None
    blocks_per_chunk: Count | None = None
    eviction_policy: Literal[
        "lru", "arc", "pin_shared", "session_end", "next_use", "keep_ttl"
    ] = "lru"
    write_policy: Literal["write_through", "write_back"] = "write_through"
    eviction_ttl_s: Annotated[float, Field(gt=0)] = 300.0
    offload_prompt_only: bool = True
    store_threshold: Whole = 0
    max_tracker_size: Positive = 64_000
    sync_load_budget_bytes: Whole = 0
    secondary_tiers: list[dict[str, Any]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _tiers_of_spec(self) -> ConnectorExtraTable:
        if self.secondary_tiers and self.spec_name != TIERING:
            raise ValueError(
                f"secondary_tiers: tiers behind the host are of {TIERING}, got "
                f"{self.spec_name}; set spec_name to it"
            )
        return self

    @model_validator(mode="after")
    def _written_back(self) -> ConnectorExtraTable:
        if self.write_policy == "write_back":
            for key, value, allowed in (
                ("eviction_policy", self.eviction_policy, ("lru", "arc", "keep_ttl")),
                ("store_threshold", self.store_threshold, (0, 1)),
            ):
                if value not in allowed:
                    raise ValueError(
                        f"write_policy: write_back stores blocks of no request, which "
                        f"{key} {value} asks for; set it to {allowed[0]}"
                    )
        return self

    @model_validator(mode="after")
    def _one_size(self) -> ConnectorExtraTable:
        if self.block_size is not None and self.blocks_per_chunk is not None:
            raise ValueError(
                "block_size: tokens of a chunk, which blocks_per_chunk says in blocks, "
                f"got {self.block_size} beside {self.blocks_per_chunk}; leave one out"
            )
        return self


class KVTransferTable(ConfigTable):
    """A KV connector; `kv_offloading_size` names the native one by itself."""

    kv_connector: str | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_connector_extra_config: ConnectorExtraTable | None = None

    @property
    def extra(self) -> ConnectorExtraTable:
        """The connector's own keys, those left out at their defaults."""
        return self.kv_connector_extra_config or ConnectorExtraTable()


class OffloadingLinkTable(ConfigTable):
    """The link between GPU and host; what is left out is the cost model's."""

    load_bytes_per_s: Rate | None = None
    store_bytes_per_s: Rate | None = None
    latency_s: Rate = 0.0
    both_ways_share: Annotated[float, Field(ge=0.5, le=1)] = 0.834
    load_failure_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0


class OffloadingKeys(Protocol):
    """The keys of an engine's table that the checks of KV offloading read."""

    @property
    def kv_offloading_size(self) -> float | None: ...
    @property
    def kv_offloading_backend(self) -> str | None: ...
    @property
    def kv_transfer_config(self) -> KVTransferTable | None: ...
    @property
    def scheduler_kind(self) -> str: ...
    @property
    def generation(self) -> Generation: ...


def check_offloading(engine: OffloadingKeys) -> None:
    """Refuse offloading where it is not built, or not whole.

    Raises
    ------
    ValueError
        Which begins with the key.
    """
    size, connector = engine.kv_offloading_size, engine.kv_transfer_config
    if engine.kv_offloading_backend not in (None, NATIVE):
        raise ValueError(
            f"kv_offloading_backend: {NATIVE} is built, a pool that another server "
            f"keeps is not, got {engine.kv_offloading_backend!r}; set it to {NATIVE}"
        )
    if connector is not None:
        _check_connector(connector, size)
    if size is None and connector is None:
        for key in ("kv_offloading_backend", "kv_offloading_link"):
            if getattr(engine, key) is not None:
                raise ValueError(
                    f"{key}: there is no tier behind the pool; set kv_offloading_size, "
                    f"in GiB, or remove it"
                )
        return
    key = "kv_transfer_config" if size is None else "kv_offloading_size"
    name, own = engine.scheduler_kind, engine.generation
    if not (own.has_kv_connectors and name == own.name):
        instead = (
            f"; {name} swaps preempted requests to the host by itself (swap_space)"
            if own.has_cpu_tier and name == own.name
            else ""
        )
        raise ValueError(
            f"{key}: KV offloading is built for the v1 generation, got {name}"
            f"{instead}; remove it, or set scheduler to v1"
        )
    for other in ("data_parallel_size", "pipeline_parallel_size"):
        if getattr(engine, other) > 1:
            raise ValueError(
                f"{key}: KV offloading with {other} above 1 is not built, got "
                f"{getattr(engine, other)}; leave one of them out"
            )


def _check_connector(table: KVTransferTable, size: float | None) -> None:
    name, extra = table.kv_connector, table.extra
    if name not in (None, CONNECTOR):
        raise ValueError(
            f"kv_transfer_config.kv_connector: must be {CONNECTOR}, got {name!r}; name "
            f"it, or remove the table (roles of fleet.pools let engines prefill and "
            f"decode apart)"
        )
    needs_role = name is not None and size is None
    if table.kv_role != "kv_both" and (needs_role or table.kv_role is not None):
        raise ValueError(
            f"kv_transfer_config.kv_role: {CONNECTOR} stores and loads, got "
            f"{table.kv_role!r}; set it to kv_both"
        )
    if size is None:
        if name is None:
            raise ValueError(
                f"kv_transfer_config.kv_connector: must be named without "
                f"kv_offloading_size; set it to {CONNECTOR}"
            )
        if extra.cpu_bytes_to_use is None:
            raise ValueError(
                "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use: the "
                "tier needs a size; give bytes here, or GiB as kv_offloading_size"
            )
    elif extra.cpu_bytes_to_use is not None:
        raise ValueError(
            "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use: "
            "kv_offloading_size says it already; remove one of them"
        )
