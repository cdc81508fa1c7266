"""The clock against queueing theory."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sim.costs.constant import ConstantCost
from sim.costs.linear import LinearCost
from tests.sim.build import Run, spec

NUM_REPLICATIONS = 24
NUM_REQUESTS = 3000
NUM_WARM_UP = 500


def mean_wait_s(utilisation: float, seed: int) -> float:
    """Mean wait behind a server that takes one request a step of one second."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / utilisation, NUM_REQUESTS))
    specs = [spec(i, float(t), 8, 1) for i, t in enumerate(arrivals_s)]
    run = Run(specs, ConstantCost(step_s=1.0), max_num_seqs=1, check=False)
    queue_s = run.go().requests["queue_s"].to_numpy()
    return float(queue_s[NUM_WARM_UP:].mean())


@pytest.mark.parametrize(
    "utilisation",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (0.3, 0.6)), 0.8],
)
def test_a_batch_of_one_is_an_md1_queue(utilisation: float) -> None:
    """Pollaczek-Khinchine for constant service: W = rho / (2 (1 - rho)) services."""
    waits = [mean_wait_s(utilisation, seed) for seed in range(NUM_REPLICATIONS)]
    expected = utilisation / (2 * (1 - utilisation))
    low, high = stats.t.interval(
        0.99, len(waits) - 1, loc=np.mean(waits), scale=stats.sem(waits)
    )
    assert low <= expected <= high
    # The interval must be able to fail: it is narrow against the value itself.
    assert high - low < 0.35 * expected


def test_littles_law_over_a_whole_run() -> None:
    """L = lambda W, with L from counts over time and W from time stamps."""
    rng = np.random.default_rng(7)
    arrivals_s = np.cumsum(rng.exponential(0.05, 800))
    specs = [
        spec(i, float(t), int(rng.integers(1, 300)), int(rng.integers(1, 60)))
        for i, t in enumerate(arrivals_s)
    ]
    run = Run(specs, ConstantCost(step_s=0.02), num_gpu_blocks=120, max_model_len=1900)
    recording = run.go()
    assert len(recording.preemptions) > 50  # also under pressure
    requests = recording.requests
    duration_s = run.env.now
    mean_in_system = recording.occupancy_s / duration_s
    rate = len(requests) / duration_s
    mean_sojourn_s = (requests["finish_s"] - requests["arrival_s"]).mean()
    assert mean_in_system == pytest.approx(rate * mean_sojourn_s, rel=1e-9)


def test_time_in_other_units_gives_the_same_schedule() -> None:
    """Twice as slow an engine under half the rate does the same things."""
    rng = np.random.default_rng(11)
    arrivals_s = np.cumsum(rng.exponential(0.1, 300))
    shapes = [(int(rng.integers(1, 300)), int(rng.integers(1, 60))) for _ in arrivals_s]
    recordings = []
    for factor in (1.0, 2.0):  # a power of two keeps floats exact
        specs = [
            spec(i, float(t) * factor, *shapes[i]) for i, t in enumerate(arrivals_s)
        ]
        cost = LinearCost(
            base_s=0.01 * factor,
            prefill_token_s=1e-4 * factor,
            decode_s=1e-3 * factor,
        )
        run = Run(specs, cost, num_gpu_blocks=100, max_model_len=1500, check=False)
        recordings.append(run.go())
    slow, fast = recordings[1], recordings[0]
    assert len(fast.preemptions) > 10
    assert (slow.steps["start_s"] == 2 * fast.steps["start_s"]).all()
    assert (slow.requests["ttft_s"] == 2 * fast.requests["ttft_s"]).all()
    same = ["num_running", "num_waiting", "num_physical_blocks", "num_preempted"]
    assert slow.steps[same].equals(fast.steps[same])


@pytest.mark.parametrize("num_gpu_blocks", [60, 90, 140, 3000])
def test_hits_never_fall_as_the_cache_grows_and_an_endless_one_never_evicts(
    num_gpu_blocks: int,
) -> None:
    """A fixed string of prompts served one by one: LRU keeps the stack property."""
    hits = []
    for size in (num_gpu_blocks, num_gpu_blocks + 40):
        rng = np.random.default_rng(3)
        specs = []
        for i in range(300):
            shared = int(rng.zipf(1.5)) % 25
            prompt = ((2 * shared, 128), (2 * (1000 + i), 40))
            specs.append(spec(i, float(i), 0, 1, prompt=prompt))
        run = Run(
            specs,
            ConstantCost(step_s=0.25),
            num_gpu_blocks=size,
            max_model_len=800,
            enable_prefix_caching=True,
            check=False,
        )
        run.go()
        hits.append(run.scheduler.prefix_cache_stats.hits)
        if size >= 3000:
            assert run.scheduler.tables.num_evictions == 0
    assert 0 < hits[0] <= hits[1]
