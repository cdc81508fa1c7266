"""How many replicas keep a metric at its target: the rule of Kubernetes' HPA.

Source: Kubernetes, ``pkg/controller/podautoscaler/replica_calculator.go``
(`calcPlainMetricReplicas`) and ``horizontal.go``
(`normalizeDesiredReplicasWithBehaviors`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf
from typing import TYPE_CHECKING

from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Metric(Enum):
    """The metric kept at a target: its mean over the replicas of a pool."""

    WAITING_REQUESTS = "waiting_requests"
    """Requests in the queue of an engine, vLLM's ``num_requests_waiting``."""
    KV_CACHE_USAGE = "kv_cache_usage"
    """Share of an engine's blocks in use, vLLM's ``kv_cache_usage_perc``, 0 to 1."""
    REQUESTS_IN_FLIGHT = "requests_in_flight"
    """Requests that an engine has, waiting and running."""
    TOKENS_IN_FLIGHT = "tokens_in_flight"
    """Tokens of their prompts."""


class PolicyKind(Enum):
    """The unit in which a policy counts replicas."""

    PODS = "pods"
    """Replicas."""
    PERCENT = "percent"
    """Percent of those at the beginning of the period."""


class Select(Enum):
    """Which of several policies holds."""

    MAX = "max"
    """The one that allows the largest change."""
    MIN = "min"
    """The one that allows the smallest change."""
    DISABLED = "disabled"
    """None: this direction is not taken."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How much may change within a period."""

    kind: PolicyKind
    value: float
    period_s: float


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How fast one direction is taken.

    Parameters
    ----------
    policies
        Limits of the change.
    stabilization_s
        Seconds over which the most cautious of all recommendations holds.
    select
        Which policy holds.
    """

    policies: tuple[Policy, ...]
    stabilization_s: float = 0.0
    select: Select = Select.MAX


SCALE_UP = Behaviour(
    (Policy(PolicyKind.PERCENT, 100, 15.0), Policy(PolicyKind.PODS, 4, 15.0))
)
SCALE_DOWN = Behaviour((Policy(PolicyKind.PERCENT, 100, 15.0),), stabilization_s=300.0)


def recommended(
    values: Sequence[float],
    num_missing: int,
    current: int,
    target: float,
    tolerance: float,
) -> int | None:
    """Return how many replicas bring the mean of a metric to its target.

    Parameters
    ----------
    values
        The metric of each replica that has told it.
    num_missing
        Replicas that have not, as they start. They count as at the target where fewer
        would do, and as at 0 where more are needed.
    current
        Replicas that are wanted now.
    target
        Of the mean, above 0.
    tolerance
        Deviation of the ratio from 1 within which nothing changes.

    Returns
    -------
    int or None
        None if no replica has told anything.
    """
    if not values:
        return None
    total, number = added(values), len(values)
    ratio = total / number / target
    if not num_missing:
        return current if abs(ratio - 1.0) <= tolerance else ceil(ratio * number)
    number += num_missing
    filled = total + (num_missing * target if ratio < 1.0 else 0.0)
    new_ratio = filled / number / target
    if (
        abs(new_ratio - 1.0) <= tolerance
        or (ratio < 1.0 < new_ratio)
        or (new_ratio < 1.0 < ratio)
    ):
        return current
    found = ceil(new_ratio * number)
    turns = found > current if new_ratio < 1.0 else found < current
    return current if turns else found


@dataclass(slots=True)
class TargetTracking:
    """Keeps metrics at their targets.

    Each metric recommends a number; the largest holds. It is then held back by the
    recommendations of the stabilisation windows, by the policies, and by the bounds.

    Parameters
    ----------
    targets
        Of the mean over replicas.
    min_replicas, max_replicas
        Bounds, the first at least 1.
    tolerance
        See `recommended`.
    scale_up, scale_down
        How fast.
    """

    targets: Mapping[Metric, float]
    min_replicas: int
    max_replicas: int
    tolerance: float = 0.1
    scale_up: Behaviour = SCALE_UP
    scale_down: Behaviour = SCALE_DOWN
    _recommendations: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def decide(
        self,
        now_s: float,
        current: int,
        values: Mapping[Metric, Sequence[float]],
        num_missing: int,
    ) -> int:
        """Return how many replicas there shall be from now on.

        Parameters
        ----------
        now_s
            Not before the latest call.
        current
            How many are wanted now.
        values, num_missing
            See `recommended`.
        """
        least, most = self.min_replicas, self.max_replicas
        if not least <= current <= most:
            return self._changed(now_s, current, min(max(current, least), most))
        found = [
            recommended(values[metric], num_missing, current, target, self.tolerance)
            for metric, target in self.targets.items()
        ]
        told = [each for each in found if each is not None]
        if not told:
            return current
        if not self._recommendations:
            self._recommendations.append((now_s, current))
        number = self._stabilized(now_s, current, max(told))
        return self._changed(now_s, current, self._limited(now_s, current, number))

    def _stabilized(self, now_s: float, current: int, wanted: int) -> int:
        """Hold a number back by the recommendations of both windows."""
        up_s, down_s = self.scale_up.stabilization_s, self.scale_down.stabilization_s
        earlier = self._recommendations
        low = min([wanted, *(n for s, n in earlier if s > now_s - up_s)])
        high = max([wanted, *(n for s, n in earlier if s > now_s - down_s)])
        span_s = max(up_s, down_s)
        self._recommendations = [(s, n) for s, n in earlier if s > now_s - span_s]
        self._recommendations.append((now_s, wanted))
        return min(max(current, low), high)

    def _limited(self, now_s: float, current: int, wanted: int) -> int:
        """Bound a change by what its policies allow."""
        if wanted > current:
            limit = max(self._limit(now_s, current, self.scale_up, 1), current)
            return min(wanted, limit, self.max_replicas)
        if wanted < current:
            limit = min(self._limit(now_s, current, self.scale_down, -1), current)
            return max(wanted, limit, self.min_replicas)
        return wanted

    def _limit(self, now_s: float, current: int, way: Behaviour, sign: int) -> int:
        if way.select is Select.DISABLED:
            return current
        allowed = []
        for policy in way.policies:
            begun_s = now_s - policy.period_s
            before = current - sum(n for s, n in self._changes if s > begun_s)
            by = policy.value
            if policy.kind is PolicyKind.PERCENT:
                number = before * (1.0 + sign * by / 100.0)
                allowed.append(ceil(number) if sign > 0 else int(number))
            else:
                allowed.append(int(before + sign * by))
        is_widest = (way.select is Select.MAX) is (sign > 0)
        return max(allowed) if is_widest else min(allowed)

    def _changed(self, now_s: float, current: int, number: int) -> int:
        policies = (*self.scale_up.policies, *self.scale_down.policies)
        span_s = max((each.period_s for each in policies), default=-inf)
        self._changes = [(s, n) for s, n in self._changes if s > now_s - span_s]
        if number != current:
            self._changes.append((now_s, number - current))
        return number
