"""Waits of clients beyond the engine: the way to the queue, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.config.front_end import FRONT_END_S
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.simulation.simulate import simulate
from sim.studies.validation.fit import parse_term
from sim.studies.validation.observed import MeasuredError, Observed, observed_of
from sim.studies.validation.run import validate
from tests.identity.compare import assert_equal_paths
from tests.sim.closed_loops import chat_config


def data(**more: Any) -> dict[str, Any]:
    traffic = {
        "num_requests": 30,
        "arrivals": {"kind": "poisson", "rate": 20.0},
        "prompt_tokens": {"kind": "fixed", "tokens": 100},
        "output_tokens": {"kind": "uniform", "low": 5, "high": 50},
    }
    engine = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"}
    return {"workload": {"synthetic": traffic}, "engine": engine} | more


def times(**more: Any) -> Any:
    return simulate(parse_config(data(**more))).requests


BOTH = {"client_to_queue_s": 0.02, "token_to_client_s": 0.01}


def test_both_ways_are_in_ttft_and_e2e_and_nothing_else_moves() -> None:
    plain, seen = times(), times(front_end=BOTH)
    for name in ("ttft_s", "e2el_s"):
        assert np.allclose(seen[name] - plain[name], 0.03, atol=1e-12)
    for name in ("tpot_s", "queue_s", "first_token_s", "finish_s"):
        assert (seen[name] == plain[name]).all()


def test_both_ways_are_in_runs_with_drafts() -> None:
    config = data()
    config["workload"]["acceptance"] = {"kind": "constant", "rate": 0.7}
    config["engine"]["speculative_config"] = {
        "method": "eagle",
        "num_speculative_tokens": 2,
    }
    plain = simulate(parse_config(config)).requests
    seen = simulate(parse_config(config | {"front_end": BOTH})).requests
    for name in ("ttft_s", "e2el_s"):
        assert np.allclose(seen[name] - plain[name], 0.03, atol=1e-12)
    assert (seen["finish_s"] == plain["finish_s"]).all()


def test_what_is_known_of_a_release_is_said() -> None:
    plain = simulate(parse_config(data()))
    assert plain.summary["front_end"]["source"].startswith("not looked at")
    assert "front_end" not in plain.config.to_data()
    for release, total_s in (("0.33", FRONT_END_S), ("0.14", FRONT_END_S), ("0.12", 0)):
        config = data(front_end={})
        config["engine"] |= {"engine_version": release}
        told = simulate(parse_config(config)).summary["front_end"]
        both_s = told["client_to_queue_s"] + told["token_to_client_s"]
        assert both_s == pytest.approx(total_s)
        assert ("one run" in told["source"]) is bool(total_s)
    told = simulate(parse_config(data(front_end=BOTH))).summary["front_end"]
    assert told == BOTH | {"source": "given"}
    with pytest.raises(ConfigError, match=r"front_end\.token_to_client_s"):
        parse_config(data(front_end={"token_to_client_s": -1.0}))


def test_a_user_waits_for_the_way_back_before_the_next_request() -> None:
    # scheduled ahead, the next request of a user waits for a step computed in vain
    alone = {
        "synthetic": data()["workload"]["synthetic"],
        "max_concurrent_users": 1,
        "output_end": "length",
    }
    plain, seen = times(workload=alone), times(workload=alone, front_end=BOTH)
    ends_s, later_s = plain["finish_s"].max(), seen["finish_s"].max()
    # 29 answers on their way back, and as many requests on theirs
    assert later_s - ends_s == pytest.approx(29 * 0.03, rel=0.05)


def test_the_first_request_of_a_user_waits_for_no_answer() -> None:
    users = {"synthetic": data()["workload"]["synthetic"], "max_concurrent_users": 8}
    plain, seen = times(workload=users), times(workload=users, front_end=BOTH)
    assert (seen["arrival_s"][:8] == plain["arrival_s"][:8]).all()


@pytest.mark.parametrize("generation", ["v1", "v0", "sglang"])
def test_of_users_who_ask_at_one_instant_the_first_begins_a_step_alone(
    generation: str,
) -> None:
    config = data()
    config["engine"]["scheduler"] = generation
    config["workload"] = {
        "synthetic": {
            "num_requests": 40,
            "arrivals": {"kind": "burst", "burst_size": 40, "interval_s": 9.0},
            "prompt_tokens": {"kind": "fixed", "tokens": 100},
            "output_tokens": {"kind": "fixed", "tokens": 20},
        },
        "max_concurrent_users": 4,
    }
    plain = simulate(parse_config(config)).requests
    assert set(plain.groupby("arrival_s").size()) == {4}
    no_time = {"front_end": dict.fromkeys(BOTH, 0.0)}
    seen = simulate(parse_config(config | no_time)).requests
    assert seen["arrival_s"].is_unique
    assert np.ptp(seen["arrival_s"][:4]) < 1e-12
    assert seen["first_token_s"][:4].nunique() == 2
    assert seen["queue_s"][0] == 0.0
    assert (seen["queue_s"][1:4] > 1e-3).all()
    # then its answer is a step ahead, but where steps of prompts hold up all others
    rounds = seen.groupby(np.arange(40) // 4)["first_token_s"].nunique()
    assert set(rounds[1:]) == ({1} if generation == "sglang" else {2})


@pytest.mark.parametrize("front_end", [{}, dict.fromkeys(BOTH, 0.0)])
def test_paths_agree_of_requests_one_by_one(front_end: dict[str, float]) -> None:
    config = chat_config("v1", front_end=front_end)
    del config["workload"]["sessions"]
    config["workload"] |= {"synthetic": data()["workload"]["synthetic"]}
    config["workload"]["max_concurrent_users"] = 7
    config["workload"]["synthetic"]["arrivals"] = {
        "kind": "burst",
        "burst_size": 30,
        "interval_s": 9.0,
    }
    assert_equal_paths(parse_config(config))


def measured_of(front_end: dict[str, float] | None) -> Observed:
    return observed_of(simulate(parse_config(data(front_end=front_end))))


def test_the_front_end_is_fitted_on_ttft() -> None:
    measured = measured_of(BOTH)
    config = parse_config(data(front_end={"token_to_client_s": 0.01}))
    found = validate(config, measured, [parse_term("front_end")], 0.9)
    assert found.fit is not None
    assert found.fit.values["front_end.client_to_queue_s"] == pytest.approx(
        0.02, rel=0.01
    )
    assert found.to_dict()["metrics"]["mean_ttft_ms"]["abs_error_pct"] < 0.1


def test_latencies_from_the_queue_on_leave_it_out() -> None:
    measured = replace(measured_of(None), begins_at_queue=True)
    report = validate(parse_config(data(front_end=BOTH)), measured).to_dict()
    assert report["metrics"]["mean_ttft_ms"]["error_pct"] == 0.0
    assert any("front_end is left out" in note for note in report["notes"])


def test_a_front_end_that_nothing_passed_is_not_fitted() -> None:
    measured = replace(measured_of(None), begins_at_queue=True)
    with pytest.raises(MeasuredError, match=r"--fit front_end: .*queued_s"):
        validate(parse_config(data()), measured, [parse_term("front_end")], 0.9)


def test_a_warm_up_is_left_out_by_its_number() -> None:
    measured = measured_of(None)
    requests = measured.requests
    assert requests is not None
    slow_s = requests.ttft_s.copy()
    slow_s[:3] += 1.0
    slow = replace(measured, requests=replace(requests, ttft_s=slow_s))
    config = parse_config(data())
    errors = [
        validate(config, slow, warm_up=num).to_dict()["metrics"]["mean_ttft_ms"]
        for num in (0, 3)
    ]
    assert errors[0]["error_pct"] < -50.0
    assert errors[1]["error_pct"] == 0.0
    with pytest.raises(MeasuredError, match="got 30 of 30"):
        validate(config, slow, warm_up=30)


def test_a_host_beyond_reason_is_refused_with_what_it_may_be() -> None:
    slow = data(cost={"kind": "roofline", "step_overhead_s": 0.0165})
    measured = observed_of(simulate(parse_config(slow)))
    with pytest.raises(MeasuredError, match=r"16\.5 ms a step.*link.*eager.*warm-up"):
        validate(parse_config(data()), measured, [parse_term("host")], 0.9)
