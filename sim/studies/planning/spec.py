"""The file of a plan and its prices: typed, refused with the path of the key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from sim.config.engine import EngineConfig
from sim.config.files import Overrides, find_files, found_path, override, read_yaml
from sim.config.hints import one_line, refuse_other_kind
from sim.config.plug import did_you_mean
from sim.config.plugins import refuse_plugins
from sim.config.types import ConfigTable, Kind, Named, Positive
from sim.config.workload import WorkloadConfig  # noqa: TC001 - pydantic's
from sim.errors import ConfigError
from sim.hardware.gpus import price_name, priced_by_name
from sim.results.summary.objectives import Objective, parse_objectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

WINDOW_S = 60.0
"""Windows in which a trace is resampled, unless a plan says otherwise."""

NO_PRICE = "GPU-hours"
"""Currency of a plan whose only GPU has no price."""

_NO_AXES = ("pipeline_parallel_size", "admission_check")
_PER_MORE = ("per_host_gib_hour", "per_link_gb_s_hour")
_PRICE_KEYS = ("currency", "date", "note", "per_gpu_hour", *_PER_MORE)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of an hour."""

    per_gpu_hour: Mapping[str, float]
    """Of a GPU, by its `price_name`."""
    per_host_gib_hour: float = 0.0
    """Of a GiB of host memory behind a pool, beyond what comes with the GPU."""
    per_link_gb_s_hour: float = 0.0
    """Of a GB/s of the link to it, where the engine names its speed."""
    currency: str = "USD"
    date: str = ""
    """When they were true."""
    note: str = ""

    def per_hour(
        self,
        gpu: str,
        num_gpus: int,
        host_gib: float = 0.0,
        link_gb_per_s: float = 0.0,
    ) -> float:
        return (
            self.per_gpu_hour[price_name(gpu)] * num_gpus
            + self.per_host_gib_hour * host_gib
            + self.per_link_gb_s_hour * link_gb_per_s
        )

    def check(self, gpus: Iterable[str]) -> None:
        """Refuse a plan that has GPUs without a price."""
        for gpu in gpus:
            if price_name(gpu) not in self.per_gpu_hour:
                raise ConfigError(
                    f"prices.per_gpu_hour.{gpu}: there is no price for this GPU"
                    f"{did_you_mean(gpu, self.per_gpu_hour)}; add one, in "
                    f"{self.currency} an hour"
                )


def parse_prices(table: Any) -> Prices:
    """Return the prices of a plan or of a file of their own."""
    if not isinstance(table, dict) or not isinstance(table.get("per_gpu_hour"), dict):
        raise ConfigError(
            "prices: give a table such as {per_gpu_hour: {h100_sxm: 3.0}}, or the path "
            "of a file that holds one (examples/prices.yaml)"
        )
    for key in table:
        if key not in _PRICE_KEYS:
            raise ConfigError(
                f"prices.{key}: unknown key{did_you_mean(key, _PRICE_KEYS)} (there "
                f"are: {', '.join(_PRICE_KEYS)})"
            )
    for gpu, price in table["per_gpu_hour"].items():
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not is_number or not 0 < price < float("inf"):
            raise ConfigError(
                f"prices.per_gpu_hour.{gpu}: give a number above 0, got {price!r}"
            )
    for key in _PER_MORE:
        price = table.get(key, 0.0)
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not is_number or not 0 <= price < float("inf"):
            raise ConfigError(
                f"prices.{key}: give a number of at least 0, got {price!r}"
            )
    host, link = (float(table.get(key, 0.0)) for key in _PER_MORE)
    texts = {key: str(table[key]) for key in _PRICE_KEYS[:3] if key in table}
    try:
        rates = priced_by_name(table["per_gpu_hour"])
    except ConfigError as error:
        raise ConfigError(f"prices.{error}") from None
    return Prices(rates, host, link, **texts)


def per_million(cost_per_hour: float, tokens_per_s: float) -> float | None:
    """Return the cost of a million tokens; None where there are none."""
    if not tokens_per_s > 0:
        return None
    return cost_per_hour / (tokens_per_s * 3600.0) * 1_000_000.0


def as_router(given: Any) -> dict[str, Any]:
    """Return the table of a router that may be named by its kind alone."""
    return dict(given) if isinstance(given, dict) else {"kind": given}


class SearchConfig(ConfigTable):
    """How the highest rate is looked for.

    ``curve`` are shares of that rate at which latencies are drawn. With a ``shortlist``
    only so many candidates are searched beyond their pilot runs: those that serve the
    traffic at the least cost by these runs.
    """

    num_seeds: Annotated[int, Field(ge=3, le=1000)] = 9
    tolerance: Annotated[float, Field(ge=0.001, le=0.2)] = 0.02
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    warmup_share: Annotated[float, Field(ge=0, le=0.5)] | None = None
    rates: tuple[float, float] | None = None
    curve: tuple[Annotated[float, Field(gt=0, le=2)], ...] = (0.5, 0.75, 0.9, 1.1)
    curve_seeds: Positive = 2
    shortlist: Positive | None = None

    @field_validator("rates", "curve", mode="before")
    @classmethod
    def _tuples(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_serializer(mode="wrap")
    def _said(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = dump(self)
        if self.shortlist is None:  # the bytes of plans without one do not change
            del told["shortlist"]
        return told

    @model_validator(mode="after")
    def _range(self) -> SearchConfig:
        if self.rates is not None and not 0 < self.rates[0] < self.rates[1]:
            raise ValueError(
                "rates: lowest and highest rate in requests/s, 0 < lowest < highest, "
                f"got {list(self.rates)}"
            )
        if self.curve_seeds > self.num_seeds:
            raise ValueError(
                f"curve_seeds: at most num_seeds of {self.num_seeds}, got "
                f"{self.curve_seeds}"
            )
        return self


class ReplicasConfig(ConfigTable):
    """How the plan's traffic is shared out, and how surely it must be served.

    ``routers`` stand before the replicas: the first decides how many are needed, the
    others are compared with it where that costs least. Without any it is ``by``.
    """

    routers: list[str | dict[str, Any]] = Field(default_factory=list)
    by: Literal["random", "round_robin"] = "random"
    most: Annotated[int, Field(ge=1, le=4096)] = 64
    num_seeds: Positive = 3
    share_of_seeds: Annotated[float, Field(gt=0, le=1)] = 0.9
    spare: Annotated[int, Field(ge=0, le=16)] = 1


class SensitivityConfig(ConfigTable):
    """The candidates to search sensitivities of, and with how many seeds."""

    of: str = "cheapest"
    num_seeds: Positive = 2
    settings: dict[str, list[Any]] = Field(default_factory=dict)


class PlanConfig(ConfigTable):
    """A capacity plan; see docs/plans.md."""

    workload: WorkloadConfig
    engine: Kind = Field(default_factory=dict)
    candidates: dict[str, Any] | list[dict[str, Any]]
    objectives: dict[str, Any]
    prices: dict[str, Any]
    cost: Named = Field(default_factory=lambda: {"kind": "roofline"})
    profiles: dict[str, str] = Field(default_factory=dict)
    cost_band: Annotated[float, Field(ge=0, lt=1)] = 0.15
    search: SearchConfig = Field(default_factory=SearchConfig)
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    sensitivity: SensitivityConfig | None = Field(default_factory=SensitivityConfig)
    fleets: list[dict[str, Any]] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0

    @model_validator(mode="after")
    def _open_loop(self) -> PlanConfig:
        users = self.workload.max_concurrent_users
        if users is not None:
            raise ValueError(
                "workload.max_concurrent_users: a plan looks for the highest rate, and "
                f"{users} users who wait for their answers set their own; remove it"
            )
        if self.workload.client is not None:
            raise ValueError(
                "workload.client: a plan looks for a rate that clients need not give "
                "up at; remove it"
            )
        if self.workload.split is not None:
            raise ValueError(
                "workload.split: a plan splits the traffic itself; use replicas.by"
            )
        return self

    @model_validator(mode="after")
    def _axes(self) -> PlanConfig:
        if not self.tables:
            raise ValueError("candidates: there is none; give a table of lists")
        for table in self.tables:
            _check_table(table, self.engine)
        if self.sensitivity is not None:
            for key, values in self.sensitivity.settings.items():
                _check_axis(key, values, "sensitivity.settings")
        return self

    @model_validator(mode="after")
    def _named_fleets(self) -> PlanConfig:
        for place, table in enumerate(self.fleets):
            if not isinstance(table.get("pools"), list) or not table["pools"]:
                raise ValueError(
                    f"fleets.{place}.pools: give a list of pools, such as "
                    f"[{{name: main, replicas: [4, 6]}}]"
                )
            for pool in table["pools"]:
                if not isinstance(pool, dict) or "name" not in pool:
                    raise ValueError(
                        f"fleets.{place}.pools: each needs a name, got {pool!r}"
                    )
        return self

    @property
    def tables(self) -> list[dict[str, Any]]:
        """Axes of candidates: all combinations of each table."""
        found = self.candidates
        return [found] if isinstance(found, dict) else found

    @property
    def parsed_objectives(self) -> tuple[Objective, ...]:
        return parse_objectives(self.objectives)

    @property
    def parsed_prices(self) -> Prices:
        return parse_prices(self.prices)


def _check_table(table: dict[str, Any], engine: Kind) -> None:
    """Check one table of candidates against the keys that all have in common."""
    for key, values in table.items():
        _check_axis(key, values)
        if key in engine:
            raise ValueError(
                f"candidates.{key}: stands in engine too, as {engine[key]!r}; keep one "
                f"of them"
            )
    for key in ("model", "gpu"):
        if key not in table and key not in engine:
            raise ValueError(
                f"candidates.{key}: this key is needed; give a list, such as "
                f"[{'h100_sxm' if key == 'gpu' else 'meta-llama/Llama-3.1-8B'}]"
            )


def _check_axis(key: str, values: Any, where: str = "candidates") -> None:
    choices = [name for name in EngineConfig.model_fields if name not in _NO_AXES]
    if key not in choices:
        raise ValueError(
            f"{where}.{key}: unknown key{did_you_mean(key, choices)}; candidates "
            f"differ in keys of the engine, such as gpu, tensor_parallel_size, "
            f"max_num_seqs"
        )
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}.{key}: give a list of values, got {values!r}")
    if len({repr(value) for value in values}) < len(values):
        raise ValueError(f"{where}.{key}: a value stands twice in {values!r}")


def load_plan(path: Path | str, overrides: Overrides = ()) -> PlanConfig:
    """Read a plan, with overrides as of `sim.config.tables.load_config`.

    Files that it names are looked for from the working directory, then beside it.
    """
    path = Path(path)
    data = read_yaml(path, "workload, candidates, objectives and prices")
    refuse_other_kind(data, path, "plan")
    override(data, overrides)
    _find_files(data, path.parent)
    return parse_plan(data)


def parse_plan(data: Mapping[str, Any]) -> PlanConfig:
    """Return the plan that a table of plain data holds; its files are found."""
    refuse_plugins(data)
    try:
        plan = PlanConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(one_line(error, PlanConfig)) from error
    plan.parsed_objectives  # noqa: B018 - refused here, with the others
    plan.parsed_prices  # noqa: B018
    return plan


def _find_files(data: dict[str, Any], directory: Path) -> None:
    find_files(data, directory)
    candidates = data.get("candidates")
    tables = candidates if isinstance(candidates, list) else [candidates]
    for table in (each for each in tables if isinstance(each, dict)):
        for key in ("model", "gpu"):
            values = table.get(key)
            if isinstance(values, list):
                table[key] = [found_path(v, directory) or v for v in values]
    profiles = data.get("profiles")
    if isinstance(profiles, dict):
        for gpu, given in profiles.items():
            profiles[gpu] = found_path(given, directory) or given
    prices = data.get("prices")
    if isinstance(prices, str):
        found = found_path(prices, directory)
        if found is None:
            raise ConfigError(
                f"prices: there is no file '{prices}'; copy examples/prices.yaml and "
                f"edit it"
            )
        data["prices"] = read_yaml(Path(found), "per_gpu_hour")
