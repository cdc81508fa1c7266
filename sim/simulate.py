"""The composition root: from a configuration to results."""

from __future__ import annotations

import json
import platform
import warnings
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import simpy

from sim.capacity import CapacityEstimate, estimate_capacity
from sim.clients import open_loop, request_from_spec
from sim.costs import COST_MODELS
from sim.engine import Engine
from sim.errors import ConfigError
from sim.hardware import GpuSpec, load_gpu
from sim.metrics import cache_and_queues, latencies, throughput
from sim.model import ModelArchitecture, load_model
from sim.plug import build
from sim.recorder import Recorder, Recording
from sim.results import Results
from sim.scheduler import SCHEDULERS
from workloads.arrivals import ARRIVALS
from workloads.errors import WorkloadError, WorkloadWarning
from workloads.lengths import LENGTHS
from workloads.preset import PresetWorkload
from workloads.traces import TRACE_READERS
from workloads.workload import SyntheticWorkload, TraceWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.config import EngineConfig, RunConfig, WorkloadConfig
    from sim.cost import CostModel
    from sim.scheduler.base import Scheduler
    from workloads.spec import RequestSpec

_PACKAGES = ("kvsim", "simpy", "numpy", "pandas", "pyarrow", "matplotlib")
MAX_NUM_GPU_BLOCKS = 50_000_000
"""About 5 GB of block objects; an endless cache for any trace at hand."""
_TRACE_KEYS = ("rate_scale", "window", "limit")


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
        engine = config.engine
        self.model = load_model(engine.model)
        self.gpu = load_gpu(engine.gpu)
        self.capacity = _capacity(engine, self.model, self.gpu)
        if self.capacity.num_gpu_blocks > MAX_NUM_GPU_BLOCKS:
            raise ConfigError(
                f"a simulated pool holds at most {MAX_NUM_GPU_BLOCKS:,} blocks, got "
                f"{self.capacity.num_gpu_blocks:,}; lower num_gpu_blocks_override or "
                f"kv_cache_memory_bytes, or raise block_size"
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", WorkloadWarning)
            self.specs: Sequence[RequestSpec] = build_workload(
                config.workload, config.seed
            ).requests()
        self.warnings = [str(warning.message) for warning in caught]
        self.cost_model = self._cost_model()
        self.scheduler = self._scheduler()
        self.recorder = Recorder()
        self.env = simpy.Environment()
        self.engine = Engine(
            self.env,
            self.scheduler,
            self.cost_model,
            self.recorder,
            admission_check=engine.admission_check,
        )
        self.env.process(
            open_loop(
                self.env,
                self.engine,
                self.specs,
                partial(request_from_spec, max_model_len=self.capacity.max_model_len),
            )
        )

    def _cost_model(self) -> CostModel:
        engine = self.config.engine
        model: CostModel = build(
            COST_MODELS,
            self.config.cost,
            "cost",
            {
                "model": self.model,
                "gpu": self.gpu,
                "tensor_parallel_size": engine.tensor_parallel_size,
                "block_size": engine.block_size,
                "kv_cache_dtype": engine.kv_cache_dtype,
            },
        )
        try:
            json.dumps(model.describe(), allow_nan=False)
            model.step  # noqa: B018
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cost: a cost model has step(shape) and describe(), the latter "
                f"JSON-ready without NaN; '{self.config.cost['kind']}': {error}"
            ) from error
        return model

    def _scheduler(self) -> Scheduler:
        engine = self.config.engine
        kind = engine.scheduler
        scheduler: Scheduler = build(
            SCHEDULERS,
            {"kind": kind} if isinstance(kind, str) else kind,
            "engine.scheduler",
            {
                "num_gpu_blocks": self.capacity.num_gpu_blocks,
                "block_size": engine.block_size,
                "max_num_batched_tokens": self.capacity.max_num_batched_tokens,
                "max_num_seqs": self.capacity.max_num_seqs,
                "max_model_len": self.capacity.max_model_len,
                "enable_prefix_caching": engine.enable_prefix_caching,
                "long_prefill_token_threshold": engine.long_prefill_token_threshold,
            },
        )
        return scheduler

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
            Prove all invariants each so many steps; 0 for never.

        Raises
        ------
        InvariantError
            If a proof fails: a fault of ours.
        ConfigError
            If every single request was rejected.
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
            num_requests=len(self.specs),
            num_arrived=recorder.num_arrived,
            num_done=recorder.num_finished + recorder.num_left,
        )

    def check(self) -> None:
        """Prove the invariants of every structure, and conservation of requests."""
        self.scheduler.check()
        self.recorder.check(self.scheduler)

    def _results(self) -> Results:
        recording = self.recorder.finish(self.env.now)
        self._check_rejections(recording)
        if self.engine.stalled:
            self.warnings.append(
                f"the queue stalled: {self.scheduler.num_waiting} requests wait behind "
                f"one that the cache can never hold; leave engine.admission_check on"
            )
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
        if len(rejected) == len(requests) == len(self.specs):
            raise ConfigError(
                f"{line}; give the engine a larger cache or max_model_len"
            )
        self.warnings.append(line)

    def _summary(self, recording: Recording) -> dict[str, Any]:
        duration_s = self.env.now
        summary: dict[str, Any] = {"title": self.title()}
        summary |= throughput(recording.requests, len(self.specs), duration_s)
        summary |= latencies(recording.requests, recording.itl)
        summary |= {
            "num_gpu_blocks": self.capacity.num_gpu_blocks,
            "num_cpu_blocks": 0,
            "block_size": self.config.engine.block_size,
            "max_model_len": self.capacity.max_model_len,
            "max_num_seqs": self.capacity.max_num_seqs,
            "max_num_batched_tokens": self.capacity.max_num_batched_tokens,
        }
        summary |= cache_and_queues(recording, duration_s)
        summary |= self.scheduler.summary()
        return summary | self._provenance(recording)

    def _provenance(self, recording: Recording) -> dict[str, Any]:
        return {
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
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in _PACKAGES},
        }

    def title(self) -> str:
        """Return what was simulated, in a line."""
        engine = self.config.engine
        kind = engine.scheduler
        name = kind if isinstance(kind, str) else str(kind.get("kind"))
        num_gpus = engine.tensor_parallel_size
        gpus = f"{num_gpus} x {engine.gpu}" if num_gpus > 1 else engine.gpu
        return ", ".join(
            (
                f"{engine.model.rpartition('/')[2]} on {gpus}",
                f"{name} {engine.engine_version}",
                _workload_title(self.config.workload),
            )
        )


def _workload_title(workload: WorkloadConfig) -> str:
    if workload.trace:
        path = Path(str(workload.trace.get("path", "trace")))
        return f"{path.name} at {workload.trace.get('rate_scale', 1.0):g} x rate"
    if workload.preset:
        return f"{workload.preset.name} at {workload.preset.rate_scale:g} x rate"
    return "synthetic workload"


def simulate(config: RunConfig) -> Results:
    """Run one simulation and return its results.

    Raises
    ------
    ConfigError, CapacityError, WorkloadError
        See `Simulation`.
    """
    return Simulation(config).run()


def build_workload(config: WorkloadConfig, seed: int) -> Workload:
    """Construct the workload that `config` describes.

    Raises
    ------
    ConfigError, WorkloadError
        With the path of the key.
    """
    if config.trace is not None:
        common = {key: config.trace[key] for key in _TRACE_KEYS if key in config.trace}
        own = {key: v for key, v in config.trace.items() if key not in _TRACE_KEYS}
        reader = build(TRACE_READERS, own, "workload.trace")
        return _refusing("workload.trace", TraceWorkload, reader=reader, **common)
    if config.synthetic is not None:
        synthetic = config.synthetic
        where = "workload.synthetic"
        return _refusing(
            where,
            SyntheticWorkload,
            arrivals=build(ARRIVALS, synthetic.arrivals, f"{where}.arrivals"),
            prompt_tokens=build(
                LENGTHS, synthetic.prompt_tokens, f"{where}.prompt_tokens"
            ),
            output_tokens=build(
                LENGTHS, synthetic.output_tokens, f"{where}.output_tokens"
            ),
            num_requests=synthetic.num_requests,
            duration_s=synthetic.duration_s,
            rank_correlation=synthetic.rank_correlation,
            rate_scale=synthetic.rate_scale,
            seed=seed,
        )
    assert config.preset is not None
    preset = config.preset
    return _refusing(
        "workload.preset",
        PresetWorkload,
        name=preset.name,
        num_requests=preset.num_requests,
        duration_s=preset.duration_s,
        rate_scale=preset.rate_scale,
        seed=seed,
    )


def _refusing(where: str, make: Callable[..., Workload], **arguments: Any) -> Workload:
    """Call `make`; name the table in what it refuses."""
    try:
        return make(**arguments)
    except WorkloadError as error:
        raise ConfigError(f"{where}: {error}") from error


def _capacity(
    engine: EngineConfig, model: ModelArchitecture, gpu: GpuSpec
) -> CapacityEstimate:
    return estimate_capacity(
        model=model,
        gpu=gpu,
        tensor_parallel_size=engine.tensor_parallel_size,
        block_size=engine.block_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        dtype=engine.dtype,
        quantization=engine.quantization,
        kv_cache_dtype=engine.kv_cache_dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        engine_version=engine.engine_version,
        enforce_eager=engine.enforce_eager,
        num_gpu_blocks_override=engine.num_gpu_blocks_override,
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
    )
