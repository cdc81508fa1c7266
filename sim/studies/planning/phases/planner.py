"""A capacity plan, phase by phase; each phase is a batch of independent questions.

::

    candidates --> pilot       idle, the threshold roughly, the warm-up
                   shortlist   those that are cheapest by that, where a plan has one
                   thresholds  one search a seed: the highest rate, and its interval
                   at the rate objectives, binding resource, the curve, cost bounds
                   fleets      the fewest replicas that serve the split traffic
                   sensitivity of the cheapest, lever by lever

The questions of a phase depend on the answers of the one before and on nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import ConfigError
from sim.studies.planning.phases.named_fleets import expanded, given_fleets
from sim.studies.planning.phases.outcome import (
    CandidatePlan,
    FoundRate,
    median_interval,
    updated,
)
from sim.studies.planning.phases.progress import Expected
from sim.studies.planning.phases.replicas import FAR, with_fleets, with_routers
from sim.studies.planning.phases.sensitivity import levers_of, sensitivities
from sim.studies.planning.phases.study import SMALL_PART
from sim.studies.planning.search import tasks
from sim.studies.planning.search.binding import binding_of, mean_facts, worst

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.studies.planning.phases.candidates import Candidate
    from sim.studies.planning.phases.named_fleets import GivenFleet
    from sim.studies.planning.phases.outcome import Effect
    from sim.studies.planning.phases.study import Answer, Study


class Planner:
    """Makes a plan phase by phase; its findings so far stay if it is stopped."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.plans: list[CandidatePlan] = []
        self.effects: dict[str, list[Effect]] = {}
        self.given: list[GivenFleet] = []

    def run(self) -> None:
        """Find the numbers of each candidate, and of changes to the cheapest.

        Raises ConfigError if no candidate meets the objectives even when idle, and
        StoppedError if the executor was stopped.
        """
        self.plans = _pilot(self.study)
        self.plans = _shortlisted(self.study, _within_reach(self.study, self.plans))
        self.plans = _thresholds(self.study, self.plans)
        self.plans = _at_the_rate(self.study, self.plans)
        self.plans = with_fleets(self.study, self.plans)
        self.plans = with_routers(self.study, self.plans)
        self.given = given_fleets(self.study)
        self.effects = sensitivities(self.study, self.plans)


_IDLE_RUNS, _PILOT_RUNS, _SEARCH_RUNS, _FLEET_RUNS = 1.5, 3.0, 1.2, 1.2
"""About as many runs at a rate take the time of an answer of a phase."""


def expected_questions(study: Study) -> dict[str, Expected]:
    """Return estimates of each phase's questions, where all candidates go through."""
    plan, search = study.plan, study.plan.search
    fitting = [each for each in study.candidates if not each.reason]
    num_live = sum(len(own[: search.shortlist]) for own in _by_model(fitting))
    num_loads = len([load for load in search.curve if load != 1.0])
    num_at_rate = len(study.seeds_at_rate) + num_loads * search.curve_seeds
    num_fleet_seeds = min(plan.replicas.num_seeds, search.num_seeds)
    num_fleets = num_fleet_seeds * (1 + bool(plan.replicas.spare)) + 2
    expected = {
        "idle runs": Expected(len(fitting), _IDLE_RUNS),
        "pilot runs": Expected(len(fitting), _PILOT_RUNS),
        "highest rates": Expected(num_live * search.num_seeds, _SEARCH_RUNS),
        "at these rates": Expected(num_live * num_at_rate, 1.0),
        "cost bounds": Expected(num_live * 2, 1.0),
        "replicas": Expected(num_live * num_fleets, _FLEET_RUNS),
    }
    if plan.fleets:
        number = sum(1 for table in plan.fleets for _ in expanded(table))
        expected["fleets"] = Expected(number * num_fleet_seeds, _FLEET_RUNS)
    if plan.sensitivity is not None:
        bases = {each.model: each for each in fitting}.values()
        settings = plan.sensitivity.settings
        num_levers = sum(len(list(levers_of(each, settings))) for each in bases)
        num_questions = (num_levers + len(bases)) * plan.sensitivity.num_seeds
        expected["sensitivities"] = Expected(num_questions, _SEARCH_RUNS)
    return expected


def _live(plans: Sequence[CandidatePlan]) -> list[CandidatePlan]:
    return [each for each in plans if each.found is not None]


# -- pilot runs ---------------------------------------------------------------------


def _pilot(study: Study) -> list[CandidatePlan]:
    """Run pilots of all candidates; of a shortlist, of those that may get there."""
    most = study.plan.search.shortlist
    left = [each for each in study.candidates if not each.reason]
    if most is not None:
        left.sort(key=lambda each: study.cost_per_hour(each, 1))
    found: dict[str, CandidatePlan] = {
        each.name: replace(
            CandidatePlan(each), status="does_not_fit", reason=each.reason
        )
        for each in study.candidates
        if each.reason
    }
    misses: dict[str, float] = {}
    while left:
        asked = [each for own in _by_model(left) for each in own[:most]]
        left = [each for own in _by_model(left) for each in own[most or len(own) :]]
        for each, answer in zip(asked, _pilot_answers(study, asked), strict=True):
            plan = CandidatePlan(each)
            if isinstance(answer, str):
                found[each.name] = replace(plan, status="does_not_fit", reason=answer)
                continue
            found[each.name] = _after_pilot(study, plan, answer)
            if found[each.name].status == "misses_idle":
                margins = answer["idle"]["margins"].values()
                misses[each.name] = max(inf if m is None else m for m in margins)
        for own in _by_model(left):
            bar = _cost_to_beat(study, own[0].model, list(found.values()))
            for each in own:
                if study.cost_per_hour(each, 1) > bar:
                    found[each.name] = _left_out(
                        study, CandidatePlan(each), study.cost_per_hour(each, 1), 1
                    )
        left = [each for each in left if each.name not in found]
    plans = [found[each.name] for each in study.candidates]
    _check_any(plans, misses)
    return plans


def _by_model(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Return the candidates of each model, which answer different questions."""
    found: dict[str, list[Candidate]] = {}
    for each in candidates:
        found.setdefault(each.model, []).append(each)
    return list(found.values())


def _pilot_answers(study: Study, candidates: Sequence[Candidate]) -> list[Answer | str]:
    """Return each candidate's ``idle`` and, where it serves one request, its pilot."""
    search = study.plan.search
    given = {"warmup_share": search.warmup_share}
    questions = [
        study.request(each, study.plan.seed, 0.0) | given for each in candidates
    ]
    found = study.try_to("idle runs", tasks.idle, [[each] for each in questions])
    answers = [group[0] for group in found]
    more = {
        "tolerance": 2 * search.tolerance,
        "bounds": study.bounds,
        "seeds": study.seeds,
    }
    asked = {
        place: questions[place] | more | {"guess": each["guess"]}
        for place, each in enumerate(answers)
        if not isinstance(each, str) and _serves_idle(each["idle"])
    }
    pilots = study.try_to("pilot runs", tasks.pilot, [[q] for q in asked.values()])
    for place, (pilot,) in zip(asked, pilots, strict=True):
        idle = answers[place]
        assert not isinstance(idle, str)
        answers[place] = pilot if isinstance(pilot, str) else idle | pilot
    return answers


def _serves_idle(idle: Answer) -> bool:
    """Whether no request is refused, and each objective is met without load."""
    margin = idle["margin"]
    return margin is not None and margin <= 0 and not idle["num_rejected"]


def _after_pilot(study: Study, each: CandidatePlan, answer: Answer) -> CandidatePlan:
    idle = answer["idle"]
    if idle["num_rejected"]:
        share = idle["num_rejected"] / idle["num_requests"]
        reason = (
            f"{share:.2%} of the requests are longer than its "
            f"{each.candidate.pool.max_model_len:,} tokens"
        )
        return replace(each, status="rejects", reason=reason)
    if "rate_scale" not in answer:
        return replace(each, status="misses_idle", reason=_idle_reason(study, idle))
    found = FoundRate(
        rate=median_interval([answer["rate_scale"] * study.base_rate], 0.5),
        thresholds=(),
        spread=0.0,
        cost_low=0.0,
        cost_high=inf,
        at_bound=answer["at_bound"],
        slope=answer["slope"],
    )
    return replace(
        each,
        found=found,
        warmup_share=answer["warmup_share"],
        curve=(idle | {"rate_scale": 0.0},),
        has_bounds=idle["has_bounds"],
    )


def _within_reach(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Leave out candidates of far too many replicas, where another of the model fits.

    A fleet does somewhat better or worse than its engines alone, and a pilot run is
    off by some per cent; neither makes up for half as many again.
    """
    most = study.plan.replicas.most
    live = _live(plans)
    near = {each.candidate.model for each in live if _guess(study, each)[1] <= most}
    left = []
    for each in live:
        engines = _guess(study, each)[1]
        if engines > FAR * most and each.candidate.model in near:
            reason = (
                f"roughly {each.highest.rate.value:,.3g} requests/s an engine by its "
                f"pilot run, so that {most} replicas do not serve "
                f"{study.target_rate:,.4g}"
            )
            left.append(replace(each, status="too_many", reason=reason, found=None))
    return updated(plans, left)


def _shortlisted(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Leave out candidates that cost more than enough others of their model.

    The pilot runs say so.
    """
    most = study.plan.search.shortlist
    if most is None:
        return plans
    by_name = {each.candidate.name: each for each in _live(plans)}
    left: list[CandidatePlan] = []
    for own in _by_model(each.candidate for each in by_name.values()):
        found = [by_name[each.name] for each in own]
        left += sorted(found, key=lambda each: _guess(study, each))[most:]
    return updated(
        plans, [_left_out(study, each, *_guess(study, each)) for each in left]
    )


def _guess(study: Study, each: CandidatePlan) -> tuple[float, float]:
    """Return cost and number of engines by the rate of a pilot run."""
    engines = study.target_rate / each.highest.rate.value
    return study.cost_per_hour(each.candidate, ceil(engines)), engines


def _cost_to_beat(study: Study, model: str, plans: Sequence[CandidatePlan]) -> float:
    """Return the cost up to which a candidate of a model is searched."""
    own = (each for each in _live(plans) if each.candidate.model == model)
    costs = sorted(_guess(study, each)[0] for each in own)
    most = study.plan.search.shortlist
    return costs[most - 1] if most is not None and len(costs) >= most else inf


def _left_out(
    study: Study, each: CandidatePlan, cost_per_hour: float, engines: float
) -> CandidatePlan:
    number = "1 engine" if engines <= 1 else f"{ceil(engines):,} engines"
    how = " by its pilot run" if each.found is not None else ""
    reason = (
        f"{cost_per_hour:,.2f} {study.plan.parsed_prices.currency} an hour ({number})"
        f"{how}, no less than what was searched"
    )
    return replace(each, status="not_searched", reason=reason, found=None)


def _idle_reason(study: Study, idle: Mapping[str, Any]) -> str:
    name = worst(idle["margins"])
    goal = next(o for o in study.plan.parsed_objectives if o.name == name)
    if (value := idle["values"][name]) is None:
        return f"nothing to measure {name} on"
    more = abs(value / goal.limit - 1)
    return (
        f"an idle engine has {name} {value:,.4g} {goal.unit}".rstrip()
        + f", {more:.0%} {'below' if goal.is_floor else 'above'} {goal.limit:,g}"
    )


def _check_any(plans: Sequence[CandidatePlan], misses: Mapping[str, float]) -> None:
    """Refuse a plan that no candidate can meet; name the one that comes closest.

    `misses` has the largest margin of each candidate that misses when idle.
    """
    if any(each.status == "ok" for each in plans):
        return
    order = ("misses_idle", "rejects", "does_not_fit")

    def distance(each: CandidatePlan) -> tuple[int, float]:
        return order.index(each.status), misses.get(each.candidate.name, inf)

    closest = min(plans, key=distance)
    which = "closest is " if len(plans) > 1 else ""
    named = f"{which}{closest.candidate.name}: {closest.reason}"
    if closest.status != "misses_idle":  # the reason has its own remedy
        raise ConfigError(f"candidates: none serves the traffic; {named}")
    raise ConfigError(
        f"objectives: no candidate meets them even when idle; {named}; loosen that "
        f"objective, or offer faster candidates"
    )


# -- highest rates ------------------------------------------------------------------

_FEW = 3
"""Seeds that are searched before the others."""


def _thresholds(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Search the first candidate, then the others from its seeds' thresholds.

    A seed whose traffic is light for one engine is light for all, to some extent.
    """
    live = _live(plans)
    first = _searched(study, live[:1], [1.0] * len(study.seeds))
    rates = first[0].highest.thresholds
    shares = [rate / live[0].highest.rate.value for rate in rates]
    return updated(plans, first + _searched(study, live[1:], shares))


def _searched(
    study: Study, live: Sequence[CandidatePlan], shares: Sequence[float]
) -> list[CandidatePlan]:
    """Search each seed, from its share of a candidate's rate so far.

    That rate is a pilot run's; a few seeds say better where to begin with the others.
    """
    guesses = [each.highest.rate.value for each in live]
    some = _few_searched(study, live, guesses, list(shares), slice(_FEW))
    guesses = [
        float(
            np.median([rate / share for rate, share in zip(own, shares, strict=False)])
        )
        for own in (_rates(study, answers) for answers in some)
    ]
    rest = _few_searched(study, live, guesses, list(shares), slice(_FEW, None))
    return [
        replace(each, found=_found(study, [*first, *others]))
        for each, first, others in zip(live, some, rest, strict=True)
    ]


def _few_searched(
    study: Study,
    live: Sequence[CandidatePlan],
    guesses: Sequence[float],
    shares: Sequence[float],
    some: slice,
) -> list[list[Answer]]:
    """Search some of the seeds, from each one's share of a candidate's guess."""
    groups = [
        [
            study.search_request(each, seed, share * guess)
            for seed, share in zip(study.seeds[some], shares[some], strict=True)
        ]
        for each, guess in zip(live, guesses, strict=True)
    ]
    return study.ask("highest rates", tasks.threshold, groups)


def _rates(study: Study, answers: Sequence[Answer]) -> list[float]:
    return [answer["rate_scale"] * study.base_rate for answer in answers]


def _found(study: Study, answers: Sequence[Answer]) -> FoundRate:
    rates = _rates(study, answers)
    at_bounds = [answer["at_bound"] for answer in answers]
    slopes = [answer["slope"] for answer in answers if answer["slope"] is not None]
    interval = median_interval(rates, study.plan.search.confidence)
    return FoundRate(
        rate=interval,
        thresholds=tuple(rates),
        spread=float(np.std(rates, ddof=1)) / interval.value,
        cost_low=interval.value,
        cost_high=interval.value,
        at_bound=max(at_bounds, key=at_bounds.count),
        slope=float(np.median(slopes)) if slopes else None,
    )


# -- at these rates -----------------------------------------------------------------


def _at_the_rate(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    live = _live(plans)
    search = study.plan.search
    loads = [(1.0, seed) for seed in study.seeds_at_rate] + [
        (load, seed)
        for load in search.curve
        if load != 1.0
        for seed in study.seeds[: search.curve_seeds]
    ]
    groups = [
        [
            study.request(
                each.candidate,
                seed,
                each.warmup_share,
                rate_scale=load * each.highest.rate.value / study.base_rate,
                part=1.0 if load == 1.0 else SMALL_PART,
                details=load == 1.0,
            )
            for load, seed in loads
        ]
        for each in live
    ]
    answers = study.ask("at these rates", tasks.observe, groups)
    bounded = _cost_bounds(study, live)
    found = []
    for each, own in zip(bounded, answers, strict=True):
        pairs = zip(own, loads, strict=True)
        points = [answer | {"load": load} for answer, (load, _) in pairs]
        found.append(_with_values(study, each, points))
    return updated(plans, found)


def _with_values(
    study: Study, each: CandidatePlan, points: list[Answer]
) -> CandidatePlan:
    at_rate = [point for point in points if point["load"] == 1.0]
    values = study.intervals(at_rate, f"{each.candidate.name} at its rate")
    facts = mean_facts([point["facts"] for point in at_rate])
    first_to_fail = worst(_median_margins(at_rate))
    preempted = values["preemptions_per_request"].value
    failing = values[first_to_fail].value if first_to_fail in values else None
    return replace(
        each,
        values=values,
        binding=binding_of(facts, preempted, first_to_fail, failing),
        tokens_per_s=float(np.median([p["tokens_per_s"] for p in at_rate])),
        extrapolated_share=max(p["extrapolated_share"] for p in at_rate),
        curve=(*each.curve, *points),
    )


def _median_margins(points: Sequence[Answer]) -> dict[str, float]:
    """Return the median margin of each objective over runs; None counts as endless."""
    margins = [point["margins"] for point in points]
    return {
        name: float(np.median([inf if m[name] is None else m[name] for m in margins]))
        for name in margins[0]
    }


def _cost_bounds(study: Study, live: Sequence[CandidatePlan]) -> list[CandidatePlan]:
    """Find the rates if all steps were as long, or as short, as they may be."""
    bounded = [each for each in live if _moves(study, each)]
    groups = [
        [
            study.search_request(
                each, study.plan.seed, each.highest.thresholds[0] / guess, **move
            )
            for guess, move in _moves(study, each)
        ]
        for each in bounded
    ]
    answers = study.ask("cost bounds", tasks.threshold, groups)
    changed = []
    for each, pair in zip(bounded, answers, strict=True):
        found = each.highest
        # The same seed with both: the cost differs, not the traffic.
        ratios = [
            answer["rate_scale"] * study.base_rate / found.thresholds[0]
            for answer in pair
        ]
        low, high = sorted(ratio * found.rate.value for ratio in ratios)
        changed.append(
            replace(each, found=replace(found, cost_low=low, cost_high=high))
        )
    return updated(live, changed)


def _moves(study: Study, each: CandidatePlan) -> list[tuple[float, dict[str, Any]]]:
    """Return how steps may move: the factor to expect, and the keys of the question."""
    if each.has_bounds:
        return [(1.0, {"bound": "hi"}), (1.0, {"bound": "lo"})]
    band, slope = study.plan.cost_band, each.highest.slope
    factors = (1 + band, 1 / (1 + band)) if band else ()
    # Latencies of a slower engine grow, too, and the margin with them.
    more = 1.0 if slope is None else 1.0 + 1.0 / slope
    return [(factor**more, {"step_time": factor}) for factor in factors]
