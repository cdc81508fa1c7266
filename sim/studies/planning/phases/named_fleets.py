"""Fleets that a plan names: pools of several GPU types, prefill and decode apart."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.errors import CapacityError, ConfigError
from sim.simulation.pools import pools_of
from sim.studies.planning.search import tasks
from sim.studies.planning.spec import as_router

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.config.tables import RunConfig
    from sim.studies.planning.phases.outcome import Fleet
    from sim.studies.planning.phases.study import Study

_WARMUP_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class GivenFleet:
    """A fleet that a plan names, and how it serves the traffic."""

    name: str
    run: Mapping[str, Any]
    """A configuration of ``kvsim run`` with the plan's traffic."""
    cost_per_hour: float
    num_gpus: int
    seen: Fleet | None = None
    reason: str = ""
    """Why it cannot run; empty if it can."""

    @property
    def config(self) -> RunConfig:
        return parse_config(dict(self.run))

    @property
    def num_engines(self) -> int:
        """Engines of all pools."""
        fleet = self.config.fleet
        assert fleet is not None
        return fleet.num_engines


def expanded(table: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each combination of a table of fleets, with its name.

    ``replicas`` of a pool, ``router`` and ``decode_router`` may be lists; a router may
    be named by its kind alone.
    """
    pools = table["pools"]
    replicas = [_listed(pool.get("replicas", 1)) for pool in pools]
    routers = _listed(table.get("router", "round_robin"))
    decode = _listed(table.get("decode_router"))
    for *numbers, router, behind in product(*replicas, routers, decode):
        fleet = deepcopy(
            {k: v for k, v in table.items() if k not in {"name", "engine"}}
        )
        fleet["router"] = as_router(router)
        if behind is not None:
            fleet["decode_router"] = as_router(behind)
        fleet["pools"] = [
            {**pool, "replicas": number}
            for pool, number in zip(pools, numbers, strict=True)
            if number
        ]
        said = " + ".join(
            f"{pool['replicas']} {pool['name']}" for pool in fleet["pools"]
        )
        kinds = fleet["router"]["kind"]
        if behind is not None:
            kinds += f", {fleet['decode_router']['kind']}"
        yield f"{table.get('name', 'fleet')}: {said} behind {kinds}", fleet


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def given_fleets(study: Study) -> list[GivenFleet]:
    """Simulate the fleets that a plan names, each with the seeds of its replicas."""
    fleets = [each for table in study.plan.fleets for each in _fleets_of(study, table)]
    running = [each for each in fleets if not each.reason]
    settings = study.plan.replicas
    seeds = study.seeds[: settings.num_seeds]
    share = study.plan.search.warmup_share
    groups = [
        [
            tasks.request_of(
                {**each.run, "seed": seed},
                study.plan.objectives,
                warmup_share=_WARMUP_SHARE if share is None else share,
                rate_scale=study.candidates[0].scale,
                fleet=each.run["fleet"],
            )
            for seed in seeds
        ]
        for each in running
    ]
    answers = study.ask("fleets", tasks.observe, groups) if running else []
    seen = {
        each.name: study.fleet(each.num_engines, points, each.name)
        for each, points in zip(running, answers, strict=True)
    }
    return [replace(each, seen=seen.get(each.name)) for each in fleets]


def _fleets_of(study: Study, table: Mapping[str, Any]) -> Iterator[GivenFleet]:
    plan, prices = study.plan, study.plan.parsed_prices
    first = next(each for each in study.candidates if not each.reason)
    engine = {**plan.engine, **table.get("engine", {})}
    for key in ("model", "gpu"):
        engine.setdefault(key, first.run["engine"][key])
    for name, fleet in expanded(table):
        run = {
            "workload": first.run["workload"],
            "engine": engine,
            "cost": first.run["cost"],
            "fleet": fleet,
            "seed": plan.seed,
        }
        config = parse_config(run)
        assert config.fleet is not None
        cost_per_hour, num_gpus = 0.0, 0
        for pool in config.fleet.pools:
            own = config.engine_of(pool)
            gpus = own.tensor_parallel_size * own.pipeline_parallel_size
            gpus *= own.data_parallel_size * pool.replicas
            prices.check([own.gpu])
            gib = (own.kv_offloading_size or 0.0) * pool.replicas
            cost_per_hour += prices.per_hour(own.gpu, gpus, gib)
            num_gpus += gpus
        reason = ""
        try:
            pools_of(config)
        except (CapacityError, ConfigError) as error:
            reason = " ".join(str(error).split())
        yield GivenFleet(name, run, cost_per_hour, num_gpus, reason=reason)
