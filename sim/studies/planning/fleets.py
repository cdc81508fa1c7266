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
from sim.studies.planning.outcome import Fleet, updated

if TYPE_CHECKING:
    from sim.studies.planning.outcome import CandidatePlan
    from sim.studies.planning.study import Study


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


def with_fleets(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Return the plans with the fewest replicas of each that serve the traffic."""
    settings = study.plan.replicas
    counts: list[tuple[CandidatePlan, _Count]] = []
    for each in plans:
        if each.found is not None:
            needed = ceil(study.target_rate / each.found.rate.value)
            start = min(needed, settings.most)
            first = start if needed <= 2 * start else None
            counts.append((each, _Count(settings.most, first)))
    while open_ := [pair for pair in counts if pair[1].next is not None]:
        fleets = _simulated(study, [(each, count.next or 1) for each, count in open_])
        for (_, count), fleet in zip(open_, fleets, strict=True):
            enough = settings.share_of_seeds * fleet.num_seeds
            count.take(fleet, holds=fleet.holds >= enough - 1e-9)
    plans = updated(plans, [_finished(study, *pair) for pair in counts])
    return _with_spares(study, plans)


def _finished(study: Study, each: CandidatePlan, count: _Count) -> CandidatePlan:
    if count.fewest is None:
        reason = (
            f"{count.most} replicas do not serve {study.target_rate:,.4g} requests/s"
        )
        return replace(each, status="too_many", reason=reason)
    fleet = count.tried[count.fewest]
    return replace(
        each,
        fleet=fleet,
        below=count.tried.get(count.fewest - 1),
        cost_per_hour=study.cost_per_hour(each.candidate, fleet.num_replicas),
    )


def _with_spares(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Look at fleets with a few more: what latency a little more money buys."""
    spare = study.plan.replicas.spare
    pairs = [
        (each, each.fleet.num_replicas + spare)
        for each in plans
        if spare and each.fleet is not None
    ]
    if not pairs:
        return plans
    fleets = zip(pairs, _simulated(study, pairs), strict=True)
    return updated(plans, [replace(each, spare=fleet) for (each, _), fleet in fleets])


def _simulated(study: Study, pairs: list[tuple[CandidatePlan, int]]) -> list[Fleet]:
    """Simulate so many replicas of each, with every seed."""
    settings = study.plan.replicas
    groups = [
        [
            study.request(
                each.candidate,
                seed,
                each.warmup_share,
                rate_scale=each.candidate.scale,
                num_replicas=number,
                by=settings.by,
            )
            for seed in study.seeds[: settings.num_seeds]
        ]
        for each, number in pairs
    ]
    answers = study.ask("replicas", tasks.observe, groups)
    return [
        Fleet(
            num_replicas=number,
            holds=sum(a["margin"] is not None and a["margin"] <= 0 for a in own),
            num_seeds=len(own),
            values=study.intervals(own, f"{number} of {each.candidate.name}"),
            tokens_per_s=float(np.median([a["tokens_per_s"] for a in own])),
        )
        for (each, number), own in zip(pairs, answers, strict=True)
    ]
