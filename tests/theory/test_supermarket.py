"""Routers before 500 servers: tails of queues as the supermarket model has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from tests.sim.config.test_config import minimal

if TYPE_CHECKING:
    import numpy.typing as npt

NUM_ENGINES, LOAD, STEP_S, MEAN_TOKENS = 500, 0.7, 0.025, 40
WARM_S, UNTIL_S, NUM_BATCHES = 25.0, 75.0, 10


def tails(kind: str) -> npt.NDArray[np.float64]:
    """Return by batch of time the shares of servers that have k requests or more.

    Services are a step a token, of exponentially many tokens: one second in the mean.
    """
    data = minimal(
        max_num_seqs=1,
        num_gpu_blocks_override=200,
        max_model_len=1024,
        async_scheduling=False,
    )
    data["workload"]["synthetic"] |= {
        "num_requests": int(NUM_ENGINES * LOAD * UNTIL_S),
        "arrivals": {"kind": "poisson", "rate": NUM_ENGINES * LOAD},
        "prompt_tokens": {"kind": "fixed", "tokens": 8},
        "output_tokens": {"kind": "exponential", "mean": MEAN_TOKENS, "max": 900},
    }
    data["cost"] = {"kind": "constant", "step_s": STEP_S}
    data["fleet"] = {
        "pools": [{"name": "main", "replicas": NUM_ENGINES}],
        "router": {"kind": kind},
    }
    requests = Simulation(parse_config(data)).run().requests
    times_s = np.arange(WARM_S, UNTIL_S - 2.0, 0.5)
    engine = requests["engine"].to_numpy()
    came_s, went_s = (requests[c].to_numpy() for c in ("arrival_s", "finish_s"))
    shares = np.empty((len(times_s), 5))
    for row, time_s in enumerate(times_s):
        is_there = (came_s <= time_s) & (time_s < went_s)
        queues = np.bincount(engine[is_there], minlength=NUM_ENGINES)
        shares[row] = [(queues >= k).mean() for k in range(1, 6)]
    parts = np.array_split(shares, NUM_BATCHES)
    return np.array([part.mean(axis=0) for part in parts])


def assert_within(found: npt.NDArray[np.float64], expected: list[float]) -> None:
    """Compare means with theory, within four standard errors of batch means."""
    errors = found.std(axis=0, ddof=1) / np.sqrt(len(found))
    for k, value in enumerate(expected):
        # Tokens are whole and servers are 500, not infinitely many: 0.01.
        assert abs(found[:, k].mean() - value) <= 4.0 * errors[k] + 0.01, k + 1


@pytest.mark.slow
def test_two_choices_have_the_tails_of_the_supermarket_model() -> None:
    """Of queues of k or more: the load to the power of 2 ** k - 1."""
    found = tails("power_of_two")
    assert_within(found, [LOAD ** (2**k - 1) for k in range(1, 6)])
    assert found[:, 3].mean() < LOAD**4 / 10  # far below those of one choice


@pytest.mark.slow
def test_the_shortest_of_500_queues_is_empty() -> None:
    """With as many choices as servers hardly anybody waits."""
    assert_within(tails("least_requests"), [LOAD, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.slow
def test_a_random_split_is_500_independent_queues() -> None:
    """M/M/1: the load to the power of k."""
    assert_within(tails("random"), [LOAD**k for k in range(1, 6)])
