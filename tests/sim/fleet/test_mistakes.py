"""Mistakes in a pool's own keys are told with the pool's place."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.errors import UserError
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate

FIXED = {"kind": "fixed", "tokens": 8}
WORKLOAD = {
    "synthetic": {
        "num_requests": 4,
        "arrivals": {"kind": "poisson", "rate": 1.0},
        "prompt_tokens": FIXED,
        "output_tokens": FIXED,
    }
}


def refused(engine: dict[str, Any], own: dict[str, Any]) -> str:
    shared = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"}
    pools = [
        {"name": "one", "replicas": 1},
        {"name": "other", "replicas": 1, "engine": own},
    ]
    config = parse_config(
        {"workload": WORKLOAD, "engine": shared | engine, "fleet": {"pools": pools}}
    )
    with pytest.raises(UserError) as caught:
        simulate(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"scheduler": "v9"}, ".scheduler.kind: 'v9' is not built (there are: "),
        ({"evictor": "lruu"}, ".evictor.kind: 'lruu' is not built; did you mean 'lru'"),
        ({"gpu": "h1000"}, ": unknown gpu: 'h1000'; did you mean h100_sxm"),
        ({"interconnect": "nvlinkk"}, ": unknown interconnect: 'nvlinkk'; did you mea"),
        ({"quantization": "fp9"}, ": unknown quantization: 'fp9'; use one of "),
        ({"gpu_memory_utilization": 0.1}, ": no room for a KV cache: meta-llama/Lla"),
    ],
)
def test_a_pools_own_key_is_named(own: dict[str, Any], said: str) -> None:
    assert refused({}, own).startswith(f"fleet.pools.1.engine{said}")


def test_a_key_of_all_pools_is_named_as_it_is_written() -> None:
    assert refused({"gpu": "h1000"}, {}).startswith("unknown gpu: 'h1000'")
    assert refused({"scheduler": "v9"}, {}).startswith("engine.scheduler.kind: 'v9'")


def test_a_stalled_fleet_counts_those_that_wait_at_any_engine() -> None:
    """Nothing waits at the first engine."""
    synthetic = WORKLOAD["synthetic"] | {"num_requests": 9}
    synthetic |= {"prompt_tokens": {"kind": "fixed", "tokens": 40}}
    small = {"num_gpu_blocks_override": 2}
    pools = [
        {"name": "one", "replicas": 1},
        {"name": "small", "replicas": 2, "engine": small},
    ]
    engine = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"}
    engine |= {"admission_check": False, "max_model_len": 64}
    fleet = {"pools": pools, "router": {"kind": "round_robin"}}
    workload = {"synthetic": synthetic}
    config = parse_config({"workload": workload, "engine": engine, "fleet": fleet})
    told = simulate(config).summary
    assert (told["completed"], told["unfinished"], told["stalled"]) == (3, 6, True)
    (line,) = [line for line in told["warnings"] if "stalled" in line]
    assert line.startswith("the queue stalled: 6 requests wait behind one that ")


@pytest.mark.parametrize("router", ["round_robin", "least_requests"])
def test_progress_of_a_fleet_counts_all_of_its_engines(router: str) -> None:
    """Of engines that run one after the other, the first alone told of its share."""
    synthetic = WORKLOAD["synthetic"] | {"num_requests": 400}
    engine = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"}
    fleet = {"pools": [{"name": "four", "replicas": 4}], "router": {"kind": router}}
    workload = {"synthetic": synthetic}
    simulation = Simulation(
        parse_config({"workload": workload, "engine": engine, "fleet": fleet})
    )
    seen: list[int] = []
    simulation.run(lambda told: seen.append(told.num_done), progress_every=8)
    assert seen == sorted(seen)
    assert seen[-1] > 300
