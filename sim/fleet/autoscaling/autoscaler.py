"""An autoscaler on the clock: it reads metrics, decides, and replicas come and go."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Final

from sim.engine.clock import SCRAPE_PRIORITY, At, next_multiple
from sim.fleet.autoscaling.target_tracking import Metric
from sim.fleet.scrapes import load_of
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import simpy

    from sim.engine.loop import Engine
    from sim.fleet.autoscaling.target_tracking import TargetTracking
    from sim.fleet.replicas import Replicas

_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Timing:
    """When an autoscaler looks, and how long what it asks for takes.

    Parameters
    ----------
    start_s
        From the decision until a new replica takes requests.
    interval_s
        Between two decisions.
    scrape_interval_s
        Between two reads of the metrics.
    cooldown_s
        How long nothing must be in flight before the last replica goes.
    drain_s
        How long a replica that goes may serve what it has.
    """

    start_s: float = 120.0
    interval_s: float = 15.0
    scrape_interval_s: float = 15.0
    cooldown_s: float = 300.0
    drain_s: float = inf


@dataclass(frozen=True, slots=True)
class Scaling:
    """A change of how many replicas are wanted."""

    time_s: float
    before: int
    after: int


class Autoscaler:
    """Keeps as many replicas of a pool as its rule asks for.

    ::

        metrics, every scrape --> rule, every interval --> replicas start, or drain

    It decides by the metrics that it read last, at multiples of its interval; a replica
    of which none have been read is missing to it. A replica that dies is replaced at
    once. The last one goes when nothing has been in flight for the cool-down, if there
    may be none; with none it starts one when a request waits.

    Parameters
    ----------
    env
        The clock.
    replicas
        The fleet.
    pool
        Its name.
    places
        Of the replicas of the pool, each of its first engine: no more can hold GPUs at
        once, those that drain included.
    rule
        Says how many.
    timing
        When it reads, decides and waits.
    may_be_none
        Whether the pool may have no replica.

    Attributes
    ----------
    next_s
        When it looks next, in seconds; ``inf`` during a pause.
    scalings
        What it has decided, in order.
    """

    def __init__(  # noqa: PLR0917 - the parts of an autoscaler
        self,
        env: simpy.Environment,
        replicas: Replicas,
        pool: str,
        places: Sequence[int],
        rule: TargetTracking,
        timing: Timing,
        *,
        may_be_none: bool = False,
    ) -> None:
        self.env = env
        self.replicas = replicas
        self.pool = pool
        self.places = tuple(places)
        self.rule = rule
        self.timing = timing
        self.next_s = inf
        self.scalings: list[Scaling] = []
        self.num_wanted = len(replicas.roster.wanted(self.places))
        self._may_be_none = may_be_none
        self._is_reconciling = False
        self._readings: dict[int, tuple[Engine, Mapping[Metric, float]]] = {}
        self._in_flight_s = 0.0  # when anything was, at the latest
        self._submitted: simpy.Event | None = None
        self._seen: tuple[int, ...] = ()
        self._stirred_s = 0.0
        self._plan()
        env.process(self._run())

    def wake(self) -> None:
        """End a pause, as a request has been submitted."""
        if self._submitted is not None:
            self._submitted.succeed()
            self._submitted = None
            self._stirred_s = self.env.now
            self._plan()

    def reconcile(self) -> None:
        """Start or take out replicas until there are as many as are wanted."""
        if self._is_reconciling:  # by what one that it takes out lets go
            return
        self._is_reconciling = True
        self._reconcile()
        self._is_reconciling = False

    def _reconcile(self) -> None:
        replicas, timing = self.replicas, self.timing
        present = replicas.roster.wanted(self.places)
        excess = len(present) - self.num_wanted
        for place in present[: max(excess, 0)]:
            replicas.take_out(place, timing.drain_s)
        for place in replicas.roster.free(self.places)[: max(-excess, 0)]:
            replicas.launch(place, timing.start_s)

    # -- the clock ------------------------------------------------------------

    def _plan(self) -> None:
        timing, now_s = self.timing, self.env.now
        self.next_s = min(
            next_multiple(timing.interval_s, now_s),
            next_multiple(timing.scrape_interval_s, now_s),
        )

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, timing = self.env, self.timing
        while True:
            if self._rests():
                self.next_s, self._submitted = inf, env.event()
                yield self._submitted
            else:
                self._plan()
            yield At(env, self.next_s, SCRAPE_PRIORITY)
            if self.replicas.stop_requested:
                return
            if _is_multiple(env.now, timing.scrape_interval_s):
                self._read()
            if _is_multiple(env.now, timing.interval_s):
                self._decide()

    def _rests(self) -> bool:
        """Whether nothing has moved for so long that nothing here will.

        Not even where a request is stuck: a run must end.
        """
        replicas, timing, rule = self.replicas, self.timing, self.rule
        seen = (replicas.num_steps, replicas.num_submitted, replicas.num_in_flight)
        if seen != self._seen or replicas.next_change_s < inf:
            self._seen, self._stirred_s = seen, self.env.now
        windows_s = rule.scale_up.stabilization_s + rule.scale_down.stabilization_s
        longest_s = windows_s + timing.cooldown_s + timing.start_s
        periods_s = timing.interval_s + timing.scrape_interval_s
        return self.env.now - self._stirred_s > longest_s + 4 * periods_s

    # -- metrics and decisions -----------------------------------------------

    def _read(self) -> None:
        replicas = self.replicas
        self._readings = {
            place: (engines[0], _told(engines, self.rule.targets))
            for place in replicas.roster.wanted(self.places)
            if replicas.roster.is_ready(place)
            for engines in ([replicas.engines[i] for i in replicas.ranks_of(place)],)
        }

    def _decide(self) -> None:
        replicas, now_s = self.replicas, self.env.now
        if replicas.num_in_flight or replicas.num_held:
            self._in_flight_s = now_s
        before = self.num_wanted
        self.num_wanted = self._number()
        if self.num_wanted != before:
            self.scalings.append(Scaling(now_s, before, self.num_wanted))
        self.reconcile()

    def _number(self) -> int:
        """Return how many replicas there shall be."""
        replicas, now_s, current = self.replicas, self.env.now, self.num_wanted
        if self._may_be_none:
            idle_s = now_s - self._in_flight_s
            is_idle = idle_s > 0 and idle_s >= self.timing.cooldown_s
            if is_idle or not current:
                return int(not is_idle and bool(replicas.num_held))
        present = replicas.roster.wanted(self.places)
        told = [
            self._readings[place][1]
            for place in present
            if place in self._readings
            and self._readings[place][0] is replicas.engines[place]
        ]
        values = {
            metric: [each[metric] for each in told] for metric in self.rule.targets
        }
        return self.rule.decide(now_s, current, values, current - len(told))

    # -- what became of it ----------------------------------------------------

    def reversals_s(self) -> list[float]:
        """Return when it turned: the times of changes after one the other way."""
        return [
            two.time_s
            for one, two in pairwise(self.scalings)
            if (one.after > one.before) is not (two.after > two.before)
        ]

    def most_reversals_an_hour(self) -> int:
        """Return how often it turned in the worst hour."""
        times_s = self.reversals_s()
        return max(
            (bisect_right(times_s, t + _HOUR_S) - i for i, t in enumerate(times_s)),
            default=0,
        )

    def summary(self) -> dict[str, Any]:
        """Return how often it changed its mind, and between what."""
        scalings, now_s = self.scalings, self.env.now
        first = scalings[0].before if scalings else self.num_wanted
        numbers = [first, *(each.after for each in scalings)]
        times_s = [0.0, *(each.time_s for each in scalings), now_s]
        spans_s = [end_s - begin_s for begin_s, end_s in pairwise(times_s)]
        most = self.rule.max_replicas
        at_most_s = added(s for n, s in zip(numbers, spans_s, strict=True) if n >= most)
        return {
            "pool": self.pool,
            "num_scale_ups": sum(each.after > each.before for each in scalings),
            "num_scale_downs": sum(each.after < each.before for each in scalings),
            "num_reversals": len(self.reversals_s()),
            "most_reversals_an_hour": self.most_reversals_an_hour(),
            "least_wanted": min(numbers),
            "most_wanted": max(numbers),
            "at_max_share": at_most_s / now_s if now_s else 0.0,
        }


def _told(
    engines: Sequence[Engine], metrics: Mapping[Metric, float]
) -> dict[Metric, float]:
    """Return the metrics of the engines of a replica at this moment."""
    told = {metric: added(map(_READ[metric], engines)) for metric in metrics}
    if Metric.KV_CACHE_USAGE in told:  # a share of all blocks
        told[Metric.KV_CACHE_USAGE] /= len(engines)
    return told


_READ: Mapping[Metric, Callable[[Engine], float]] = {
    Metric.WAITING_REQUESTS: lambda engine: engine.scheduler.num_waiting,
    Metric.KV_CACHE_USAGE: lambda engine: load_of(engine).kv_cache_usage,
    Metric.REQUESTS_IN_FLIGHT: lambda engine: len(engine.recorder.active),
    Metric.TOKENS_IN_FLIGHT: lambda engine: sum(
        each.num_prompt_tokens for each in engine.recorder.active.values()
    ),
}


def _is_multiple(time_s: float, interval_s: float) -> bool:
    return round(time_s / interval_s) * interval_s == time_s
