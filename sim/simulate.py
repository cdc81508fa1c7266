"""One simulation, from a configuration to results."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import simpy

from sim import summary
from sim.assemble import make_capacity, make_cost_model, make_scheduler, make_workload
from sim.clients import FanOutClient, GroupClient, RequestFactory, open_loop
from sim.engine import Engine, Sampler
from sim.errors import ConfigError, SchedulerError
from sim.generation import sample
from sim.generation_groups import sampler_for
from sim.hardware import load_gpu
from sim.model import load_model
from sim.recorder import Recorder, Recording
from sim.results import Results
from sim.scheduler.groups import GroupScheduler
from workloads.errors import WorkloadWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.config import RunConfig
    from sim.scheduler.base import Scheduler
    from workloads.spec import RequestSpec


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    now_s: float
    num_requests: int
    num_arrived: int
    num_done: int


class Simulation:
    """One run, put together from its configuration.

    Parameters
    ----------
    config
        What to simulate.

    Raises
    ------
    ConfigError, CapacityError, WorkloadError
        If the parts cannot be built or do not fit together.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        model, gpu = load_model(config.engine.model), load_gpu(config.engine.gpu)
        self.capacity = make_capacity(config.engine, model, gpu)
        self.warnings = summary.pool_warnings(self.capacity, model, config)
        self.warnings += summary.idle_key_warnings(config)
        self.specs = self._read_workload()
        self.cost_model = make_cost_model(config, model, gpu)
        self.scheduler, capacity = make_scheduler(config.engine, self.capacity, model)
        self._limits = summary.scheduler_warnings(self.capacity, capacity, config)
        self.warnings += self._limits
        self.capacity = capacity
        self.recorder = Recorder()
        self.env = simpy.Environment()
        self.engine = Engine(
            self.env,
            self.scheduler,
            self.cost_model,
            self.recorder,
            sample=_sampler(self.scheduler),
            admission_check=config.engine.admission_check,
        )
        factory = RequestFactory(self.capacity.max_model_len)
        client = (
            GroupClient(factory)
            if isinstance(self.scheduler, GroupScheduler)
            else FanOutClient(factory)
        )
        if isinstance(client, FanOutClient):
            self.warnings += summary.fan_out_warnings(self.specs)
        self.num_requests = client.num_requests(self.specs)
        self.env.process(open_loop(self.env, self.engine, self.specs, client))

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
        """Run to the end, or until `stop`.

        Parameters
        ----------
        on_progress
            Called every `progress_every` steps.
        check_every
            Prove all invariants each so many steps, and at the end; 0 for never.

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
            self.engine.observe(progress_every, lambda _: on_progress(self.progress()))
        if check_every:
            self.engine.observe(check_every, lambda _: self.check())
        self.env.run(until=self.engine.done)
        if check_every:
            self.check()
        return self._results()

    def stop(self) -> None:
        """Ask the run to end after the step in progress."""
        self.engine.stop_requested = True

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
        self.scheduler.check()
        self.recorder.check(self.scheduler)

    def _results(self) -> Results:
        engine = self.engine
        forgotten = len(self.recorder.active)
        if forgotten and not (engine.stop_requested or engine.stalled):
            raise SchedulerError(
                f"a scheduler must serve every request that it was given (invariant "
                f"1); '{self.config.engine.scheduler}' forgot {forgotten}; mend it"
            )
        recording = self.recorder.finish(self.env.now)
        self._check_rejections(recording)
        return Results(
            config=self.config,
            requests=recording.requests,
            steps=recording.steps,
            preemptions=recording.preemptions,
            summary=self._summary(recording),
        )

    def _check_rejections(self, recording: Recording) -> None:
        """Warn of rejected requests; refuse a run that served nobody."""
        requests = recording.requests
        rejected = requests[requests["status"] == "finished_rejected"]
        if rejected.empty:
            return
        first = rejected.iloc[0]
        line = (
            f"{len(rejected)} of {len(requests)} requests were rejected, the first "
            f"(request {first['request_id']}): {first['reason']}"
        )
        if len(rejected) == len(requests) == self.num_requests:
            remedy = (
                "give the engine a larger cache, or requests a smaller limit "
                "(workload.max_tokens)"
            )
            raise ConfigError("; ".join([line, remedy, *self._limits]))
        self.warnings.append(line)

    def _summary(self, recording: Recording) -> dict[str, Any]:
        numbers = summary.numbers(
            recording, self.capacity, self.num_requests, self.env.now
        )
        if overload := summary.overload_warning(recording, numbers):
            self.warnings.append(overload)
        if self.engine.stalled:
            self.warnings.append(summary.stall_warning(self.scheduler))
        return (
            {"title": summary.title(self.config)}
            | numbers
            | self.scheduler.summary()
            | {
                "interrupted": self.engine.stop_requested,
                "stalled": self.engine.stalled,
                "warnings": self.warnings,
                "seed": self.config.seed,
                "scheduling": "synchronous scheduling",
                "path": "stepwise",
                "profile": None,
                "extrapolated_share": recording.extrapolated_share,
                "cost": self.cost_model.describe(),
                "capacity": self.capacity.to_dict(),
                "versions": summary.versions(),
            }
        )


def _sampler(scheduler: Scheduler) -> Sampler:
    """Return how the output of the scheduler's steps appears."""
    return sampler_for(scheduler) if isinstance(scheduler, GroupScheduler) else sample


def simulate(config: RunConfig) -> Results:
    """Run one simulation and return its results.

    Raises
    ------
    ConfigError, CapacityError, WorkloadError
        See `Simulation`.
    """
    return Simulation(config).run()
