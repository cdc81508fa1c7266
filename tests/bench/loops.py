"""Loops ready to run, and how long they take, for whole-run benchmarks."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, NamedTuple

import simpy

from sim.config.tables import load_config
from sim.simulation.run import Simulation
from tests.bench.reference import PlainEngine
from tests.shared import ROOT, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.config.tables import RunConfig

AZURE = "traces/azure_llm_2023_conv.csv"
MOONCAKE = "traces/mooncake_fast25_conversation.jsonl"
NUM_AZURE_REQUESTS = 19_366
NUM_MOONCAKE_REQUESTS = 12_031
MAX_NUM_SEQS = 256

PATHS = ("fast", "stepwise", "plain")
"""Ways to run a configuration: the product's two, and `tests.bench.reference`."""


class Regime(NamedTuple):
    """A run, and those of `PATHS` that are timed in turn."""

    example: str
    trace: str
    settings: Sequence[str]
    num_requests: int = NUM_AZURE_REQUESTS
    paths: Sequence[str] = ("fast",)

    def config(self) -> RunConfig:
        """Return the configuration; skips the test where the trace is missing."""
        return load_config(
            ROOT / "examples" / self.example,
            [
                f"workload.trace.path={shared(self.trace)}",
                f"engine.max_num_seqs={MAX_NUM_SEQS}",
                *self.settings,
            ],
        )


def azure(*settings: str, paths: Sequence[str] = ("fast",)) -> Regime:
    """Return the Azure conversation trace with some settings, one step at a time."""
    return Regime("azure_conv.yaml", AZURE, (ONE_STEP, *settings), paths=paths)


X3 = "workload.trace.rate_scale=3"
GPT_OSS = "engine.model=openai/gpt-oss-120b"
BLOCKS_8K = "engine.num_gpu_blocks_override=8000"
ONE_STEP = "engine.async_scheduling=false"
AHEAD = "engine.async_scheduling=true"

REGIMES: dict[str, Regime] = {
    "light x1": azure(paths=("fast", "plain")),
    "loaded x3": azure(X3, paths=PATHS),
    "few preemptions: x3, 8,000 blocks": azure(X3, BLOCKS_8K, paths=("fast", "plain")),
    # A step of an A100 is longer, so that more requests run at a time.
    "preempting: x3, 8,000 blocks, A100": azure(
        X3,
        BLOCKS_8K,
        "engine.gpu=a100_sxm",
        "engine.max_num_batched_tokens=8192",
        paths=("fast", "plain"),
    ),
    "prefix caching: x3": azure(
        X3, "engine.enable_prefix_caching=true", paths=("fast", "stepwise")
    ),
    "prefix caching: Mooncake, 30,000 blocks": Regime(
        "mooncake_conversation.yaml",
        MOONCAKE,
        (
            ONE_STEP,
            "workload.trace.rate_scale=1",
            "engine.num_gpu_blocks_override=30000",
            "engine.max_num_batched_tokens=8192",
        ),
        NUM_MOONCAKE_REQUESTS,
    ),
    **{
        f"CPU tier of {gib} GiB: Mooncake x{rate}": Regime(
            "mooncake_conversation.yaml",
            MOONCAKE,
            (
                ONE_STEP,
                f"workload.trace.rate_scale={rate}",
                f"engine.kv_offloading_size={gib}",
                "engine.max_num_batched_tokens=8192",
            ),
            NUM_MOONCAKE_REQUESTS,
        )
        for gib, rate in ((256, 0.4), (1024, 1))
    },
    "gpt-oss-120b: x1": azure(GPT_OSS, paths=("fast", "plain")),
    "gpt-oss-120b: x3": azure(GPT_OSS, X3, paths=PATHS),
    # The plain loop knows no cached prefixes: it computes every prompt in full.
    "gpt-oss-120b, prefix caching: Mooncake": Regime(
        "mooncake_conversation.yaml",
        MOONCAKE,
        (
            ONE_STEP,
            GPT_OSS,
            "workload.trace.rate_scale=1",
            "engine.max_num_batched_tokens=8192",
        ),
        NUM_MOONCAKE_REQUESTS,
        paths=("fast", "plain"),
    ),
}

REGIMES |= {
    f"asynchronous, {name}": REGIMES[name]._replace(
        settings=(*REGIMES[name].settings, AHEAD), paths=("fast",)
    )
    for name in (
        "light x1",
        "loaded x3",
        "preempting: x3, 8,000 blocks, A100",
        "prefix caching: x3",
        "CPU tier of 256 GiB: Mooncake x0.4",
        "CPU tier of 1024 GiB: Mooncake x1",
        "gpt-oss-120b: x1",
        "gpt-oss-120b: x3",
        "gpt-oss-120b, prefix caching: Mooncake",
    )
}


NUM_FLEET_REQUESTS = 50_784
"""Of the first 450 s, as `fleet` repeats them."""


def fleet(router: str) -> Regime:
    """Return eight engines, each at the load of "loaded x3"."""
    pools = "pools: [{name: main, replicas: 8}]"
    settings = (
        "workload.trace.rate_scale=24",
        "workload.trace.scale_by=superposition",
        "workload.trace.window=[0, 450]",
        f"fleet={{{pools}, router: {{kind: {router}}}}}",
    )
    return Regime("azure_conv.yaml", AZURE, settings, NUM_FLEET_REQUESTS)


REGIMES |= {
    f"eight engines behind {router}": fleet(router)
    for router in ("round_robin", "least_requests", "llm_d")
}


class Outcome(NamedTuple):
    """Counts of a loop that was run, to be sure that paths did the same."""

    num_requests: int
    num_steps: int
    num_preemptions: int


class Loop(NamedTuple):
    """A run whose parts stand ready: trace read, nothing simulated."""

    run: Callable[[], object]
    outcome: Callable[[], Outcome]


def make_loop(config: RunConfig, path: str) -> Loop:
    """Put a run together; garbage of before is not left for it.

    Raises
    ------
    ValueError
        If the product would not take the path that is asked for.
    """
    simulation = Simulation(config, stepwise=path != "fast")
    gc.collect()
    if path == "plain":
        return _plain_loop(plain_engine(simulation))
    if simulation.path != path:
        raise ValueError(f"not on the fast path: {simulation.path_reason}")

    def outcome() -> Outcome:
        recording = simulation.recorder.finish(simulation.env.now)
        return Outcome(
            simulation.progress().num_done,
            simulation.engine.num_steps,
            recording.preemption_table.num_rows,
        )

    return Loop(lambda: simulation.env.run(until=simulation.engine.done), outcome)


def _plain_loop(engine: PlainEngine) -> Loop:
    def outcome() -> Outcome:
        requests = engine.requests
        return Outcome(
            sum(each.finish_s is not None for each in requests),
            len(engine.rows),
            sum(each.num_preemptions for each in requests),
        )

    return Loop(lambda: engine.env.run(until=engine.done), outcome)


def plain_engine(simulation: Simulation) -> PlainEngine:
    """Return the reference loop on the workload, engine and cost model of a run."""
    capacity = simulation.capacity
    return PlainEngine(
        simpy.Environment(),
        simulation.specs,
        simulation.cost_model,
        num_gpu_blocks=capacity.num_gpu_blocks,
        block_size=capacity.block_size,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_num_seqs=capacity.max_num_seqs,
        max_model_len=capacity.max_model_len,
    )


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long something took: on its processor, and by the clock on the wall."""

    cpu: float
    wall: float


def timed(call: Callable[[], object]) -> Seconds:
    """Call and measure, without the search for cycles, as the product runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        wall, cpu = perf_counter(), process_time()
        call()
        return Seconds(process_time() - cpu, perf_counter() - wall)
    finally:
        if was_enabled:
            gc.enable()


def medians(rounds: Sequence[Seconds]) -> Seconds:
    """Return the median of each clock."""
    return Seconds(median(s.cpu for s in rounds), median(s.wall for s in rounds))
