"""What to change about the cheapest configurations, lever by lever.

Each change is searched with the seeds of the base, so that the same traffic meets both
and a small gain shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.config.plug import did_you_mean
from sim.errors import ConfigError
from sim.studies.planning import tasks
from sim.studies.planning.levers import RESOURCE_WORDS, Lever, levers_of
from sim.studies.planning.outcome import Effect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.studies.planning.crew import Answer
    from sim.studies.planning.outcome import CandidatePlan
    from sim.studies.planning.planner import Planner


def cheapest(plans: Sequence[CandidatePlan]) -> dict[str, CandidatePlan]:
    """Return the cheapest candidate of each model that serves the traffic."""
    found: dict[str, CandidatePlan] = {}
    for each in plans:
        if each.cost_per_hour is None:
            continue
        best = found.get(each.candidate.model)
        if best is None or each.cost_per_hour < (best.cost_per_hour or 0.0):
            found[each.candidate.model] = each
    return found


def chosen(planner: Planner, plans: Sequence[CandidatePlan]) -> list[CandidatePlan]:
    """Return the candidates whose sensitivities the plan asks for.

    Raises
    ------
    ConfigError
        If it names one that does not exist, or holds nothing.
    """
    settings = planner.plan.sensitivity
    if settings is None:
        return []
    if settings.of == "cheapest":
        return list(cheapest(plans).values())
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
    planner: Planner, plans: Sequence[CandidatePlan]
) -> dict[str, list[Effect]]:
    """Return the effect of every lever on each chosen candidate, by its name."""
    bases = chosen(planner, plans)
    settings = planner.plan.sensitivity
    if not bases or settings is None:
        return {}
    seeds = planner.seeds[: settings.num_seeds]
    cases = [
        (base, lever)
        for base in bases
        for lever in levers_of(base.candidate, settings.settings)
    ]
    requests = [
        _request(planner, base, lever, seed) for base, lever in cases for seed in seeds
    ]
    answers = planner.crew.try_to("sensitivities", tasks.change, requests)
    effects: dict[str, list[Effect]] = {base.candidate.name: [] for base in bases}
    num = len(seeds)
    for i, (base, lever) in enumerate(cases):
        own = answers[i * num : (i + 1) * num]
        effect = _effect(planner, base, lever, own)
        effects[base.candidate.name].append(effect)
    return effects


def _request(planner: Planner, base: CandidatePlan, lever: Lever, seed: int) -> Answer:
    assert base.found is not None
    request = planner.search_request(base, seed, base.found.rate.value)
    return request | {"run": lever.apply(request["run"])}


def _effect(
    planner: Planner,
    base: CandidatePlan,
    lever: Lever,
    answers: Sequence[Answer | str],
) -> Effect:
    refusals = [answer for answer in answers if isinstance(answer, str)]
    names = [each.name for each in planner.plan.parsed_objectives]
    if refusals:
        nothing: dict[str, float | None] = dict.fromkeys(names)
        return Effect(
            lever.name,
            lever.change,
            lever.overrides,
            None,
            nothing,
            lever.resource,
            refusals[0],
        )
    assert base.found is not None
    known = [answer for answer in answers if not isinstance(answer, str)]
    gains = [
        answer["rate_scale"] * planner.base_rate / threshold - 1
        for answer, threshold in zip(known, base.found.thresholds, strict=False)
    ]
    return Effect(
        lever.name,
        lever.change,
        lever.overrides,
        float(np.mean(gains)),
        {name: _latency_gain(base, known, name) for name in names},
        lever.resource,
    )


def _latency_gain(
    base: CandidatePlan, answers: Sequence[Mapping[str, Any]], name: str
) -> float | None:
    """Return the change of an objective's value at the base's rate, seed by seed."""
    before = [p for p in base.curve if p.get("load") == 1.0]
    gains = []
    for point, answer in zip(before, answers, strict=False):
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
