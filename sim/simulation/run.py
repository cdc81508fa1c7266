"""One simulation, from a configuration to results."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from cache.errors import PolicyError, TierError
from sim.costs.steps.at_bound import AtBound
from sim.engine.clients import FanOutClient
from sim.engine.clock import Clock, garbage_collector_paused
from sim.engine.loop import Engine
from sim.engine.patience import Patience, PatientClient
from sim.engine.requests import RequestFactory, tree_of
from sim.errors import ConfigError, EngineDiedError, SchedulerError
from sim.fleet.engines import Engines
from sim.fleet.replicas import Replicas
from sim.results import metrics
from sim.results.fleet.ranks import RankRecorders
from sim.results.recording.recorder import Recorder, Recording
from sim.results.recording.traffic import Traffic
from sim.results.recording.transfers import OffloadRecorder
from sim.results.run import Results
from sim.results.summary import provenance
from sim.results.summary.objectives import parse_objectives
from sim.results.summary.warnings import (
    fan_out_warnings,
    oracle_warnings,
    overload_warning,
    rejections,
    rounded_times_warnings,
    stall_warning,
    unsent_warning,
)
from sim.simulation import intervals, optional, ranks
from sim.simulation.arrivals import Arrivals, client_of
from sim.simulation.assemble import make_cost_model
from sim.simulation.fleet import Fleet
from sim.simulation.offloading import offloaded_steps
from sim.simulation.pair_fleet import PAIR_FLEETS
from sim.simulation.pool_schedulers import make_all_schedulers
from sim.simulation.pools import named_pool, pools_of
from sim.simulation.progress import Progress
from sim.simulation.recorders import make_recorder
from sim.simulation.speculative import make_sampler
from sim.simulation.workload import make_workload
from workloads.errors import WorkloadWarning
from workloads.requests.chains import has_chains

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.config.tables import RunConfig
    from sim.costs.base import Bound, CostModel
    from sim.engine.clients import Client
    from sim.engine.offloading import OffloadedSteps
    from sim.results.tables.memory import ResultTable
    from sim.scheduler.base import Scheduler
    from sim.simulation.pools import Pool
    from workloads.spec import RequestSpec


ASKED_FOR = "asked for"
"""Reason of a stepwise run that the user wanted so."""


class Simulation:
    """One run, put together from its configuration.

    Parameters
    ----------
    config
        What to simulate.
    stepwise
        Whether every step is taken in full, also where quiet decodes need no look.
    specs
        Requests to serve instead of those that the configuration's workload gives, by
        arrival and numbered from 0.

    Attributes
    ----------
    path_reason
        Why the run is taken step by step; empty on the fast path.
    stop_requested
        Whether `stop` was called.

    Raises
    ------
    ConfigError, CapacityError, WorkloadError
        If the parts cannot be built or do not fit together.
    """

    _keeps_steps = True

    def __init__(
        self,
        config: RunConfig,
        *,
        stepwise: bool = False,
        specs: Sequence[RequestSpec] | None = None,
    ) -> None:
        self.config = config
        asked = config.objectives
        self._objectives = () if asked is None else parse_objectives(asked)
        self.stop_requested = False
        self._companion: Simulation | None = None
        self._patient: PatientClient | None = None
        self._fleet: Fleet | None = None
        self.pools = pools_of(config)
        self.warnings = [
            *dict.fromkeys(line for pool in self.pools for line in pool.warnings())
        ]
        self.specs = self._read_workload() if specs is None else specs
        users = config.workload.max_concurrent_users
        self._is_closed_loop = users is not None or has_chains(self.specs)
        self.warnings += oracle_warnings(config, self._is_closed_loop)
        self.warnings += rounded_times_warnings(config, self.specs)
        for place, pool in enumerate(self.pools):
            with named_pool(config, place):
                pool.cost_model = self._make_cost_model(pool)
        self.cost_model = self.pools[0].cost_model
        self.path_reason = ASKED_FOR if stepwise else self._why_stepwise()
        self.schedulers = self._make_schedulers()
        self.scheduler, self.capacity = self.schedulers[0], self.pools[0].capacity
        self.env = Clock()
        for pool in self.pools:
            pool.locks = ranks.locks_of(pool, self.env)
            self.warnings += ranks.lock_step_warnings(pool)
        self.recorder = self._make_recorder()
        client = self._make_client()
        self.num_requests = client.num_requests(self.specs)
        self._arrivals = self._make_arrivals(client)
        self.engine = self._make_engine(client)

    def _make_cost_model(self, pool: Pool) -> CostModel:
        uses_drafts = pool.role != "prefill"
        return make_cost_model(
            pool.config, pool.model, pool.gpu, uses_drafts=uses_drafts
        )

    def _make_recorder(self) -> Recorder | RankRecorders:
        return make_recorder(
            self.config,
            self.capacity,
            self.schedulers,
            keeps_steps=self._keeps_steps,
            pools=self.pools,
        )

    def _make_client(self) -> Client:
        client, waits = self._client_of_engine(), self.config.workload.client
        if waits is None:
            return client
        self._patient = PatientClient(client, Patience(**dict(waits)))
        return self._patient

    def _client_of_engine(self) -> Client:
        most = min(pool.capacity.max_model_len for pool in self.pools)
        factory = RequestFactory(most, tree_of(self.specs))
        client = client_of(self.schedulers, self.specs, factory)
        if isinstance(client, FanOutClient):
            self.warnings += fan_out_warnings(self.specs)
        return client

    def _make_arrivals(self, client: Client) -> Arrivals:
        return Arrivals(
            *(self.env, self.config, self.specs, client),
            is_open_loop=not self._is_closed_loop,
            is_plain=isinstance(client, FanOutClient) and not self.path_reason,
        )

    @property
    def path(self) -> str:
        """``"fast"`` or ``"stepwise"``."""
        return "stepwise" if self.path_reason else "fast"

    def _why_stepwise(self) -> str:
        reasons = (pool.why_stepwise() for pool in self.pools)
        return next((reason for reason in reasons if reason), "")

    def _make_schedulers(self) -> list[Scheduler]:
        """Make those of all engines; they may shorten what a pool serves at most."""
        self.path_reason, self._limits = make_all_schedulers(
            self.config, self.pools, self.specs, self.path_reason
        )
        self.warnings += self._limits
        return [each for pool in self.pools for each in pool.schedulers]

    def _make_engine(self, client: Client) -> Engine | Engines:
        """Make the engine, and what hands requests to it."""
        if self.config.fleet is not None:
            return self._make_fleet(client)
        if not isinstance(self.recorder, Recorder):
            return self._make_ranks(self.recorder)
        is_pulled = self._arrivals.are_known
        engine = Engine(
            self.env,
            self.scheduler,
            self.cost_model,
            self.recorder,
            beside=self._beside(),
            arrivals=self._arrivals.requests() if is_pulled else None,
            sample=make_sampler(self.config, self.specs, self.scheduler, self.recorder),
            admission_check=self.config.engine.admission_check,
            stepwise=bool(self.path_reason),
        )
        if not is_pulled:
            self._arrivals.begin(engine)
        return engine

    def _beside(self) -> OffloadedSteps | None:
        """Return the copies of a tier that run beside the steps of the engine."""
        if not isinstance(self.recorder, OffloadRecorder):
            return None
        return offloaded_steps(
            *(self.config, self.scheduler, self.cost_model, self.capacity),
            *(self.recorder, self.specs),
        )

    def _make_ranks(self, recorders: RankRecorders) -> Engines:
        engines = ranks.make_engines(
            self.env,
            self.config.engine,
            self.schedulers,
            cost_model=self.cost_model,
            recorders=recorders,
            paces=self.pools[0].paces,
            sampler=partial(make_sampler, self.config, self.specs),
            stepwise=bool(self.path_reason),
        )
        if self._arrivals.are_known:
            ranks.let_run_ahead(engines)
        self._arrivals.begin_routed(engines)
        return engines

    def _make_fleet(self, client: Client) -> Engines:
        table = self.config.fleet
        assert table is not None
        assert isinstance(self.recorder, RankRecorders)
        kind: type[Fleet] = Fleet
        if table.has_roles:
            kind = PAIR_FLEETS[self.pools[0].engine.generation.kv_flow]
        fleet = self._fleet = kind(
            *(self.env, self.pools, self.recorder, table),
            specs=self.specs,
            seed=self.config.seed,
            stepwise=bool(self.path_reason),
        )
        self.schedulers = fleet.schedulers
        self.warnings += fleet.warnings()
        are_known = self._arrivals.are_known
        engines = fleet.dealt(client.factory) if are_known else None
        if engines is None:
            engines = fleet.routed(is_announced=are_known)
            self._arrivals.begin_routed(engines)
        return engines

    def _read_workload(self) -> Sequence[RequestSpec]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", WorkloadWarning)
            specs = make_workload(self.config.workload, self.config.seed).requests()
        self.warnings += [str(warning.message) for warning in caught]
        return specs

    def run(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        progress_every: int = 512,
        check_every: int = 0,
    ) -> Results:
        """Run to the end, or until `stop`; `intervals` says what is uncertain.

        Parameters
        ----------
        on_progress
            Called every `progress_every` steps of an engine.
        check_every
            Prove all invariants of an engine each so many of its steps, and at the end;
            0 for never.

        Raises
        ------
        InvariantError
            If a proof fails: a fault of ours.
        ConfigError
            If every single request was rejected.
        CostError, SchedulerError
            If a cost model gives a step no length, or a scheduler forgets requests.
        """
        if on_progress:
            self.engine.observe_each(  # they may run one after the other
                progress_every, lambda _: on_progress(self.progress())
            )
        if check_every:
            # Of each when its step has ended: amid one, its queues are on the way.
            self.engine.observe_each(check_every, _check)
        if self.engine.done.triggered:
            raise RuntimeError("a simulation runs once; make another one")
        self._run_clock()
        if check_every:
            self.check()
        return self._results()

    def at_bound(self, bound: Bound) -> Simulation:
        """Return the same run with every step at a bound; `stop` ends it, too.

        Only its requests are recorded. Workload and cost model are shared.
        """
        self._companion = _RunAtBound(self, bound)
        return self._companion

    def run_requests(self) -> ResultTable:
        """Run to the end, or until `stop`, and return the rows of the requests."""
        self._run_clock()
        return self.recorder.finish(self.env.now).request_table

    def _run_clock(self) -> None:
        with nullcontext() if self.path_reason else garbage_collector_paused():
            self._run_until_done()

    def _run_until_done(self) -> None:
        try:
            self.env.run(until=self.engine.done)
        except (PolicyError, TierError) as error:
            is_tier = isinstance(error, TierError)
            where = "kv_transfer_config" if is_tier else "evictor"
            raise ConfigError(f"engine.{where}: {error}; mend your class") from error
        except EngineDiedError as error:
            raise EngineDiedError(
                f"an engine dies at {error.at_s:,.3f} s, as the real one does, and "
                f"with it the run: {error}"
            ) from error
        except RuntimeError:
            if self.engine.done.triggered or self.env.peek() < inf:
                raise
            # SimPy says so where clients wait for answers that a stalled queue keeps.
            self.engine.stalled = True

    def stop(self) -> None:
        """Ask the run to end after the step in progress."""
        self.stop_requested = True
        (self._companion or self).engine.stop_requested = True

    def progress(self) -> Progress:
        """Return how far the run has come."""
        recorder = self.recorder
        return Progress(
            now_s=self.env.now,
            num_requests=self.num_requests,
            num_arrived=recorder.num_arrived,
            num_done=recorder.num_finished + recorder.num_left,
        )

    def check(self) -> None:
        """Prove the invariants of every structure, and conservation of requests."""
        for scheduler, recorder in zip(
            self.schedulers, self.recorder.of_rank, strict=True
        ):
            scheduler.check()
            recorder.check(scheduler)

    def _results(self) -> Results:
        engine = self.engine
        forgotten = len(self.recorder.active)
        if forgotten and not (engine.stop_requested or engine.stalled):
            raise SchedulerError(
                f"a scheduler must serve every request that it was given (invariant "
                f"1); '{self.config.engine.scheduler}' forgot {forgotten}; mend it"
            )
        if self._patient is not None:
            self.num_requests += self._patient.num_retried
        traffic = Traffic.of(self.specs)
        recording = traffic.joined(self.recorder.finish(self.env.now))
        if self._fleet is not None:
            assert isinstance(engine, Engines)
            recording = self._fleet.joined(recording, engine)
        self._check_rejections(recording)
        return Results(
            config=self.config,
            recording=recording,
            summary=self._summary(recording, traffic),
        )

    def _check_rejections(self, recording: Recording) -> None:
        """Warn of rejected requests; refuse a run that served no request."""
        num_rejected, line = rejections(recording)
        if not num_rejected:
            return
        engine, is_all = self.engine, num_rejected == recording.request_table.num_rows
        if is_all and not engine.stop_requested:
            is_off = isinstance(engine, Replicas) and engine.num_refused == num_rejected
            remedies = ["let an engine start again (fleet.events)"] if is_off else []
            if not is_off and "; " not in line:  # else the line has its own
                remedies = [
                    "give the engine a larger cache, or requests a smaller limit "
                    "(workload.max_tokens)"
                ]
            raise ConfigError("; ".join([line, *remedies, *self._limits]))
        self.warnings.append(line)

    def _summary(self, recording: Recording, traffic: Traffic) -> dict[str, Any]:
        numbers = metrics.numbers_of(
            recording, self.capacity, self.num_requests, self.env.now
        )
        numbers |= optional.steps_in_flight(self.engine)
        numbers |= optional.front_end(self.config)
        numbers |= optional.pool_in_tokens(self.config, self.capacity)
        self._warn_of(recording, numbers)
        cost = self.cost_model.describe()
        return (
            {"title": provenance.title(self.config)}
            | numbers
            | metrics.groups(recording, traffic)
            | metrics.kv_cache_groups(recording, self.capacity, self.env.now)
            | optional.tier(self.recorder, recording, self.env.now)
            | optional.within_limits(
                self.config, recording, self.num_requests, self.env.now
            )
            | optional.verdict(self._objectives, recording, numbers, self.num_requests)
            | self._counters(recording)
            | self._fleet_numbers(recording)
            | ({} if self._patient is None else self._patient.summary())
            | {
                "interrupted": self.engine.stop_requested,
                "stalled": self.engine.stalled,
                "warnings": self.warnings,
                "seed": self.config.seed,
                "scheduling": provenance.scheduling(
                    (pool.engine for pool in self.pools), numbers
                ),
                "path": self.path,
                "path_reason": self.path_reason or None,
                "profile": cost.get("profile"),
                "extrapolated_share": recording.extrapolated_share,
                "cost": cost,
                "capacity": self.capacity.to_dict(),
                "versions": provenance.versions(),
            }
            | intervals.no_intervals(
                intervals.why_never(self.config, recording) or intervals.NOT_ASKED
            )
        )

    def _fleet_numbers(self, recording: Recording) -> dict[str, Any]:
        if self._fleet is None:
            return {}
        assert isinstance(self.engine, Engines)
        return self._fleet.numbers(recording, self.engine, self.env.now)

    def _counters(self, recording: Recording) -> dict[str, Any]:
        return optional.counters(
            self.recorder,
            self.engine,
            recording,
            self.capacity.num_gpu_blocks - 1,
            self.env.now,
            self.pools[0].locks[0],
        )

    def _warn_of(self, recording: Recording, numbers: dict[str, Any]) -> None:
        """Say where numbers could be taken for more than they are."""
        is_bounded = self.config.workload.max_concurrent_users is not None
        if not is_bounded and (overload := overload_warning(recording, numbers)):
            self.warnings.append(overload)
        if self.engine.stalled:
            told = stall_warning(self.schedulers, self.recorder.of_rank)
            self.warnings.append(told)
        elif not self.engine.stop_requested and (unsent := unsent_warning(numbers)):
            self.warnings.append(unsent)
        if self._fleet is not None:
            assert isinstance(self.engine, Engines)
            self.warnings += self._fleet.late_warnings(self.engine)


def _check(engine: Engine) -> None:
    """Prove the invariants of an engine's structures, and that it lost no request."""
    engine.scheduler.check()
    engine.recorder.check(engine.scheduler)


class _RunAtBound(Simulation):
    """The same run with every step at a bound, of which only requests are recorded."""

    def __init__(self, central: Simulation, bound: Bound) -> None:
        self._central = central
        self._bound = bound
        super().__init__(central.config, stepwise=central.path_reason == ASKED_FOR)

    def _read_workload(self) -> Sequence[RequestSpec]:
        return self._central.specs

    def _make_cost_model(self, pool: Pool) -> CostModel:
        central = self._central.pools[self.pools.index(pool)]
        return AtBound(central.cost_model, self._bound)

    _keeps_steps = False
