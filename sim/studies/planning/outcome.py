"""What a plan found, as values: one `CandidatePlan` a candidate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.studies.planning.binding import Binding
    from sim.studies.planning.candidates import Candidate
    from sim.studies.planning.intervals import Interval

Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FoundRate:
    """The highest rate that one engine holds, in requests/s.

    Parameters
    ----------
    rate
        Median over seeds of where the objectives stop to hold, with its interval: at
        this rate they hold with probability one half.
    thresholds
        Of each seed, in order of seeds.
    spread
        Standard deviation of the thresholds over their median.
    cost_low, cost_high
        The rate if every step took as long, or as short, as the cost model's bounds.
    at_bound
        ``"low"`` or ``"high"`` where the search ended at a bound of the plan.
    """

    rate: Interval
    thresholds: tuple[float, ...]
    spread: float
    cost_low: float
    cost_high: float
    at_bound: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many engines behind a router, and how they serve the plan's traffic.

    Parameters
    ----------
    num_replicas
        Engines.
    holds
        In how many of the seeds the objectives were met.
    num_seeds
        Of so many.
    values
        By objective, with intervals.
    tokens_per_s
        Generated, all replicas.
    """

    num_replicas: int
    holds: int
    num_seeds: int
    values: dict[str, Interval]
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """All that a plan says of a candidate.

    Parameters
    ----------
    candidate
        What it is.
    status
        ``ok``; ``does_not_fit``; ``misses_idle`` if not even an idle engine meets the
        objectives; ``rejects`` if it cannot serve some requests at all; ``too_many`` if
        it takes more replicas than the plan allows.
    reason
        Of any status but ``ok``.
    warmup_share
        Share of the requests that did not count.
    found
        The highest rate.
    values
        By objective and reported number, at that rate, with intervals.
    binding
        What keeps it from more.
    tokens_per_s
        Generated at that rate.
    extrapolated_share
        Of the time at that rate.
    has_bounds
        Whether its cost model knows bounds of a step.
    curve
        Observations at shares of the rate, for the figures.
    fleet, spare
        The smallest number of replicas that serves the traffic, and a few more.
    below
        What a replica less did.
    cost_per_hour
        Of the fleet.
    """

    candidate: Candidate
    status: str = "ok"
    reason: str = ""
    warmup_share: float = 0.0
    found: FoundRate | None = None
    values: dict[str, Interval] = field(default_factory=dict)
    binding: Binding | None = None
    tokens_per_s: float = 0.0
    extrapolated_share: float = 0.0
    has_bounds: bool = False
    curve: tuple[Point, ...] = ()
    fleet: Fleet | None = None
    spare: Fleet | None = None
    below: Fleet | None = None
    cost_per_hour: float | None = None

    @property
    def is_served(self) -> bool:
        """Whether it can serve the plan's traffic."""
        return self.fleet is not None


@dataclass(frozen=True, slots=True)
class Effect:
    """What one change of a configuration does.

    Parameters
    ----------
    lever
        What is changed, in words.
    change
        To what.
    overrides
        The change as configuration keys with dots.
    rate_gain
        Change of the highest rate, as a share; None where it could not be run.
    latency_gain
        By objective: change of its value at the unchanged highest rate.
    resource
        Which resource it relaxes or tightens, of those that can bind; else empty.
    reason
        Why it could not be run.
    """

    lever: str
    change: str
    overrides: Mapping[str, Any]
    rate_gain: float | None
    latency_gain: dict[str, float | None]
    resource: str = ""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return asdict(self)
