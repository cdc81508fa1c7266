"""A simulated run in the part of a measured one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from sim.config.tables import parse_config
from sim.simulation.simulate import simulate
from sim.studies.validation.observed import observed_of, series_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from sim.config.tables import RunConfig
    from sim.results.run import Results

STEP_OVERHEAD_S = 0.004


def config(**cost: Any) -> dict[str, Any]:
    """Forty requests in a cache that is full most of the time."""
    return {
        "workload": {
            "synthetic": {
                "num_requests": 40,
                "arrivals": {"kind": "poisson", "rate": 6.0},
                "prompt_tokens": {
                    "kind": "lognormal",
                    "median": 220,
                    "sigma": 0.7,
                    "max": 1500,
                },
                "output_tokens": {
                    "kind": "lognormal",
                    "median": 90,
                    "sigma": 0.7,
                    "max": 400,
                },
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "async_scheduling": False,
            "gpu": "a100_sxm",
            "num_gpu_blocks_override": 140,
            "max_model_len": 2048,
        },
        "cost": {"kind": "roofline", "step_overhead_s": STEP_OVERHEAD_S} | cost,
        "seed": 3,
    }


def run_config(**cost: Any) -> RunConfig:
    return parse_config(config(**cost))


def simulated() -> Results:
    return simulate(run_config())


def write_requests(results: Results, path: Path) -> None:
    """Write a run as a client would have measured it."""
    requests = observed_of(results).requests
    assert requests is not None
    assert requests.arrival_s is not None
    frame = pd.DataFrame(
        {
            "arrival_s": requests.arrival_s,
            "queued_s": requests.arrival_s,
            "first_token_s": requests.arrival_s + requests.ttft_s,
            "last_token_s": requests.arrival_s + requests.e2el_s,
            "prompt_tokens": requests.num_prompt_tokens,
            "output_tokens": requests.num_output_tokens,
            "cached_tokens": requests.num_cached_tokens,
            "preemptions": requests.num_preemptions,
        }
    )
    if requests.engine is not None:
        frame["engine"] = requests.engine
    frame.to_csv(path, index=False)


def write_series(results: Results, time_s: NDArray[np.float64], path: Path) -> None:
    series = series_of(results, time_s)
    assert series.kv_cache_usage is not None
    frame = pd.DataFrame(
        {
            "t": time_s,
            "running": series.num_running,
            "waiting": series.num_waiting,
            "kv_cache_pct": 100.0 * series.kv_cache_usage,
        }
    )
    frame.to_csv(path, index=False)
