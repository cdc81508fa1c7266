"""How many engines serve the plan's traffic: found by simulating all of them.

The rate of one engine is no answer: traffic that is split keeps its short bursts, and
sums of engines smooth them. So the split traffic is simulated for n and for n - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from sim.studies.planning import tasks
from sim.studies.planning.outcome import Fleet

if TYPE_CHECKING:
    from sim.studies.planning.crew import Answer
    from sim.studies.planning.outcome import CandidatePlan
    from sim.studies.planning.planner import Planner


@dataclass(slots=True)
class _Count:
    """The search for the fewest replicas of one candidate that do.

    Starts where the rates say, and walks: up while they do not hold, down while they
    do, until both sides of the step are known.
    """

    most: int
    next: int | None
    tried: dict[int, Fleet] = field(default_factory=dict)
    fewest: int | None = None

    def take(self, fleet: Fleet, *, holds: bool) -> None:
        number = fleet.num_replicas
        self.tried[number] = fleet
        if holds:
            self.fewest = number
            known_below = number == 1 or number - 1 in self.tried
            self.next = None if known_below else number - 1
        elif self.fewest == number + 1:
            self.next = None
        else:
            self.next = number + 1 if number < self.most else None


def with_fleets(planner: Planner, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Return the plans with the fewest replicas of each that serve the traffic."""
    settings = planner.plan.replicas
    counts: dict[int, _Count] = {}
    for i, each in enumerate(plans):
        if each.found is not None:
            needed = ceil(planner.target_rate / each.found.rate.value)
            start = min(needed, settings.most)
            counts[i] = _Count(settings.most, start if needed <= 2 * start else None)
    while open_ := [i for i, count in counts.items() if count.next is not None]:
        fleets = _observed(planner, [(plans[i], counts[i].next or 1) for i in open_])
        for i, fleet in zip(open_, fleets, strict=True):
            enough = settings.share_of_seeds * fleet.num_seeds
            counts[i].take(fleet, holds=fleet.holds >= enough - 1e-9)
    plans = [
        _finished(planner, each, counts[i]) if i in counts else each
        for i, each in enumerate(plans)
    ]
    return _with_spares(planner, plans)


def _finished(planner: Planner, each: CandidatePlan, count: _Count) -> CandidatePlan:
    if count.fewest is None:
        reason = (
            f"{count.most} replicas do not serve {planner.target_rate:,.4g} requests/s"
        )
        return replace(each, status="too_many", reason=reason)
    fleet = count.tried[count.fewest]
    return replace(
        each,
        fleet=fleet,
        below=count.tried.get(count.fewest - 1),
        cost_per_hour=cost_of(planner, each, fleet.num_replicas),
    )


def cost_of(planner: Planner, each: CandidatePlan, num_replicas: int) -> float:
    """Return what so many replicas of a candidate cost in an hour."""
    candidate = each.candidate
    num_gpus = num_replicas * candidate.num_gpus
    return planner.plan.parsed_prices.per_hour(candidate.gpu, num_gpus)


def _with_spares(planner: Planner, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Look at fleets with a few more: what latency a little more money buys."""
    spare = planner.plan.replicas.spare
    chosen = [i for i, each in enumerate(plans) if each.fleet is not None]
    if not spare or not chosen:
        return plans
    sizes = [plans[i].fleet.num_replicas + spare for i in chosen]  # type: ignore[union-attr]
    pairs = [(plans[i], size) for i, size in zip(chosen, sizes, strict=True)]
    plans = list(plans)
    for i, fleet in zip(chosen, _observed(planner, pairs), strict=True):
        plans[i] = replace(plans[i], spare=fleet)
    return plans


def _observed(planner: Planner, pairs: list[tuple[CandidatePlan, int]]) -> list[Fleet]:
    """Simulate so many replicas of each, with every seed."""
    seeds = planner.seeds[: planner.plan.replicas.num_seeds]
    requests = [
        planner.request(
            each.candidate,
            seed,
            each.warmup_share,
            rate_scale=each.candidate.scale,
            num_replicas=number,
            by=planner.plan.replicas.by,
        )
        for each, number in pairs
        for seed in seeds
    ]
    answers = planner.crew.ask("replicas", tasks.observe, requests)
    num = len(seeds)
    return [
        _fleet(planner, each, number, answers[place * num : (place + 1) * num])
        for place, (each, number) in enumerate(pairs)
    ]


def _fleet(
    planner: Planner, each: CandidatePlan, number: int, answers: list[Answer]
) -> Fleet:
    holds = sum(a["margin"] is not None and a["margin"] <= 0 for a in answers)
    return Fleet(
        num_replicas=number,
        holds=holds,
        num_seeds=len(answers),
        values=planner.intervals(answers, f"{number} of {each.candidate.name}"),
        tokens_per_s=float(np.median([a["tokens_per_s"] for a in answers])),
    )
