"""Fixed users who think: the clock against the laws of closed systems.

Denning and Buzen, "The Operational Analysis of Queueing Network Models", Computing
Surveys 10 (1978): laws that hold by counting, whatever the distributions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.costs.constant import ConstantCost
from sim.costs.linear import LinearCost
from tests.sim.build import Run, spec

if TYPE_CHECKING:
    import pandas as pd

    from workloads.spec import RequestSpec

THINK_S = 4.0


def population(
    num_requests: int, outputs: Any, seed: int, *, max_prompt_tokens: int = 1
) -> list[RequestSpec]:
    """Requests that are all there at time 0; whoever takes one thinks before it."""
    rng = np.random.default_rng(seed)
    thoughts_s = rng.exponential(THINK_S, num_requests)
    prompts = rng.integers(1, max_prompt_tokens + 1, num_requests)
    return [
        spec(i, 0.0, int(prompts[i]), int(outputs(rng)), delay_s=float(thoughts_s[i]))
        for i in range(num_requests)
    ]


def under_pressure(num_users: int) -> tuple[list[RequestSpec], pd.DataFrame]:
    specs = population(
        2500, lambda rng: rng.integers(1, 60), seed=5, max_prompt_tokens=300
    )
    cost = LinearCost(base_s=0.01, decode_s=1e-3, prefill_token_s=1e-4)
    run = Run(
        specs,
        cost,
        max_concurrent_users=num_users,
        num_gpu_blocks=85,
        max_model_len=1300,
        check=False,
    )
    recording = run.go()
    assert len(recording.preemptions) > 50
    return specs, recording.requests


def test_users_are_conserved() -> None:
    """Each end frees one user, who sends the next request a think time later."""
    specs, requests = under_pressure(60)
    # Sent in another order than taken up: who thinks longer sends later.
    assert not requests["parent_id"].is_monotonic_increasing
    arrivals_s = requests.sort_values("parent_id")["arrival_s"].to_numpy()
    ends_s = np.sort(requests["finish_s"])
    delays_s = np.array([request.delay_s for request in specs])
    assert (arrivals_s[:60] == 0).all()
    assert (arrivals_s[60:] == ends_s[:-60] + delays_s[60:]).all()


def test_interactive_response_time_law() -> None:
    """Users = throughput x (response + think), between warm-up and the last request."""
    num_users = 60
    specs, requests = under_pressure(num_users)
    ordered = requests.sort_values("finish_s")
    inner = ordered.iloc[200:-200]
    duration_s = inner["finish_s"].iloc[-1] - ordered["finish_s"].iloc[199]
    throughput = len(inner) / duration_s
    response_s = inner["e2el_s"].mean()
    think_s = np.mean([specs[parent].delay_s for parent in inner["parent_id"]])
    assert response_s > 0.2 * think_s  # both matter
    assert throughput * (response_s + think_s) == pytest.approx(num_users, rel=0.02)


@pytest.mark.parametrize(("num_users", "service_s"), [(2, 3.0), (4, 1.5)])
def test_one_server_and_exponential_times_are_the_machine_repairman(
    num_users: int, service_s: float
) -> None:
    """M/M/1//N: throughput by the balance equations of a birth and death chain."""
    mean_tokens = 25  # geometric, close to exponential
    specs = population(4000, lambda rng: rng.geometric(1 / mean_tokens), seed=8)
    cost = ConstantCost(step_s=service_s / mean_tokens)
    run = Run(specs, cost, max_concurrent_users=num_users, max_num_seqs=1, check=False)
    ends_s = np.sort(run.go().requests["finish_s"])
    throughput = (len(ends_s) - 300) / (ends_s[-1] - ends_s[299])
    load = service_s / THINK_S
    weights = [math.perm(num_users, n) * load**n for n in range(num_users + 1)]
    expected = (1 - weights[0] / sum(weights)) / service_s
    assert throughput == pytest.approx(expected, rel=0.04)
    # Far from what there would be without a queue, and from a server always busy.
    assert expected < 0.92 * num_users / (service_s + THINK_S)
    assert expected < 0.9 / service_s


def test_without_a_queue_each_user_is_alone() -> None:
    """Room for all and steps of one length: a user's cycle is its own tokens."""
    num_users, num_requests = 8, 600
    specs = population(num_requests, lambda rng: rng.integers(1, 40), seed=3)
    cost = ConstantCost(step_s=0.125)
    run = Run(specs, cost, max_concurrent_users=num_users, check=False)
    requests = run.go().requests.set_index("parent_id")
    for request in specs:
        row = requests.loc[request.request_id]
        tokens_s = 0.125 * request.num_output_tokens
        # Whoever comes while a step is under way waits for its end.
        assert 0 <= row["e2el_s"] - tokens_s < 0.125 + 1e-9
