"""Clients that give up: what they withdraw, and what they send again."""

from __future__ import annotations

from typing import Any

import pytest

from sim.config.tables import parse_config
from sim.engine.patience import TIMED_OUT, Patience
from sim.errors import ConfigError
from sim.scheduler.generations import OURS
from sim.simulation.run import Simulation
from tests.sim.closed_loops import chat_config

WAITS = {"timeout_s": 5.5, "max_retries": 2, "retry_delay_s": 1.0}
"""With steps of a second: five steps, and what the sixth gives still counts."""


def crowd(generation: str = "v1", **workload: Any) -> dict[str, Any]:
    """Return one engine that runs one of three equal requests at a time."""
    synthetic = {
        "num_requests": 3,
        "arrivals": {"kind": "burst", "burst_size": 3, "interval_s": 1.0},
        "prompt_tokens": {"kind": "fixed", "tokens": 32},
        "output_tokens": {"kind": "fixed", "tokens": 4},
    }
    data = chat_config(generation, workload=workload)
    del data["workload"]["sessions"]
    data["workload"]["synthetic"] = synthetic
    data["engine"] |= {"max_num_seqs": 1, "num_gpu_blocks_override": 50}
    data["cost"] = {"kind": "constant", "step_s": 1.0}
    return data


@pytest.mark.parametrize("generation", OURS)
def test_what_is_not_answered_in_time_is_aborted_and_sent_again(
    generation: str,
) -> None:
    simulation = Simulation(parse_config(crowd(generation, client=WAITS)))
    results = simulation.run(check_every=1)
    rows = results.requests
    # The first takes four steps; of the next, four after that, it misses the time.
    assert results.summary["completed"] == 3
    assert rows["parent_id"].tolist()[:3] == [0, 1, 2]
    timed_out = rows[rows["status"] == "finished_aborted"]
    assert set(timed_out["reason"]) == {TIMED_OUT}
    clients = results.summary["clients"]
    assert clients["num_timeouts"] == len(timed_out) == results.summary["aborted"] > 0
    assert clients["num_retried"] == len(rows) - 3
    assert clients["num_given_up"] == 0
    assert results.summary["num_requests"] == len(rows)
    assert results.summary["unsent"] == 0
    assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0


def test_a_client_that_never_waits_long_enough_gives_up() -> None:
    waits = {"timeout_s": 2.5, "max_retries": 1}
    summary = Simulation(parse_config(crowd(client=waits))).run().summary
    assert summary["completed"] == 0
    assert summary["clients"]["num_given_up"] == 3
    assert summary["clients"]["num_timeouts"] == summary["aborted"] == 6


def test_long_patience_changes_no_row() -> None:
    waits = {"timeout_s": 1e6}
    with_it, without = (
        Simulation(parse_config(data)).run().requests
        for data in (crowd(client=waits), crowd())
    )
    assert with_it.equals(without)


@pytest.mark.parametrize("change", [{"data_parallel_size": 2}, {"best_of": 2}])
def test_ranks_and_samples(change: dict[str, Any]) -> None:
    data = crowd(client=WAITS)
    place = "engine" if "data_parallel_size" in change else "workload"
    data[place] |= change
    summary = Simulation(parse_config(data)).run(check_every=1).summary
    assert summary["completed"] + summary["aborted"] == summary["num_requests"]
    assert summary["clients"]["num_timeouts"] > 0


def test_a_session_ends_where_a_turn_was_given_up() -> None:
    data = chat_config(workload={"client": {"timeout_s": 0.5}})
    data["cost"] = {"kind": "constant", "step_s": 1.0}
    summary = Simulation(parse_config(data)).run().summary
    assert summary["completed"] == 0
    assert summary["clients"]["num_given_up"] == summary["aborted"] > 0
    assert summary["unsent"] > 0


def test_delays_double_up_to_eight_seconds() -> None:
    patience = Patience(60.0, 9, 0.5)
    delays = [patience.delay_s(tries) for tries in range(1, 8)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert Patience(60.0, 1, 30.0).delay_s(5) == 30.0


def test_a_timeout_is_above_zero() -> None:
    with pytest.raises(ConfigError, match=r"client\.timeout_s"):
        parse_config(crowd(client={"timeout_s": 0}))
