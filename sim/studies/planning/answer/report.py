"""From the findings of a plan to ``plan.json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.results.summary.provenance import versions, workload_title
from sim.simulation.pools import pools_of, transfer_settings
from sim.studies.planning.answer.configurations import (
    config_path,
    flags_of_fleet,
    not_said,
    router_flags,
    serve_command,
)
from sim.studies.planning.answer.file import PLAN_FORMAT
from sim.studies.planning.phases.replicas import is_alone
from sim.studies.planning.phases.sensitivity import cheapest, verdict
from sim.studies.planning.phases.study import shares_text
from sim.studies.planning.spec import per_million

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.studies.planning.phases.named_fleets import GivenFleet
    from sim.studies.planning.phases.outcome import (
        CandidatePlan,
        Effect,
        Fleet,
        Interval,
    )
    from sim.studies.planning.phases.study import Study

_WIDE_POOL = 0.05
_STRETCHED = 2.0


def plan_json(
    study: Study,
    plans: Sequence[CandidatePlan],
    effects: Mapping[str, Sequence[Effect]],
    given: Sequence[GivenFleet] = (),
) -> dict[str, Any]:
    """Return all findings, JSON-ready; the same for the same plan."""
    plan, prices = study.plan, study.plan.parsed_prices
    first = next(each for each in study.candidates if not each.reason)
    best = cheapest(plans, study.target_rate)
    front = pareto_front(study, plans)
    return {
        "format": PLAN_FORMAT,
        "traffic": {
            "title": workload_title(parse_config(dict(first.run)).workload),
            "rate": study.target_rate,
            "rate_scale": first.scale,
            "rate_at_scale_1": study.base_rate,
        },
        "objectives": [
            {"name": o.name, "limit": o.limit, "rule": o.label()}
            | ({"limits_ms": dict(o.limits_ms)} if o.limits_ms else {})
            for o in plan.parsed_objectives
        ],
        "prices": {
            "currency": prices.currency,
            "date": prices.date,
            "note": prices.note,
            "per_gpu_hour": dict(prices.per_gpu_hour),
            **{
                key: price
                for key in ("per_host_gib_hour", "per_link_gb_s_hour")
                if (price := getattr(prices, key))
            },
        },
        "search": plan.search.model_dump(mode="json"),
        "replicas": plan.replicas.model_dump(mode="json"),
        "cost_band": plan.cost_band,
        "seed": plan.seed,
        "candidates": [_candidate(study, each) for each in plans],
        "cheapest": {model: each.candidate.name for model, each in best.items()},
        **({"fleets": [_given(study, each) for each in given]} if given else {}),
        "pareto": {"latency": latency_name(study), "points": front},
        "sensitivity": {
            name: _sensitivity(plans, name, found) for name, found in effects.items()
        },
        "notes": notes(study, plans),
        "versions": versions(),
    }


def _values(found: Mapping[str, Interval]) -> dict[str, dict[str, float]]:
    return {name: each._asdict() for name, each in found.items()}


def _candidate(study: Study, each: CandidatePlan) -> dict[str, Any]:
    candidate = each.candidate
    told: dict[str, Any] = {
        "name": candidate.name,
        "model": candidate.model,
        "gpu": candidate.gpu,
        "tensor_parallel_size": candidate.num_gpus,
        "status": each.status,
        "reason": each.reason or None,
        "engine": dict(candidate.run["engine"]),
        "cost_model": dict(candidate.run["cost"]),
    }
    if each.found is None:
        return told
    routed = {"routers": _routed(study, each)} if each.routed else {}
    return told | _found(each) | _fleets(study, each) | routed | _served(study, each)


def _found(each: CandidatePlan) -> dict[str, Any]:
    found = each.highest
    return {
        "num_gpu_blocks": each.candidate.pool.num_gpu_blocks,
        "rate": found.rate._asdict()
        | {
            "thresholds": list(found.thresholds),
            "spread": found.spread,
            "cost_low": found.cost_low,
            "cost_high": found.cost_high,
            "cost_bounds": "of the cost model" if each.has_bounds else "cost_band",
            "at_bound": found.at_bound or None,
        },
        "warmup_share": each.warmup_share,
        "values": _values(each.values),
        "tokens_per_s": each.tokens_per_s,
        "binding": None if each.binding is None else asdict(each.binding),
        "extrapolated": extrapolations(each),
        "curve": [
            {
                "rate": point["rate_scale"],
                "load": point.get("load", 0.0),
                "values": point["values"],
                "is_overloaded": point["is_overloaded"],
            }
            for point in each.curve
        ],
    }


def _fleets(study: Study, each: CandidatePlan) -> dict[str, Any]:
    replicas = num_gpus = cost_per_million = None
    if each.fleet is not None and each.cost_per_hour is not None:
        replicas = each.fleet.num_replicas
        num_gpus = replicas * each.candidate.num_gpus
        cost_per_million = per_million(each.cost_per_hour, each.fleet.tokens_per_s)
    return {
        "replicas": replicas,
        "num_gpus": num_gpus,
        "cost_per_hour": each.cost_per_hour,
        "cost_per_million_output_tokens": cost_per_million,
        "cost_per_million_output_tokens_when_full": per_million(
            study.cost_per_hour(each.candidate, 1), each.tokens_per_s
        ),
        "fleets": [
            _fleet(study, each, fleet)
            for fleet in (each.below, each.fleet, each.spare)
            if fleet is not None
        ],
    }


def _fleet(study: Study, each: CandidatePlan, fleet: Fleet) -> dict[str, Any]:
    return {
        "replicas": fleet.num_replicas,
        "cost_per_hour": study.cost_per_hour(each.candidate, fleet.num_replicas),
        "seeds_that_hold": fleet.holds,
        "num_seeds": fleet.num_seeds,
        "tokens_per_s": fleet.tokens_per_s,
        "values": _values(fleet.values),
    }


def _routed(study: Study, each: CandidatePlan) -> list[dict[str, Any]]:
    """Return the fleets of a candidate behind each router of the plan."""
    found = []
    for routed in each.routed:
        fewest, alike = routed.fewest, routed.alike
        shown = fewest or alike or each.fleet
        number = 1 if shown is None else shown.num_replicas
        found.append(
            {
                "router": dict(routed.router),
                "replicas": None if fewest is None else fewest.num_replicas,
                "fewest": None if fewest is None else _fleet(study, each, fewest),
                "alike": None if alike is None else _fleet(study, each, alike),
                "flags": router_flags(routed.router, number),
            }
        )
    return found


def _given(study: Study, each: GivenFleet) -> dict[str, Any]:
    """Return how a fleet that the plan names does, and how it is started."""
    told: dict[str, Any] = {
        "name": each.name,
        "cost_per_hour": each.cost_per_hour,
        "num_gpus": each.num_gpus,
        "reason": each.reason or None,
        "fleet": dict(each.run["fleet"]),
    }
    if each.seen is None:
        return told
    seen, config = each.seen, each.config
    assert config.fleet is not None
    return told | {
        "serves": seen.serves(study.plan.replicas.share_of_seeds),
        "seeds_that_hold": seen.holds,
        "num_seeds": seen.num_seeds,
        "tokens_per_s": seen.tokens_per_s,
        "values": _values(seen.values),
        "serve_commands": {
            pool.name: serve_command(
                pool.engine, pool.capacity, transfer_settings(pool)
            )
            for pool in pools_of(config)
        },
        "router_flags": flags_of_fleet(config),
    }


def _served(study: Study, each: CandidatePlan) -> dict[str, Any]:
    """Return how to run it, simulated and for real."""
    config = parse_config(dict(each.candidate.run))
    number = each.fleet.num_replicas if each.fleet else 1
    flags = {}
    if number > 1 and not is_alone(each):
        flags = {"router_flags": router_flags(study.routers[0], number)}
    return flags | {
        "config": config_path(each),
        "serve_command": serve_command(config.engine, each.candidate.pool),
        "not_in_the_command": not_said(config.engine),
    }


def _sensitivity(
    plans: Sequence[CandidatePlan], name: str, effects: Sequence[Effect]
) -> dict[str, Any]:
    each = next(plan for plan in plans if plan.candidate.name == name)
    return {
        "verdict": verdict(each, effects),
        "effects": [asdict(effect) for effect in effects],
    }


def latency_name(study: Study) -> str:
    """Return the latency of the Pareto front: the first that is promised."""
    for objective in study.plan.parsed_objectives:
        if objective.unit:
            return objective.name
    return "p95_e2el_ms"


def pareto_front(study: Study, plans: Sequence[CandidatePlan]) -> list[dict[str, Any]]:
    """Return every fleet that serves the traffic, and whether none beats it.

    A fleet is beaten by one of the same model that costs no more and is no slower, and
    is better in one of the two.
    """
    name = latency_name(study)
    points: list[dict[str, Any]] = [
        {
            "candidate": each.candidate.name,
            "model": each.candidate.model,
            **({"router": str(router["kind"])} if each.routed else {}),
            "replicas": fleet.num_replicas,
            "cost_per_hour": study.cost_per_hour(each.candidate, fleet.num_replicas),
            "latency_ms": fleet.values[name].value,
            "latency_low_ms": fleet.values[name].low,
            "latency_high_ms": fleet.values[name].high,
        }
        for each in plans
        if each.fleet is not None
        for router, fleet in _serving(study, each)
        if name in fleet.values
    ]
    for point in points:
        point["on_front"] = not any(_beats(other, point) for other in points)
    return points


def _serving(
    study: Study, each: CandidatePlan
) -> Iterator[tuple[Mapping[str, Any], Fleet]]:
    """Yield a candidate's fleets that serve the traffic, and their routers."""
    for fleet in (each.fleet, each.spare):
        if fleet is not None:
            yield study.routers[0], fleet
    share = study.plan.replicas.share_of_seeds
    for routed in each.routed[1:]:
        found = {
            fleet.num_replicas: fleet
            for fleet in (routed.alike, routed.fewest)
            if fleet
        }
        for fleet in found.values():
            if fleet.serves(share):
                yield routed.router, fleet


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one["model"] != other["model"]:
        return False
    pairs = [(one[k], other[k]) for k in ("cost_per_hour", "latency_ms")]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def extrapolations(each: CandidatePlan) -> list[str]:
    """Return in words the parts of an answer that rest on no measurement."""
    found, capacity = each.highest, each.candidate.pool
    told = []
    kind = each.candidate.run["cost"]["kind"]
    if kind == "roofline":
        told.append("step times: datasheet and architecture, nothing measured")
    if each.extrapolated_share > 0:
        told.append(
            f"step times: {each.extrapolated_share:.1%} of the time outside of what "
            f"the cost model was fitted on"
        )
    low, high = capacity.num_gpu_blocks_low, capacity.num_gpu_blocks_high
    if high - low > 2 * _WIDE_POOL * capacity.num_gpu_blocks:
        told.append(
            f"KV blocks: {low:,} to {high:,}: {'; '.join(capacity.extrapolated)}"
        )
    if found.at_bound:
        told.append(f"the rate: the search ended at its {found.at_bound} bound")
    return told


def notes(study: Study, plans: Sequence[CandidatePlan]) -> list[str]:
    """Return notes to the reader of all rows."""
    told = []
    band = study.plan.cost_band
    if band and any(p.found is not None and not p.has_bounds for p in plans):
        told.append(
            f"'if steps are off' is a band of {band:.0%} on every step (cost_band) "
            f"where the cost model knows no bounds of its own"
        )
    trace = study.plan.workload.trace
    rates = [each.found.rate.value for each in plans if each.found is not None]
    highest = max([study.target_rate, *rates]) / study.base_rate
    if trace is not None and highest > _STRETCHED:
        how = trace.get("scale_by", "compression")
        told.append(
            f"the trace was recorded at {study.base_rate:.3g} requests/s and is "
            f"extrapolated to {highest:.3g} times that by {how}"
        )
    with_host = next((p.candidate for p in plans if p.candidate.host_gib), None)
    if with_host is not None and not shares_text(with_host):
        told.append(
            "no prompt begins as another one, so that host memory behind the cache "
            "spares nothing but what preemptions lose: does the traffic tell what "
            "prompts share? (workload: prefixes, sessions, or a trace that does)"
        )
    wide = [p for p in plans if p.found is not None and p.found.spread > 0.1]
    if wide:
        widest = max(wide, key=lambda each: each.highest.spread)
        told.append(
            f"thresholds of {len(wide)} candidates spread by more than 10 % from seed "
            f"to seed, most of {widest.candidate.name}; longer traffic narrows that "
            f"(workload.resample.num_windows)"
        )
    return told
