"""The engines of a fleet on one clock, the router before them, and what it is told."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from sim.costs.steps.slowed import Slowed
from sim.engine.clock import Clock, LoneClock
from sim.engine.loop import Engine
from sim.engine.pace import Unpriced
from sim.engine.requests import requests_of
from sim.fleet.apart import Deal, EnginesApart
from sim.fleet.balancer import LoadBalancer
from sim.fleet.engines import Engines, Watch, horizon_of
from sim.fleet.lookahead import AtArrivals, BetweenScrapes, ByEnds, DealtEngines
from sim.fleet.replicas import Replicas
from sim.fleet.roster import EventKind, ReplicaEvent
from sim.fleet.routers import BLIND, BY_PREFIX
from sim.fleet.scrapes import Scrapes, load_of
from sim.results.fleet.summary import gpu_hours
from sim.results.recording.transfers import OffloadRecorder
from sim.scheduler.v1.holdings import Holdings
from sim.simulation.autoscaling import (
    add_autoscalers,
    flapping,
    places_off,
    replicas_by_pool,
)
from sim.simulation.fleet_numbers import numbers, with_series
from sim.simulation.offloading import offloaded_steps
from sim.simulation.pool_schedulers import make_schedulers
from sim.simulation.ranks import space_prefills
from sim.simulation.routers import (
    looks_at_arrivals,
    looks_at_caches,
    looks_when_it_likes,
    make_router,
    may_look,
)
from sim.simulation.speculative import make_sampler
from workloads.draws.streams import Streams
from workloads.requests.columns import arrivals_s

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from numpy.random import Generator

    from sim.config.fleet import EventTable, FleetTable
    from sim.costs.base import CostModel
    from sim.engine.beside import Beside
    from sim.engine.requests import RequestFactory
    from sim.fleet.balancer import Load
    from sim.fleet.replicas import Scaler
    from sim.results.fleet.ranks import RankRecorders
    from sim.results.recording.recorder import Recording
    from sim.scheduler.base import Scheduler
    from sim.scheduler.request import Request
    from sim.simulation.pools import Pool
    from workloads.spec import RequestSpec


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
        See `sim.config.fleet`.
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
        env: Clock,
        pools: Sequence[Pool],
        recorders: RankRecorders,
        table: FleetTable,
        *,
        specs: Sequence[RequestSpec],
        seed: int,
        stepwise: bool,
    ) -> None:
        self.env = env
        self.pools = pools
        self._table = table
        self._recorders = recorders
        self._specs = specs
        self._stepwise = stepwise
        self.schedulers = [each for pool in pools for each in pool.schedulers]
        self._owners = [pool for pool in pools for _ in pool.schedulers]
        self._paces = [pace for pool in pools for pace in pool.paces]
        space_prefills(self.schedulers, self._paces)
        self.events = [_event(each) for each in table.events]
        self._slowed: dict[int, Slowed] = {}
        self._running: dict[int, Engine] = {}
        self._heed: dict[int, Callable[[Engine], None]] = {}  # by place
        self.router: Any = self._make_router(table, seed)

    @property
    def comes_and_goes(self) -> bool:
        """Whether some of its engines are not there all the time."""
        return bool(self.events or self._table.autoscaler)

    def _make_router(self, table: FleetTable, seed: int) -> Any:
        places = range(len(self.schedulers))
        return self._router(table.router, "router", places, seed)

    def _router(
        self, table: Mapping[str, Any], key: str, places: Sequence[int], seed: int
    ) -> Any:
        """Make the router of the engines at these places."""
        context = self._context(places, Streams(seed).generator(key.replace("_", " ")))
        changing = "events" if self.events else "autoscaler"
        return make_router(
            *(table, f"fleet.{key}", context),
            changing if self.comes_and_goes else None,
        )

    def _context(self, places: Sequence[int], stream: Generator) -> dict[str, Any]:
        specs = self._specs
        owners = [self._owners[place] for place in places]

        def session_of(request: Request) -> Hashable | None:
            return specs[request.parent_id].session_id

        return {
            "env": self.env,
            "loads": partial(self.loads, places),
            "num_engines": len(places),
            "stream": stream,
            "num_gpu_blocks": [pool.capacity.num_gpu_blocks for pool in owners],
            "block_size": max(pool.capacity.block_size for pool in owners),
            "session_of": session_of,
            "turn_of": lambda number: self._running[places[number]].priority,
            "cached_blocks": (
                partial(self._cached_blocks, places)
                if all(isinstance(self.schedulers[i], Holdings) for i in places)
                else None
            ),
        }

    def _cached_blocks(self, places: Sequence[int], request: Request) -> list[int]:
        """Return how many leading blocks of a prompt engines have cached."""
        tokens, num_tokens = request.tokens, request.num_prompt_tokens
        found = []
        size = num_blocks = 0
        for place in places:
            scheduler: Any = self.schedulers[place]
            tables = scheduler.tables
            if not scheduler.enable_caching:
                found.append(0)
            elif scheduler.groups is None:  # blocks go run by run
                if tables.block_size != size:
                    size = tables.block_size
                    runs, num_blocks = tokens.block_runs(size), num_tokens // size
                    runs.cover(num_blocks)
                found.append(tables.num_cached(runs, num_blocks))
            else:  # a token more, for the last block; what is noted is not the engine's
                hit = tables.find(request.again(), num_tokens + 1)
                found.append(hit.num_blocks)
        return found

    def loads(self, places: Sequence[int] | None = None) -> list[Load]:
        """Read the loads of engines, all by default, as they are now."""
        engines = self._running
        places = range(len(engines)) if places is None else places
        return [load_of(engines[place]) for place in places]

    def dealt(self, factory: RequestFactory) -> Engines | None:
        """Return engines on clocks of their own, if each may be run by itself.

        Nothing but its share of the requests ever comes to an engine. That is so where
        all stay, and choices depend on nothing that engines do, or on metrics, on what
        has ended, or on what engines cache when a request comes.
        """
        if self.comes_and_goes or self._table.has_roles:
            return None
        if any(pool.shared_tiers for pool in self.pools) or any(self._paces):
            return None
        router, requests = self.router, requests_of(factory, self._specs)
        # One that knows when its share ends would end before its last stores begin.
        keeps_on = any(pool.engine.has_tier for pool in self.pools)
        if type(router) in BLIND and not keeps_on:
            deal = Deal(requests, router.choose)
            return EnginesApart(
                self.env,
                [
                    self._engine(place, share, None, Clock())
                    for place, share in enumerate(deal.shares(len(self.schedulers)))
                ],
                router,
                arrivals_s(self._specs),
            )
        looks = looks_at_arrivals(router)
        reads = bool(getattr(router, "interval_s", None))
        is_told = looks or getattr(router, "knows_metrics_only", False)
        if looks_when_it_likes(router) or (reads and not is_told):
            return None
        engines = self._behind(looks_ahead=not looks)
        dealt: DealtEngines
        if reads:
            dealt = BetweenScrapes(
                *(self.env, engines, router, requests, self.loads), looks=looks
            )
        elif looks:
            dealt = AtArrivals(self.env, engines, router, requests)
        else:
            return ByEnds(self.env, engines, router, requests)
        for engine in engines:
            if looks or not getattr(engine.scheduler, "foresees_usage", False):
                engine.horizon = dealt.next_look_s
        return dealt

    def _behind(self, *, looks_ahead: bool) -> list[Engine]:
        """Return engines on clocks of their own that are handed requests."""
        engines = []
        for place in range(len(self.schedulers)):
            engine = self._engine(place, None, None, LoneClock())
            engine.is_interruptible = True
            engine.looks_ahead = looks_ahead
            engines.append(engine)
        return engines

    def routed(self, *, is_announced: bool) -> Engines:
        """Return engines to which requests are handed as they come.

        Some of them may come and go.

        Parameters
        ----------
        is_announced
            Whether requests come by `Engines.announced`, whatever becomes of those
            before. Stretches that cannot be interrupted last until the next then.
        """
        engines = self._engines([None] * len(self.schedulers), None)
        places = range(len(self.schedulers))
        looks_ahead = is_announced and not self.comes_and_goes
        self._run_ahead(engines, self.router, places, looks_ahead=looks_ahead)
        return engines

    def _run_ahead(
        self, engines: Engines, router: Any, places: Sequence[int], *, looks_ahead: bool
    ) -> None:
        """Let the engines of a router run on between the moments at which it looks.

        It is told of loads, if it reads them.
        """
        watches: list[Watch] = [*_autoscalers(engines)]
        if isinstance(router, LoadBalancer):
            watches.append(router)
        elif getattr(router, "interval_s", None):
            scrapes = Scrapes(
                *(self.env, router, partial(self.loads, places)),
                lambda: not engines.num_in_flight,
                engines.scrapes,
            )
            engines.scrapes.append(scrapes)
            watches.append(scrapes)
        elif may_look(router):
            return  # at any time
        if looks_at_caches(router):
            return
        heed = partial(self._heeded, engines, watches, looks_ahead=looks_ahead)
        for place in places:
            self._heed[place] = heed
            heed(self._running[place])

    def _heeded(
        self,
        engines: Engines,
        watches: Sequence[Watch],
        engine: Engine,
        *,
        looks_ahead: bool,
    ) -> None:
        """Let an engine know how far it may run ahead, if it may run alone."""
        if engine.pace is not None:
            return
        engine.is_interruptible = True
        engine.looks_ahead = looks_ahead
        if not getattr(engine.scheduler, "foresees_usage", False):
            engine.horizon = horizon_of(engines, watches, heeds_arrivals=False)
        # Otherwise what is looked at is known amid quiet steps, too.

    def _engines(
        self,
        shares: Sequence[Iterable[Request] | None],
        horizon: Callable[[], float] | None,
    ) -> Engines:
        engines = [
            self._engine(place, share, horizon) for place, share in enumerate(shares)
        ]
        if not self.comes_and_goes:
            return Engines(self.env, engines, self.router)
        replicas = Replicas(
            *(self.env, engines, self.router, self.events),
            renew=self._renewed,
            slow=self._slow,
            off=places_off(self._table, self.pools),
            replicas=chain(*replicas_by_pool(self.pools)),
        )
        add_autoscalers(replicas, self._table, self.pools)
        return replicas

    def _engine(
        self,
        place: int,
        share: Iterable[Request] | None,
        horizon: Callable[[], float] | None,
        env: Clock | None = None,
    ) -> Engine:
        pool, scheduler = self._owners[place], self.schedulers[place]
        recorder = self._recorders.of_rank[place]
        cost_model, pace = pool.cost_model, self._paces[place]
        if any(e.place == place and e.kind is EventKind.SLOW for e in self.events):
            cost_model = self._slowed.setdefault(place, Slowed(cost_model))
        engine = self._running[place] = Engine(
            env or self.env,
            scheduler,
            cost_model,
            recorder,
            beside=self._beside(
                place, scheduler, cost_model if pace is None else Unpriced()
            ),
            arrivals=share,
            sample=make_sampler(pool.config, self._specs, scheduler, recorder),
            admission_check=pool.engine.admission_check,
            horizon=horizon,
            stepwise=self._stepwise,
            pace=pace,
            place=place,
        )
        return engine

    def _beside(
        self, place: int, scheduler: Scheduler, cost_model: CostModel
    ) -> Beside | None:
        """Return the copies that run beside the steps of an engine."""
        recorder, pool = self._recorders.of_rank[place], self._owners[place]
        if not pool.engine.has_tier:
            return None
        assert isinstance(recorder, OffloadRecorder)
        own: Any = scheduler
        recorder.transfers.renew(own.connector.offloading.behind)
        return offloaded_steps(
            *(pool.config, scheduler, cost_model, pool.capacity, recorder),
            *(self._specs, place),
        )

    def joined(self, recording: Recording, engines: Engines) -> Recording:
        """Return a recording with what only a fleet has."""
        return with_series(recording, self.pools, engines, self.env.now)

    def numbers(
        self, recording: Recording, engines: Engines, duration_s: float
    ) -> dict[str, Any]:
        """Return the numbers of its pools and engines."""
        told = numbers(recording, self.pools, engines, duration_s, self._recorders)
        up_s = told.get("up_s") or [duration_s] * len(self.schedulers)
        told |= gpu_hours(told["engines"], told["pools"], up_s, self._table.prices)
        return {"router": str(self._table.router["kind"])} | told

    def _renewed(self, place: int, engine: Engine) -> Engine:
        """Return a new engine, with an empty cache, for one that has ended."""
        pool = self._owners[place]
        (scheduler,) = make_schedulers(
            pool, self._specs, on_clock=not self._stepwise, number=1
        )
        pace = self._paces[place]
        if pace is not None:
            pace = self._paces[place] = pace.renewed()
            space_prefills([scheduler], [pace])
        if hasattr(scheduler, "step"):  # its clock is that of the recorder's steps
            scheduler.step = engine.num_steps
        self.schedulers[place] = scheduler
        new = self._engine(place, None, None)
        new.num_steps = engine.num_steps
        if place in self._heed:
            self._heed[place](new)
        return new

    def _slow(self, place: int, engine: Engine, factor: float) -> None:
        """Let later steps of an engine take so many times as long.

        And those of ranks that step together with it.
        """
        pace = self._paces[place]
        if pace is not None:
            pace.slow(factor)
            return
        engine.recorder.steps.flush()
        self._slowed[place].factor = factor

    def late_warnings(self, engines: Engines) -> Iterator[str]:
        """Yield warnings of a run that has ended."""
        if isinstance(engines, Replicas):
            yield from flapping(engines)

    def warnings(self) -> Iterator[str]:
        """Yield warnings of a router that works in vain."""
        if type(self.router) not in BY_PREFIX:
            return
        for pool in self.pools:
            if not pool.engine.prefix_caching:
                yield (
                    f"fleet.router sends prompts to where their prefix is, and pool "
                    f"{pool.name} runs without enable_prefix_caching"
                )


def _event(table: EventTable) -> ReplicaEvent:
    return ReplicaEvent(
        time_s=table.time_s,
        kind=EventKind(table.kind),
        place=table.engine,
        retries=table.requests != "lose",
        factor=table.factor or 1.0,
    )


def _autoscalers(engines: Engines) -> Sequence[Scaler]:
    return engines.autoscalers if isinstance(engines, Replicas) else ()
