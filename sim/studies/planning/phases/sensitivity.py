"""Sensitivities of the cheapest configurations, lever by lever.

Each change is searched with the seeds of the base and the same part of the traffic, so
that the same requests meet both and a small gain shows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import log, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.config.plug import did_you_mean
from sim.config.tables import parse_config
from sim.costs.experts.kernels import reached_by_key
from sim.costs.roofline.parameters import RooflineParameters
from sim.errors import ConfigError
from sim.hardware.gpus import load_gpu
from sim.hardware.interconnects import link_of, load_interconnect
from sim.hardware.models.bundled import load_model, resolved_model
from sim.studies.planning.phases.outcome import Effect, cost_rank, is_noise
from sim.studies.planning.phases.study import SMALL_PART
from sim.studies.planning.search import tasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.studies.planning.phases.candidates import Candidate
    from sim.studies.planning.phases.outcome import CandidatePlan
    from sim.studies.planning.phases.study import Answer, Study

_RELAXED = 1.1
"""Resources are made a tenth larger, all alike, so that gains can be compared."""

_STANDARD_ERRORS = 2.0
"""Of the mean over seeds: a smaller change may be no effect."""

_RATES = {
    "compute": (
        "gemm_compute_efficiency",
        "fp8_gemm_compute_efficiency",
        "moe_compute_efficiency",
        "prefill_attention_efficiency",
    ),
    "memory_bandwidth": (
        "gemm_bandwidth_efficiency",
        "moe_bandwidth_efficiency",
        "decode_bandwidth_efficiency",
        "fp8_decode_bandwidth_efficiency",
        "elementwise_bandwidth_efficiency",
        "copy_efficiency",
    ),
    "swap_bandwidth": ("swap_efficiency",),
}
_TIMES = {
    "swap_bandwidth": ("swap_call_s",),
    "host": (
        "step_overhead_s",
        "request_overhead_s",
        "schedule_request_s",
        "layer_latency_s",
        "moe_layer_latency_s",
        "qk_norm_latency_s",
    ),
}
RESOURCE_WORDS = {
    "kv_capacity": "KV blocks",
    "compute": "compute",
    "memory_bandwidth": "memory bandwidth",
    "interconnect": "interconnect",
    "swap_bandwidth": "swap bandwidth",
    "host": "host",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}


@dataclass(frozen=True, slots=True)
class Lever:
    """One change; `Effect` has its outcome."""

    name: str
    change: str
    """In words: ``x 1.1``, ``32``, ``off``."""
    overrides: Mapping[str, Any]
    resource: str = ""
    """The resource that it makes a tenth larger; empty for other changes."""

    def apply(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the change."""
        changed = {**run}
        for key, value in self.overrides.items():
            table, _, name = key.partition(".")
            changed[table] = {**changed[table], name: value}
        return changed


def levers_of(
    candidate: Candidate, settings: Mapping[str, list[Any]]
) -> Iterator[Lever]:
    """Yield all changes that the candidate's generation has, then the plan's own."""
    engine = parse_config(dict(candidate.run)).engine
    yield from _resources(candidate)
    yield from _limits(candidate, engine)
    yield from _cache(candidate, engine)
    yield from _preemption(engine)
    yield from _drafts(engine)
    for key, values in settings.items():
        for value in values:
            if value != getattr(engine, key):
                yield _engine(key, value)


def _engine(key: str, value: Any, change: str = "", resource: str = "") -> Lever:
    word = str(value)
    if isinstance(value, bool):
        word = "on" if value else "off"
    said = change or word
    return Lever(key, said, {f"engine.{key}": value}, resource)


def _resources(candidate: Candidate) -> Iterator[Lever]:
    """Yield each resource of time a tenth larger, where the cost model lets it be."""
    cost = candidate.run["cost"]
    if cost["kind"] != "roofline":
        return
    if candidate.num_gpus > 1:
        yield _faster_link(candidate)
    for resource in (*_RATES, "host"):
        if resource == "swap_bandwidth" and not _swaps(candidate):
            continue
        overrides = {
            f"cost.{key}": min(1.0, _value(candidate, key) * _RELAXED)
            for key in _RATES.get(resource, ())
        } | {
            f"cost.{key}": _value(candidate, key) / _RELAXED
            for key in _TIMES.get(resource, ())
        }
        yield Lever(RESOURCE_WORDS[resource], "+10 %", overrides, resource)


def _faster_link(candidate: Candidate) -> Lever:
    engine, resource = candidate.run["engine"], "interconnect"
    given = engine.get(resource)
    stages = int(engine.get("pipeline_parallel_size", 1))
    num_ranks = candidate.num_gpus // stages
    link = (
        link_of(load_gpu(engine["gpu"]), num_ranks if num_ranks > 1 else stages)
        if given is None
        else load_interconnect(given)
    )
    fitted = candidate.run["cost"].get("link_bytes_per_s")
    overrides: dict[str, Any] = {
        f"engine.{resource}": asdict(link)
        | {"bytes_per_s": link.bytes_per_s * _RELAXED, "hop_s": link.hop_s / _RELAXED}
    }
    if fitted is not None:
        overrides["cost.link_bytes_per_s"] = fitted * _RELAXED
    return Lever(RESOURCE_WORDS[resource], "+10 %", overrides, resource)


def _value(candidate: Candidate, key: str) -> float:
    cost, gpu = candidate.run["cost"], load_gpu(candidate.run["engine"]["gpu"])
    found = cost.get(key)
    if found is None and key == "schedule_request_s":
        engine = parse_config(dict(candidate.run)).engine
        found = engine.generation.schedule_request_s
    if found is None:
        found = _default(key)
    if found is None:
        choice = cost.get("efficiencies", _default("efficiencies"))
        engine = parse_config(dict(candidate.run)).engine
        model = load_model(engine.model)
        model = resolved_model(model, engine.dtype, engine.quantization)
        found = reached_by_key(model, gpu, choice)[key]
    return float(found)


def _default(key: str) -> Any:
    return RooflineParameters.__dataclass_fields__[key].default


def _limits(candidate: Candidate, engine: EngineConfig) -> Iterator[Lever]:
    capacity = candidate.pool
    for key, resource in (
        ("max_num_seqs", "max_num_seqs"),
        (engine.budget_key, "max_num_batched_tokens"),
    ):
        value = getattr(capacity, resource)
        yield _engine(key, round(value * _RELAXED), "+10 %", resource)
        yield _engine(key, max(1, value // 2), f"x 0.5 ({max(1, value // 2):,})")
        yield _engine(key, value * 2, f"x 2 ({value * 2:,})")


def _cache(candidate: Candidate, engine: EngineConfig) -> Iterator[Lever]:
    for factor, resource in ((_RELAXED, "kv_capacity"), (0.5, ""), (2.0, "")):
        number = max(2, round(candidate.pool.num_gpu_blocks * factor))
        said = "+10 %" if resource else f"x {factor:g} ({number:,})"
        key = "engine.num_gpu_blocks_override"
        yield Lever("KV blocks", said, {key: number}, resource)
    pool = engine.num_gpu_blocks_override
    for size in {engine.block_size // 2 or 1, engine.block_size * 2}:
        overrides: dict[str, Any] = {"engine.block_size": size}
        if pool is not None:  # as many tokens as before
            overrides["engine.num_gpu_blocks_override"] = max(
                2, pool * engine.block_size // size
            )
        yield Lever("block_size", str(size), overrides)
    if "watermark" in engine.generation.keys:
        for share in (0.0, 0.05):
            if share != engine.watermark:
                yield _engine("watermark", share)
    if engine.generation.enable_prefix_caching is not None:
        yield _engine("enable_prefix_caching", not engine.prefix_caching)


def _swaps(candidate: Candidate) -> bool:
    return parse_config(dict(candidate.run)).engine.generation.has_cpu_tier


def _preemption(engine: EngineConfig) -> Iterator[Lever]:
    if not engine.generation.has_cpu_tier:
        return
    for mode in ("recompute", "swap"):
        if mode != engine.preemption_mode:
            yield _engine("preemption_mode", mode)
    for factor in (0.5, 2.0):
        value = engine.swap_space * factor
        yield _engine("swap_space", value, f"x {factor:g} ({value:g} GiB)")


def _drafts(engine: EngineConfig) -> Iterator[Lever]:
    """Yield other numbers of draft tokens, and none, where there is a drafter."""
    table = engine.speculative_config
    if table is None:
        return
    number = table.num_speculative_tokens
    for other in sorted({0, 1, max(number - 1, 0), number + 1, number + 2} - {number}):
        changed = table.model_dump() | {"num_speculative_tokens": other}
        overrides = {"engine.speculative_config": changed}
        yield Lever("num_speculative_tokens", str(other), overrides)


def cheapest(
    plans: Sequence[CandidatePlan], target_rate: float
) -> dict[str, CandidatePlan]:
    """Return the cheapest candidate of each model that serves the traffic."""
    found: dict[str, CandidatePlan] = {}
    ranks: dict[str, tuple[float, float]] = {}
    for each in plans:
        if each.cost_per_hour is None or each.fleet is None:
            continue
        model, number = each.candidate.model, each.fleet.num_replicas
        slow = each.highest.cost_low
        rank = cost_rank(each.cost_per_hour, number, slow, target_rate)
        if model not in ranks or rank < ranks[model]:
            found[model], ranks[model] = each, rank
    return found


def chosen(study: Study, plans: Sequence[CandidatePlan]) -> list[CandidatePlan]:
    """Return the candidates whose sensitivities the plan asks for."""
    settings = study.plan.sensitivity
    if settings is None:
        return []
    if settings.of == "cheapest":
        return list(cheapest(plans, study.target_rate).values())
    by_name = {each.candidate.name: each for each in plans}
    if settings.of not in by_name:
        raise ConfigError(
            f"sensitivity.of: there is no candidate '{settings.of}'"
            f"{did_you_mean(settings.of, by_name)}; give one of "
            f"{', '.join(by_name)}, or cheapest"
        )
    each = by_name[settings.of]
    return [] if each.found is None else [each]


def sensitivities(
    study: Study, plans: Sequence[CandidatePlan]
) -> dict[str, list[Effect]]:
    """Return the effect of every lever on each chosen candidate, by its name."""
    bases = chosen(study, plans)
    settings = study.plan.sensitivity
    if not bases or settings is None:
        return {}
    places = range(min(settings.num_seeds, len(study.seeds)))
    cases = [
        (base, lever)
        for base in bases
        for lever in levers_of(base.candidate, settings.settings)
    ]
    unchanged = _unchanged(study, bases, places)
    groups = [
        [
            _request(study, *case, i, unchanged[case[0].candidate.name][i])
            for i in places
        ]
        for case in cases
    ]
    answers = study.try_to("sensitivities", tasks.change, groups)
    effects: dict[str, list[Effect]] = {base.candidate.name: [] for base in bases}
    for (base, lever), own in zip(cases, answers, strict=True):
        name = base.candidate.name
        effects[name].append(_effect(study, lever, unchanged[name], own))
    return effects


def _unchanged(
    study: Study, bases: Sequence[CandidatePlan], places: Sequence[int]
) -> dict[str, list[Answer]]:
    """Return the answers of each base on the part of the traffic that changes meet.

    That is an observation about where the objectives stop to hold, and its
    ``threshold``.
    """
    groups = [
        [
            study.search_request(
                base, study.seeds[i], base.highest.rate.value, part=SMALL_PART
            )
            for i in places
        ]
        for base in bases
    ]
    answers = study.ask("sensitivities", tasks.threshold, groups)
    return {
        base.candidate.name: [_nearest(answer) for answer in own]
        for base, own in zip(bases, answers, strict=True)
    }


def _nearest(answer: Answer) -> Answer:
    """Return the observation nearest to a threshold, of runs to their end if any."""
    threshold = answer["rate_scale"]

    def distance(seen: Answer) -> tuple[bool, float]:
        return seen["margin"] is None, abs(log(seen["rate_scale"] / threshold))

    nearest: Answer = min(answer["tried"], key=distance)
    return nearest | {"threshold": threshold}


def _request(
    study: Study, base: CandidatePlan, lever: Lever, place: int, before: Answer
) -> Answer:
    """Return the question about a change on the traffic of one of the seeds."""
    asked = ("margin", "margins", "values", "threshold")
    request = study.search_request(
        base,
        study.seeds[place],
        before["rate_scale"] * study.base_rate,
        part=SMALL_PART,
        before={name: before[name] for name in asked},
    )
    return request | {"run": lever.apply(request["run"])}


def _effect(
    study: Study,
    lever: Lever,
    unchanged: Sequence[Answer],
    answers: Sequence[Answer | str],
) -> Effect:
    names = [each.name for each in study.plan.parsed_objectives]
    known = [answer for answer in answers if not isinstance(answer, str)]
    refusals = [answer for answer in answers if isinstance(answer, str)]
    gain: float | None = None
    noise = 0.0
    latency_gain: dict[str, float | None] = dict.fromkeys(names)
    if not refusals:
        pairs = zip(known, unchanged, strict=True)
        gains = [a["rate_scale"] / before["threshold"] - 1 for a, before in pairs]
        gain = float(np.mean(gains))
        noise = study.plan.search.tolerance / 2
        if len(gains) > 1:
            error = float(np.std(gains, ddof=1)) / sqrt(len(gains))
            noise = max(noise, _STANDARD_ERRORS * error)
        latency_gain = {name: _latency_gain(unchanged, known, name) for name in names}
    return Effect(
        lever=lever.name,
        change=lever.change,
        overrides=lever.overrides,
        rate_gain=gain,
        latency_gain=latency_gain,
        resource=lever.resource,
        reason=refusals[0] if refusals else "",
        noise=noise,
    )


def _latency_gain(
    unchanged: Sequence[Answer], answers: Sequence[Answer], name: str
) -> float | None:
    """Return the change of an objective's value at the base's rate, seed by seed."""
    gains = []
    for point, answer in zip(unchanged, answers, strict=True):
        old, new = point["values"].get(name), answer["at_base"]["values"].get(name)
        if not old or new is None or answer["at_base"]["is_overloaded"]:
            return None
        gains.append(new / old - 1)
    return float(np.mean(gains)) if gains else None


def verdict(each: CandidatePlan, effects: Sequence[Effect]) -> str:
    """Say whether the binding resource is the lever that moves the rate.

    Compared are the changes that make each resource a tenth larger.
    """
    relaxed = [e for e in effects if e.resource and e.rate_gain is not None]
    if each.binding is None or not relaxed:
        return ""
    best = max(relaxed, key=lambda effect: effect.rate_gain or 0.0)
    if is_noise(asdict(best)):
        return "a tenth more of no single resource raises the rate beyond noise"
    word = RESOURCE_WORDS[best.resource]
    said = f"a tenth more of {word} raises the rate by {best.rate_gain:.1%}"
    if best.resource == each.binding.resource:
        return f"{said}, more than of anything else"
    own = [e for e in relaxed if e.resource == each.binding.resource]
    if not own:
        return f"{said}, most of all that could be tried"
    return (
        f"but {said}, and of {RESOURCE_WORDS[each.binding.resource]} by "
        f"{own[0].rate_gain:.1%}: trust the former"
    )
