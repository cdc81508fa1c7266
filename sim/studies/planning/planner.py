"""A capacity plan, phase by phase; each phase is a batch of independent requests.

::

    candidates --> pilot       idle, the threshold roughly, the warm-up
                   thresholds  one search a seed: the highest rate, and its interval
                   at the rate objectives, binding resource, the curve, cost bounds
                   fleets      the fewest replicas that serve the split traffic
                   sensitivity of the cheapest, lever by lever

What a phase asks depends on the answers of the one before and on nothing else, so that
a plan is the same on any number of workers.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.workload import make_workload
from sim.studies.planning import tasks
from sim.studies.planning.binding import binding_of, mean_facts, worst
from sim.studies.planning.candidates import candidates_of
from sim.studies.planning.fleets import with_fleets
from sim.studies.planning.intervals import bootstrap_interval, median_interval
from sim.studies.planning.outcome import CandidatePlan, FoundRate
from sim.studies.planning.sensitivity import sensitivities
from sim.studies.planning.trial import with_scale
from workloads.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.studies.planning.candidates import Candidate
    from sim.studies.planning.crew import Answer, Crew
    from sim.studies.planning.intervals import Interval
    from sim.studies.planning.outcome import Effect
    from sim.studies.planning.spec import PlanConfig

STEP = 1.04
"""First factor of the searches of single seeds: thresholds differ by a few per cent."""


class Planner:
    """Answers the questions of a plan.

    Parameters
    ----------
    plan
        What is asked.
    crew
        Who simulates.

    Attributes
    ----------
    base_rate, target_rate
        Requests/s of the traffic at a ``rate_scale`` of 1, and at the plan's.
    plans, effects
        What is known so far, also if `run` was stopped.
    """

    def __init__(self, plan: PlanConfig, crew: Crew) -> None:
        self.plan = plan
        self.crew = crew
        self.streams = Streams(plan.seed)
        self.candidates = candidates_of(plan)
        fitting = next(each for each in self.candidates if not each.reason)
        self.base_rate = base_rate(fitting)
        self.target_rate = self.base_rate * fitting.scale
        self.seeds = [plan.seed + i for i in range(plan.search.num_seeds)]
        self.plans: list[CandidatePlan] = []
        self.effects: dict[str, list[Effect]] = {}

    def run(self) -> None:
        """Find what is to be said of each candidate, and of changes to the cheapest.

        Raises
        ------
        ConfigError
            If no candidate meets the objectives even when idle.
        StoppedError
            If the crew was stopped.
        """
        self.plans = self._pilot()
        self.plans = self._thresholds(self.plans)
        self.plans = self._at_the_rate(self.plans)
        self.plans = with_fleets(self, self.plans)
        self.effects = sensitivities(self, self.plans)

    # -- what requests have in common -------------------------------------------

    def request(
        self, candidate: Candidate, seed: int, warmup_share: float, **more: Any
    ) -> Answer:
        """Return a request about a candidate with another seed."""
        run = {**candidate.run, "seed": seed}
        return tasks.request_of(
            run, self.plan.objectives, warmup_share=warmup_share, **more
        )

    def search_request(
        self, each: CandidatePlan, seed: int, guess_rate: float, **more: Any
    ) -> Answer:
        """Return a request for the threshold of one seed, to begin near a rate."""
        return self.request(
            each.candidate,
            seed,
            each.warmup_share,
            guess=guess_rate / self.base_rate,
            step=STEP,
            tolerance=self.plan.search.tolerance,
            bounds=self._bounds(),
            **more,
        )

    def _bounds(self) -> list[float] | None:
        rates = self.plan.search.rates
        return None if rates is None else [rate / self.base_rate for rate in rates]

    # -- phases -------------------------------------------------------------------

    def _pilot(self) -> list[CandidatePlan]:
        plans = [CandidatePlan(candidate) for candidate in self.candidates]
        fitting = [i for i, each in enumerate(self.candidates) if not each.reason]
        requests = [
            self.request(
                self.candidates[i],
                self.plan.seed,
                0.0,
                tolerance=4 * self.plan.search.tolerance,
                bounds=self._bounds(),
                seeds=self.seeds,
            )
            | {"warmup_share": self.plan.search.warmup_share}
            for i in fitting
        ]
        answers = self.crew.try_to("pilot runs", tasks.pilot, requests)
        misses: dict[str, float] = {}
        for i, answer in zip(fitting, answers, strict=True):
            plans[i] = self._after_pilot(plans[i], answer)
            if plans[i].status == "misses_idle":
                misses[plans[i].candidate.name] = _idle_miss(answer)
        for i, each in enumerate(plans):
            if each.candidate.reason:
                reason = each.candidate.reason
                plans[i] = replace(each, status="does_not_fit", reason=reason)
        _check_any(plans, misses)
        return plans

    def _after_pilot(self, each: CandidatePlan, answer: Answer | str) -> CandidatePlan:
        if isinstance(answer, str):
            return replace(each, status="does_not_fit", reason=answer)
        idle = answer["idle"]
        if idle["num_rejected"]:
            share = idle["num_rejected"] / idle["num_requests"]
            reason = (
                f"{share:.2%} of the requests are longer than its "
                f"{each.candidate.capacity.max_model_len:,} tokens"  # type: ignore[union-attr]
            )
            return replace(each, status="rejects", reason=reason)
        if answer["rate_scale"] is None:
            reason = self._idle_reason(idle)
            return replace(each, status="misses_idle", reason=reason)
        found = FoundRate(
            rate=median_interval([answer["rate_scale"] * self.base_rate], 0.5),
            thresholds=(),
            spread=0.0,
            cost_low=0.0,
            cost_high=inf,
            at_bound=answer["at_bound"],
        )
        points = (answer["idle"] | {"rate_scale": 0.0},)
        return replace(
            each,
            found=found,
            warmup_share=answer["warmup_share"],
            curve=points,
            has_bounds=idle["has_bounds"],
        )

    def _idle_reason(self, idle: Mapping[str, Any]) -> str:
        name = worst(idle["margins"])
        objective = next(o for o in self.plan.parsed_objectives if o.name == name)
        value = idle["values"][name]
        if value is None:
            return f"nothing to measure {name} on"
        more = abs(value / objective.limit - 1)
        side = "below" if objective.is_floor else "above"
        return (
            f"an idle engine has {name} {value:,.4g} {objective.unit}".rstrip()
            + f", {more:.0%} {side} {objective.limit:,g}"
        )

    def _thresholds(self, plans: list[CandidatePlan]) -> list[CandidatePlan]:
        live = [i for i, each in enumerate(plans) if each.found is not None]
        requests = [
            self.search_request(plans[i], seed, plans[i].found.rate.value)  # type: ignore[union-attr]
            for i in live
            for seed in self.seeds
        ]
        answers = self.crew.ask("highest rates", tasks.threshold, requests)
        num = len(self.seeds)
        plans = list(plans)
        for place, i in enumerate(live):
            own = answers[place * num : (place + 1) * num]
            plans[i] = replace(plans[i], found=self._found(own))
        return plans

    def _found(self, answers: Sequence[Answer]) -> FoundRate:
        rates = [answer["rate_scale"] * self.base_rate for answer in answers]
        at_bounds = [answer["at_bound"] for answer in answers]
        interval = median_interval(rates, self.plan.search.confidence)
        return FoundRate(
            rate=interval,
            thresholds=tuple(rates),
            spread=float(np.std(rates, ddof=1)) / interval.value,
            cost_low=interval.value,
            cost_high=interval.value,
            at_bound=max(at_bounds, key=at_bounds.count),
        )

    def _at_the_rate(self, plans: list[CandidatePlan]) -> list[CandidatePlan]:
        live = [i for i, each in enumerate(plans) if each.found is not None]
        requests, owners = [], []
        for i in live:
            for load, seeds in self._loads():
                for seed in seeds:
                    requests.append(self._observation_request(plans[i], load, seed))
                    owners.append((i, load))
        answers = self.crew.ask("at these rates", tasks.observe, requests)
        plans = self._cost_bounds(list(plans), live)
        for i in live:
            own = [
                answer | {"load": load}
                for (owner, load), answer in zip(owners, answers, strict=True)
                if owner == i
            ]
            plans[i] = self._with_values(plans[i], own)
        return plans

    def _loads(self) -> list[tuple[float, list[int]]]:
        search = self.plan.search
        curve = [(load, self.seeds[: search.curve_seeds]) for load in search.curve]
        return [(1.0, self.seeds), *[pair for pair in curve if pair[0] != 1.0]]

    def _observation_request(
        self, each: CandidatePlan, load: float, seed: int
    ) -> Answer:
        assert each.found is not None
        return self.request(
            each.candidate,
            seed,
            each.warmup_share,
            rate_scale=load * each.found.rate.value / self.base_rate,
            details=load == 1.0,
        )

    def _with_values(self, each: CandidatePlan, points: list[Answer]) -> CandidatePlan:
        at_rate = [point for point in points if point["load"] == 1.0]
        values = self.intervals(at_rate, f"{each.candidate.name} at its rate")
        facts = mean_facts([point["facts"] for point in at_rate])
        first_to_fail = worst(median_margins(at_rate))
        preempted = values["preemptions_per_request"].value
        return replace(
            each,
            values=values,
            binding=binding_of(facts, preempted, first_to_fail),
            tokens_per_s=float(np.median([p["tokens_per_s"] for p in at_rate])),
            extrapolated_share=max(p["extrapolated_share"] for p in at_rate),
            curve=(*each.curve, *points),
        )

    def intervals(self, points: Sequence[Answer], what: str) -> dict[str, Interval]:
        """Return medians over runs with bootstrap intervals, of what was measured."""
        names = points[0]["values"]
        confidence = self.plan.search.confidence
        found = {}
        for name in names:
            known = [p["values"][name] for p in points]
            known = [value for value in known if value is not None]
            if known:
                found[name] = bootstrap_interval(
                    known, confidence, self.streams, f"{what}: {name}"
                )
        return found

    def _moves(self, each: CandidatePlan) -> list[tuple[float, dict[str, Any]]]:
        """Return how steps may move: the factor to expect, and what to ask for."""
        if each.has_bounds:
            return [(1.0, {"bound": "hi"}), (1.0, {"bound": "lo"})]
        band = self.plan.cost_band
        if not band:
            return []
        return [(factor, {"step_time": factor}) for factor in _factors(band)]

    def _cost_bounds(
        self, plans: list[CandidatePlan], live: Sequence[int]
    ) -> list[CandidatePlan]:
        """Find the rates if all steps were as long, or as short, as they may be."""
        bounded = [i for i in live if self._moves(plans[i])]
        requests = [
            self.search_request(
                plans[i],
                self.plan.seed,
                plans[i].found.thresholds[0] / guess,  # type: ignore[union-attr]
                **move,
            )
            for i in bounded
            for guess, move in self._moves(plans[i])
        ]
        answers = self.crew.ask("cost bounds", tasks.threshold, requests)
        for place, i in enumerate(bounded):
            found = plans[i].found
            assert found is not None
            pair = answers[2 * place : 2 * place + 2]
            # The same seed with both: what differs is the cost, not the traffic.
            ratios = [
                answer["rate_scale"] * self.base_rate / found.thresholds[0]
                for answer in pair
            ]
            low, high = sorted(ratio * found.rate.value for ratio in ratios)
            plans[i] = replace(
                plans[i], found=replace(found, cost_low=low, cost_high=high)
            )
        return plans


def _factors(band: float) -> tuple[float, float]:
    return 1 + band, 1 / (1 + band)


def _idle_miss(answer: Answer | str) -> float:
    """Return by what share of its limit an idle engine misses the worst objective."""
    margins = {} if isinstance(answer, str) else answer["idle"]["margins"]
    return max((inf if m is None else m for m in margins.values()), default=inf)


def _check_any(plans: Sequence[CandidatePlan], misses: Mapping[str, float]) -> None:
    """Refuse a plan that no candidate can meet; name the one that comes closest.

    Raises
    ------
    ConfigError
        With what it misses, and by how much.
    """
    if any(each.status == "ok" for each in plans):
        return
    order = ("misses_idle", "rejects", "does_not_fit")

    def distance(each: CandidatePlan) -> tuple[int, float]:
        return order.index(each.status), misses.get(each.candidate.name, inf)

    closest = min(plans, key=distance)
    which = "closest is " if len(plans) > 1 else ""
    raise ConfigError(
        f"objectives: no candidate meets them even when idle; "
        f"{which}{closest.candidate.name}: {closest.reason}; loosen that objective, or "
        f"offer faster candidates"
    )


def median_margins(points: Sequence[Answer]) -> dict[str, float]:
    """Return the median margin of each objective over runs; None counts as endless."""
    margins = [point["margins"] for point in points]
    return {
        name: float(np.median([inf if m[name] is None else m[name] for m in margins]))
        for name in margins[0]
    }


def base_rate(candidate: Candidate) -> float:
    """Return requests/s of a candidate's traffic at a ``rate_scale`` of 1.

    Of a trace, that of the trace itself, not of a resampled one; of arrivals that have
    a ``rate``, that; else that of what is drawn with the plan's seed.
    """
    config = parse_config(with_scale(candidate.run, 1.0))
    synthetic = config.workload.synthetic
    if synthetic is not None and "rate" in synthetic.arrivals:
        return float(synthetic.arrivals["rate"])
    workload = config.workload.model_copy(update={"resample": None})
    return tasks.natural_rate(make_workload(workload, config.seed).requests())
