"""Sessions for tests: chats under pressure, and chains written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.shared import ROOT
from tests.sim.build import spec

if TYPE_CHECKING:
    import pandas as pd

    from sim.simulation.run import Simulation
    from workloads.spec import RequestSpec

LISTED = f"{ROOT}/tests/identity/listed_trace.py:ListedTrace"


def turn(
    request_id: int, previous_id: int | None, delay_s: float, *lengths: int, **more: Any
) -> RequestSpec:
    """A follow-up whose prompt is its own text, unless `prompt` says otherwise."""
    links = {"previous_id": previous_id, "delay_s": delay_s}
    return spec(request_id, more.pop("at", 0.0), *lengths, **links, **more)


def chat_config(generation: str = "v1", **changes: Any) -> dict[str, Any]:
    """Chats under pressure: preemptions in every generation."""
    engine: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpu": "h200_sxm",
        "scheduler": generation,
        "num_gpu_blocks_override": 44,
        "max_model_len": 400,
        "max_num_seqs": 16,
    }
    if generation == "hf_fifo":  # its own blocks and margin keep the pressure off
        engine |= {"block_size": 16, "safety_margin": 0.0}
    if generation == "sglang":  # it would expect outputs to be long, and wait
        engine |= {"block_size": 16, "schedule_conservativeness": 0.01}
    workload: dict[str, Any] = {
        "sessions": {
            "kind": "chat",
            "num_sessions": 25,
            "arrivals": {"kind": "poisson", "rate": 25.0},
            "turns": {"kind": "uniform", "low": 1, "high": 5},
            "prompt_tokens": {"kind": "uniform", "low": 5, "high": 40},
            "output_tokens": {"kind": "uniform", "low": 20, "high": 60},
            "think_s": {"kind": "exponential", "mean_s": 0.2},
            "max_context_tokens": 300,
        },
        "max_tokens": 60,
    }
    return {
        "workload": workload | changes.pop("workload", {}),
        "engine": engine | changes.pop("engine", {}),
        "cost": {"kind": "constant", "step_s": 0.01},
        "seed": 3,
    }


def listed(requests: list[dict[str, Any]], **workload: Any) -> dict[str, Any]:
    data = chat_config()
    data["workload"] = {"trace": {"kind": LISTED, "requests": requests}} | workload
    return data


def check_sending_times(simulation: Simulation, requests: pd.DataFrame) -> int:
    """Hold arrivals of follow-ups against ends; return how many there were."""
    ends_s = requests.groupby("parent_id")["finish_s"].max()
    number = 0
    for row in requests.itertuples():
        request = simulation.specs[row.parent_id]
        if request.previous_id is None:
            assert row.arrival_s >= request.arrival_s
            continue
        number += 1
        assert row.arrival_s == ends_s[request.previous_id] + request.delay_s
    return number
