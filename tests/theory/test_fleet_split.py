"""Random routing of Poisson arrivals: independent queues, each as theory has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    import numpy as np

NUM_ENGINES, RATE, SERVICE_S = 4, 3.2, 0.8


def mean_waits(kind: str, num_requests: int = 6000) -> np.ndarray[Any, Any]:
    """Return the mean wait of each engine that serves one request of 0.8 s at a time.

    A request is one prefill of one step, whose output is one token.
    """
    data = minimal(
        max_num_seqs=1,
        num_gpu_blocks_override=100,
        max_model_len=512,
        async_scheduling=False,
    )
    data["workload"]["synthetic"] |= {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": RATE},
        "prompt_tokens": {"kind": "fixed", "tokens": 8},
        "output_tokens": {"kind": "fixed", "tokens": 1},
    }
    data["cost"] = {"kind": "constant", "step_s": SERVICE_S}
    data["fleet"] = {
        "pools": [{"name": "main", "replicas": NUM_ENGINES}],
        "router": {"kind": kind},
    }
    requests = Simulation(parse_config(data)).run().requests
    means = requests.groupby("engine")["queue_s"].mean()
    assert len(means) == NUM_ENGINES
    return means.to_numpy()


@pytest.mark.slow
def test_a_random_split_is_independent_queues() -> None:
    """M/D/1: rho s / (2 (1 - rho)) = 0.711 s at rho 0.64."""
    rho = RATE / NUM_ENGINES * SERVICE_S
    expected_s = rho * SERVICE_S / (2.0 * (1.0 - rho))
    waits_s = mean_waits("random")
    # The standard error of such a mean over 1,500 requests is some 6 %.
    assert abs(waits_s.mean() / expected_s - 1.0) < 0.12
    assert (abs(waits_s / expected_s - 1.0) < 0.25).all()


def test_whoever_looks_at_queues_waits_less() -> None:
    """Random, two choices, all of them: each wait is a fraction of the one before."""
    random, two, least = (
        mean_waits(kind, 1500).mean()
        for kind in ("random", "power_of_two", "least_requests")
    )
    assert least < two < 0.5 * random
