"""Findings of a plan, as values, and how sure its numbers are."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, comb
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.studies.planning.phases.candidates import Candidate
    from sim.studies.planning.search.binding import Binding
    from workloads.draws.streams import Streams

Point = dict[str, Any]
_NUM_RESAMPLES = 2000


class Interval(NamedTuple):
    """A number and the interval around it."""

    value: float
    low: float
    high: float
    confidence: float
    """Probability, over repeated plans, that the interval holds the true value."""


@dataclass(frozen=True, slots=True)
class FoundRate:
    """The highest rate that one engine holds, in requests/s."""

    rate: Interval
    """Median over seeds of where the objectives stop to hold: at this rate they hold
    with probability one half."""
    thresholds: tuple[float, ...]
    """Of each seed, in order of seeds."""
    spread: float
    """Standard deviation of the thresholds over their median."""
    cost_low: float
    """The rate if every step took as long as the cost model's upper bound."""
    cost_high: float
    """And as short as its lower bound."""
    at_bound: str = ""
    """``low`` or ``high`` where the search ended at a bound of the plan."""
    slope: float | None = None
    """Of the margin over the logarithm of the rate, about there; None if unknown."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many engines behind a router, and how they serve the plan's traffic."""

    num_replicas: int
    holds: int
    """In how many of the seeds the objectives were met."""
    num_seeds: int
    values: dict[str, Interval]
    """By objective."""
    tokens_per_s: float
    """Generated, all replicas."""

    def serves(self, share_of_seeds: float) -> bool:
        """Return whether the objectives were met in enough of the seeds."""
        return self.holds >= share_of_seeds * self.num_seeds - 1e-9


def num_held(points: Iterable[Mapping[str, Any]]) -> int:
    """Return how many of the observations met the objectives."""
    margins = [point["margin"] for point in points]
    return sum(margin is not None and margin <= 0 for margin in margins)


@dataclass(frozen=True, slots=True)
class Routed:
    """How a candidate serves the traffic behind one router."""

    router: Mapping[str, Any]
    fewest: Fleet | None
    """The smallest number of replicas that serves it; None if too many are needed."""
    alike: Fleet | None
    """As many replicas as behind the first router."""


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """The findings of a plan on a candidate."""

    candidate: Candidate
    status: str = "ok"
    """``ok``; ``does_not_fit``; ``misses_idle`` if not even an idle engine meets the
    objectives; ``rejects`` if it cannot serve some requests at all; ``too_many`` if it
    takes more replicas than the plan allows; ``not_searched`` if its pilot run says
    that enough others cost less."""
    reason: str = ""
    """Of any status but ``ok``."""
    warmup_share: float = 0.0
    """Share of the requests that did not count."""
    found: FoundRate | None = None
    values: dict[str, Interval] = field(default_factory=dict)
    """By objective and reported number, at the highest rate."""
    binding: Binding | None = None
    tokens_per_s: float = 0.0
    """Generated at that rate."""
    extrapolated_share: float = 0.0
    """Of the time at that rate."""
    has_bounds: bool = False
    """Whether its cost model knows bounds of a step."""
    curve: tuple[Point, ...] = ()
    """Observations at shares of the rate, for the figures."""
    fleet: Fleet | None = None
    """The smallest number of replicas that serves the traffic."""
    spare: Fleet | None = None
    """A few replicas more."""
    below: Fleet | None = None
    """A replica less."""
    cost_per_hour: float | None = None
    """Of the fleet."""
    routed: tuple[Routed, ...] = ()
    """Behind each router of the plan, where several are compared."""

    @property
    def highest(self) -> FoundRate:
        """The highest rate, of a candidate that meets the objectives."""
        assert self.found is not None
        return self.found


def cost_rank(
    cost_per_hour: float, replicas: int, rate_if_slow: float, target: float
) -> tuple[float, float]:
    """Return the key by which the cheapest fleet is chosen: cost, then surety.

    Of fleets at equal cost, the one wins that costs less where every step takes as long
    as it may: one engine of it then serves `rate_if_slow` of the `target` requests/s.
    """
    needed = max(ceil(target / rate_if_slow - 1e-9), replicas)
    return cost_per_hour, cost_per_hour / replicas * needed


def updated(
    plans: Iterable[CandidatePlan], changed: Iterable[CandidatePlan]
) -> list[CandidatePlan]:
    """Return the plans with those that have changed in their places."""
    by_name = {each.candidate.name: each for each in changed}
    return [by_name.get(each.candidate.name, each) for each in plans]


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one change of a configuration."""

    lever: str
    """The setting or resource that is changed, in words."""
    change: str
    """Its new value, in words."""
    overrides: Mapping[str, Any]
    """The change as configuration keys with dots."""
    rate_gain: float | None
    """Change of the highest rate, as a share; None where it could not be run."""
    latency_gain: dict[str, float | None]
    """By objective: change of its value at the unchanged highest rate."""
    resource: str = ""
    """Which resource it relaxes or tightens, of those that can bind; else empty."""
    reason: str = ""
    """Why it could not be run."""
    noise: float = 0.0
    """Share of the rate that the search and the seeds leave open: no larger gain is
    an effect."""


def is_noise(effect: Mapping[str, Any]) -> bool:
    """Return whether an effect of ``plan.json`` cannot be told from noise.

    In plans without ``noise``, as they were before, any change counts as an effect.
    """
    return bool(abs(effect["rate_gain"]) <= effect.get("noise", 0.0))


_WIDE = 0.05


def is_unclear(effect: Mapping[str, Any]) -> bool:
    """Return whether noise would hide an effect of 5 %: seeds are too few to say."""
    return is_noise(effect) and effect.get("noise", 0.0) > _WIDE


def noise_word(effect: Mapping[str, Any]) -> str:
    """Return the words for an effect within noise; none for any other."""
    if not is_noise(effect):
        return ""
    return "unclear" if is_unclear(effect) else "no effect"


def median_interval(values: Sequence[float], confidence: float) -> Interval:
    """Return the median, between two of the values.

    The exact interval of order statistics, which assumes nothing of the distribution:
    the median of the population lies between the k-th smallest and the k-th largest of
    n values with the probability that of n fair coins at least k show either face.
    With too few values for the confidence the interval is all of them, and its own
    `confidence` says how little that is.
    """
    ranked = sorted(values)
    n = len(ranked)
    k = max(
        (k for k in range(1, n // 2 + 1) if _coverage(n, k) >= confidence), default=1
    )
    return Interval(
        float(np.median(ranked)), ranked[k - 1], ranked[n - k], _coverage(n, k)
    )


def shown_confidence(plan: Mapping[str, Any]) -> float:
    """Return the confidence that all intervals of ``plan.json`` have."""
    rates = [each["rate"] for each in plan["candidates"] if "rate" in each]
    return float(
        min([plan["search"]["confidence"], *(rate["confidence"] for rate in rates)])
    )


def _coverage(n: int, k: int) -> float:
    return 1 - 2 * sum(comb(n, i) for i in range(k)) / 2**n if n > 1 else 0.0


def bootstrap_interval(
    values: Sequence[float], confidence: float, streams: Streams, name: str
) -> Interval:
    """Return the median of runs with different seeds, and its bootstrap interval.

    Draws come from the stream ``"bootstrap"`` followed by `name`.
    """
    known = np.asarray(values, dtype=np.float64)
    rng = streams.generator(f"bootstrap {name}")
    drawn = rng.integers(0, len(known), (_NUM_RESAMPLES, len(known)))
    medians = np.median(known[drawn], axis=1)
    tails = (1 - confidence) / 2
    low, high = np.quantile(medians, [tails, 1 - tails])
    return Interval(float(np.median(known)), float(low), float(high), confidence)
