"""The engines of a fleet on one clock, the router before them, and what it is told."""

from __future__ import annotations

from collections import deque
from inspect import signature
from math import inf
from typing import TYPE_CHECKING, Any

from sim.config.plug import build
from sim.engine.balancer import Load, LoadBalancer
from sim.engine.engines import Engines
from sim.engine.group_sampling import sampler_for
from sim.engine.loop import Engine
from sim.engine.requests import requests_of
from sim.engine.routers import BLIND, BY_PREFIX, ROUTERS
from sim.engine.scrapes import Scrapes
from sim.results.fleets import engine_numbers, imbalance
from sim.results.ranks import merged
from sim.scheduler.groups.scheduler import GroupScheduler
from sim.simulation.ranks import merged_counters
from sim.simulation.schedulers import make_scheduler
from workloads.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    import simpy

    from sim.engine.requests import RequestFactory
    from sim.results.ranks import RankRecorders
    from sim.results.recorder import Recording
    from sim.scheduler.base import Scheduler
    from sim.scheduler.request import Request
    from sim.simulation.pools import Pool
    from workloads.spec import RequestSpec


_LOOKS = frozenset({"env", "loads"})
"""Arguments of routers that may look at engines when they like."""


def make_schedulers(
    pool: Pool, specs: Sequence[RequestSpec], *, on_clock: bool
) -> list[Scheduler]:
    """Construct the schedulers of a pool; its capacity becomes what they serve."""
    schedulers = []
    estimated = pool.capacity
    for _ in range(pool.num_engines):
        scheduler, pool.capacity = make_scheduler(
            pool.engine, estimated, pool.model, specs=specs, on_clock=on_clock
        )
        schedulers.append(scheduler)
    return schedulers


def why_own(scheduler: Scheduler) -> str:
    """Return why a scheduler takes its steps one by one; empty if it does not."""
    if isinstance(scheduler, GroupScheduler):
        return scheduler.why_stepwise()
    return getattr(scheduler, "stepwise_reason", "")


class Fleet:
    """The engines of a fleet, made for one run.

    Parameters
    ----------
    env
        The clock.
    pools
        With their schedulers.
    recorders
        One for each engine.
    table
        Of the router, see `sim.config.fleet`.
    specs
        The workload, of whose requests routers may know the sessions.
    seed
        Of the run; the router draws from a stream of its own.
    stepwise
        See `Engine`.

    Raises
    ------
    ConfigError
        If the router cannot be made.
    """

    def __init__(
        self,
        env: simpy.Environment,
        pools: Sequence[Pool],
        recorders: RankRecorders,
        table: dict[str, Any],
        *,
        specs: Sequence[RequestSpec],
        seed: int,
        stepwise: bool,
    ) -> None:
        self.env = env
        self.pools = pools
        self._recorders = recorders
        self._specs = specs
        self._stepwise = stepwise
        self._schedulers = [each for pool in pools for each in pool.schedulers]
        self.router: Any = build(ROUTERS, table, "fleet.router", self._context(seed))

    def _context(self, seed: int) -> dict[str, Any]:
        specs = self._specs

        def session_of(request: Request) -> Hashable | None:
            return specs[request.parent_id].session_id

        return {
            "env": self.env,
            "loads": self.loads,
            "num_engines": len(self._schedulers),
            "stream": Streams(seed).generator("router"),
            "num_gpu_blocks": [
                pool.capacity.num_gpu_blocks
                for pool in self.pools
                for _ in pool.schedulers
            ],
            "block_size": max(pool.capacity.block_size for pool in self.pools),
            "session_of": session_of,
        }

    @property
    def is_blind(self) -> bool:
        """Whether choices depend on nothing that engines do."""
        return type(self.router) in BLIND

    def loads(self) -> list[Load]:
        """Read what every engine would tell of itself now."""
        return [
            Load(each.num_waiting, each.num_running, each.cache_usage().kv_cache_usage)
            for each in self._schedulers
        ]

    def dealt(self, factory: RequestFactory) -> Engines:
        """Return engines that draw their own shares of the requests.

        Nothing but its share ever comes to an engine: it need not look at the others.
        """
        deal = _Deal(requests_of(factory, self._specs), self.router.choose)
        shares = [deal.share(place) for place in range(len(self._schedulers))]
        deal.queues.extend(deque() for _ in shares)
        return self._engines(shares, lambda: inf)

    def routed(self, *, is_announced: bool) -> Engines:
        """Return engines to which requests are handed as they come.

        Parameters
        ----------
        is_announced
            Whether requests come by `Engines.announced`, whatever becomes of those
            before. Stretches that cannot be interrupted last until the next then.
        """
        engines = self._engines([None] * len(self._schedulers), None)
        router = self.router
        watch: LoadBalancer | Scrapes | None = None
        if isinstance(router, LoadBalancer):
            watch = router
        elif getattr(router, "interval_s", None):
            watch = engines.scrapes = Scrapes(
                self.env, router, self.loads, lambda: not engines.num_in_flight
            )
        if watch is None and not _LOOKS.isdisjoint(signature(type(router)).parameters):
            return engines  # it may look at any time
        for engine in engines.engines:
            engine.is_interruptible = engine.batches is None
            if engine.is_interruptible or is_announced:
                engine.horizon = _horizon(
                    engines, watch, heeds_arrivals=not engine.is_interruptible
                )
        return engines

    def _engines(
        self,
        shares: Sequence[Iterable[Request] | None],
        horizon: Callable[[], float] | None,
    ) -> Engines:
        owners = [pool for pool in self.pools for _ in pool.schedulers]
        engines = [
            Engine(
                self.env,
                scheduler,
                pool.cost_model,
                recorder,
                arrivals=share,
                sample=sampler_for(scheduler),
                admission_check=pool.engine.admission_check,
                horizon=horizon,
                stepwise=self._stepwise,
            )
            for scheduler, pool, recorder, share in zip(
                self._schedulers, owners, self._recorders.of_rank, shares, strict=True
            )
        ]
        return Engines(self.env, engines, self.router)

    def warnings(self) -> Iterator[str]:
        """Yield what the router does in vain."""
        if type(self.router) not in BY_PREFIX:
            return
        for pool in self.pools:
            if not pool.engine.prefix_caching:
                yield (
                    f"fleet.router sends prompts to where their prefix is, and pool "
                    f"{pool.name} runs without enable_prefix_caching"
                )


class _Deal:
    """Deals requests out in their order; each is drawn when an engine wants one."""

    def __init__(
        self, requests: Iterable[Request], choose: Callable[[Request], int]
    ) -> None:
        self._requests = iter(requests)
        self._choose = choose
        self.queues: list[deque[Request]] = []

    def share(self, place: int) -> Iterator[Request]:
        """Yield the requests of one engine."""
        while True:
            if own := self.queues[place]:
                yield own.popleft()
                continue
            request = next(self._requests, None)
            if request is None:
                return
            self.queues[self._choose(request)].append(request)


def _horizon(
    engines: Engines, watch: LoadBalancer | Scrapes | None, *, heeds_arrivals: bool
) -> Callable[[], float]:
    """Return what tells the next moment at which anything may look at an engine."""
    env = engines.env

    def horizon() -> float:
        read_s = inf if watch is None else watch.next_s
        if read_s < env.now:  # the end of any request may be the time
            return env.peek()
        return min(engines.next_arrival_s, read_s) if heeds_arrivals else read_s

    return horizon


def numbers(
    recording: Recording, pools: Sequence[Pool], duration_s: float
) -> dict[str, Any]:
    """Return what each pool and each engine did, and how evenly."""
    engines: list[dict[str, Any]] = []
    of_pools = []
    for pool in pools:
        first = len(engines)
        parts = recording.of_rank[first : first + len(pool.schedulers)]
        counters = [scheduler.summary() for scheduler in pool.schedulers]
        for place, (part, told) in enumerate(zip(parts, counters, strict=True)):
            name = {"engine": first + place, "pool": pool.name}
            engines.append(name | engine_numbers(part, duration_s) | told)
        whole = merged(parts, parts[0].step_table, "engine")
        facts = {
            "pool": pool.name,
            "role": "serve",
            "replicas": pool.num_engines,
            "gpu": pool.engine.gpu,
            "num_gpu_blocks": pool.capacity.num_gpu_blocks,
        }
        own = engine_numbers(whole, duration_s) | merged_counters(counters)
        of_pools.append(facts | own)
    return {"engines": engines, "pools": of_pools, "imbalance": imbalance(engines)}
