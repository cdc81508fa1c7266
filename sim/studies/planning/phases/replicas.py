"""How many engines serve the plan's traffic: found by simulating all of them.

The rate of one engine is no answer: traffic that is split keeps its short bursts, and
sums of engines smooth them. So the split traffic is simulated for n and for n - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from sim.studies.planning.phases.outcome import Routed, num_held, updated
from sim.studies.planning.phases.sensitivity import cheapest
from sim.studies.planning.phases.study import PART
from sim.studies.planning.search import tasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.studies.planning.phases.outcome import CandidatePlan, Fleet
    from sim.studies.planning.phases.study import Answer, Study


FAR = 1.5
"""Times the most replicas: candidates that take more of them are not simulated."""


@dataclass(slots=True)
class _Count:
    """The search for the fewest replicas of one candidate that serve the traffic.

    Starts where the rates say, and walks: up while they do not hold, down while they
    do, until both sides of the step are known. The seeds whose traffic is heaviest are
    simulated first: where they miss, and as far as the walk goes down, no others are.
    """

    each: CandidatePlan
    router: Mapping[str, Any]
    seeds: list[int]
    """Places of the seeds, the heaviest first."""
    may_miss: int
    most: int
    points: dict[int, dict[int, Answer]] = field(default_factory=dict)
    """By number of replicas, then by place of the seed."""

    def num_held(self, number: int) -> int:
        return num_held(self.points.get(number, {}).values())

    def misses(self, number: int) -> bool:
        """Return whether too many seeds have missed."""
        num_missed = len(self.points.get(number, {})) - self.num_held(number)
        return number < 1 or num_missed > self.may_miss

    def holds(self, number: int) -> bool:
        """Return whether all seeds are in, and enough of them hold."""
        return len(self.points.get(number, {})) == len(self.seeds) and not self.misses(
            number
        )

    def fewest(self) -> int | None:
        """Return the fewest that hold, once one less is known to miss."""
        found = [n for n in self.points if self.holds(n) and self.misses(n - 1)]
        return min(found, default=None)

    def wanted(self, first: int) -> tuple[int, list[int]] | None:
        """Return the number to simulate next, and the seeds; None at the end."""
        if self.fewest() is not None:
            return None
        heaviest = self.seeds[: self.may_miss + 1]
        number = first
        while True:
            if self.misses(number):
                number += 1
                if number > self.most:
                    return None
                if number in self.points and not self.misses(number):
                    return number, self.left(number)
            elif number not in self.points:
                return number, heaviest
            elif self.misses(number - 1):
                return number, self.left(number)
            else:
                number -= 1

    def left(self, number: int) -> list[int]:
        """Return the seeds that were not simulated with so many replicas."""
        known = self.points.get(number, {})
        return [place for place in self.seeds if place not in known]


def with_fleets(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Return the plans with the fewest replicas of each that serve the traffic."""
    counts: list[tuple[_Count, int]] = []
    for each in plans:
        if each.found is not None:
            needed = ceil(study.target_rate / each.found.rate.value)
            counts.append((_count(study, each, study.routers[0]), needed))
    _walk(study, counts)
    spares = [spare for count, _ in counts for spare in _spares(study, count)]
    _simulate(study, spares, PART)
    return updated(plans, [_finished(study, count) for count, _ in counts])


def with_routers(study: Study, plans: list[CandidatePlan]) -> list[CandidatePlan]:
    """Return the plans, the cheapest of each model with fleets behind each router."""
    found = []
    best = cheapest(plans, study.target_rate).values()
    for each in best if len(study.routers) > 1 else ():
        if each.fleet is None or each.fleet.num_replicas == 1 or is_alone(each):
            continue
        number = each.fleet.num_replicas
        counts = [_count(study, each, router) for router in study.routers]
        _walk(study, [(count, number) for count in counts])
        left = [(count, number, count.left(number)) for count in counts]
        _simulate(study, [asked for asked in left if asked[2]])
        routed = []
        for count in counts:
            fewest = count.fewest()
            routed.append(
                Routed(
                    count.router,
                    None if fewest is None else _fleet(study, count, fewest),
                    _fleet(study, count, number),
                )
            )
        found.append(replace(each, routed=tuple(routed)))
    return updated(plans, found)


def fleet_table(number: int, router: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table ``fleet`` of so many replicas behind a router."""
    pools = [{"name": "main", "replicas": number}]
    return {"pools": pools, "router": dict(router)}


def is_alone(each: CandidatePlan) -> bool:
    """Whether fleets of a candidate's engines are not built behind a router."""
    return each.candidate.run["engine"].get("data_parallel_size") not in {1, None}


def _walk(study: Study, counts: Sequence[tuple[_Count, int]]) -> None:
    """Look for the fewest replicas of each, from a number on."""
    while True:
        asked = [
            (count, *wanted)
            for count, needed in counts
            if needed <= FAR * count.most
            and (wanted := count.wanted(min(needed, count.most))) is not None
        ]
        if not asked:
            break
        _simulate(study, asked)


def _count(study: Study, each: CandidatePlan, router: Mapping[str, Any]) -> _Count:
    settings = study.plan.replicas
    num_seeds = min(settings.num_seeds, len(study.seeds))
    seeds = sorted(range(num_seeds), key=lambda i: each.highest.thresholds[i])
    may_miss = num_seeds - ceil(settings.share_of_seeds * num_seeds - 1e-9)
    return _Count(each, router, seeds, may_miss, settings.most)


def _spares(study: Study, count: _Count) -> Iterator[tuple[_Count, int, list[int]]]:
    """Yield a fleet with a few more, for the latency that a little more money buys."""
    spare, fewest = study.plan.replicas.spare, count.fewest()
    if spare and fewest is not None:
        yield count, fewest + spare, count.left(fewest + spare)


def _finished(study: Study, count: _Count) -> CandidatePlan:
    each, number = count.each, count.fewest()
    if number is None:
        reason = (
            f"{count.most} replicas do not serve {study.target_rate:,.4g} requests/s"
        )
        return replace(each, status="too_many", reason=reason)
    spare = study.plan.replicas.spare
    return replace(
        each,
        fleet=_fleet(study, count, number),
        below=_fleet(study, count, number - 1),
        spare=_fleet(study, count, number + spare) if spare else None,
        cost_per_hour=study.cost_per_hour(each.candidate, number),
    )


def _fleet(study: Study, count: _Count, number: int) -> Fleet | None:
    """Return the fleet of so many replicas, if it was simulated."""
    points = [point for _, point in sorted(count.points.get(number, {}).items())]
    if not points:
        return None
    return study.fleet(number, points, f"{number} of {count.each.candidate.name}")


def _shared_out(study: Study, count: _Count, number: int) -> dict[str, Any]:
    """Return the keys that share traffic out: a router, or a split before engines."""
    if number == 1 or is_alone(count.each):
        return {"by": study.plan.replicas.by}
    return {"fleet": fleet_table(number, count.router)}


def _simulate(
    study: Study, asked: Sequence[tuple[_Count, int, list[int]]], part: float = 1.0
) -> None:
    """Simulate so many replicas of each, with some seeds, and keep their points."""
    groups = [
        [
            study.request(
                count.each.candidate,
                study.seeds[place],
                count.each.warmup_share,
                rate_scale=count.each.candidate.scale,
                num_replicas=number,
                part=part,
                **_shared_out(study, count, number),
            )
            for place in places
        ]
        for count, number, places in asked
    ]
    answers = study.ask("replicas", tasks.observe, groups) if asked else []
    for (count, number, places), own in zip(asked, answers, strict=True):
        count.points.setdefault(number, {}).update(zip(places, own, strict=True))
