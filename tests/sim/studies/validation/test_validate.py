"""A run measured by ourselves is predicted without an error; what differs shows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.results.tables.steps import spans_s
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.studies.validation import compare
from sim.studies.validation.fit import parse_term
from sim.studies.validation.inputs import inputs_of
from sim.studies.validation.observed import (
    MeasuredError,
    Observed,
    ObservedRequests,
    series_of,
    usage_over,
)
from sim.studies.validation.readers import read
from sim.studies.validation.readers.requests_csv import read_timeseries
from sim.studies.validation.run import validate
from tests.sim.studies.validation.runs import (
    STEP_OVERHEAD_S,
    config,
    run_config,
    simulated,
    write_requests,
    write_series,
)
from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from pathlib import Path

    from sim.config.tables import RunConfig
    from sim.results.run import Results


@pytest.fixture(scope="module")
def results() -> Results:
    return simulated()


@pytest.fixture
def measured(results: Results, tmp_path: Path) -> Observed:
    write_requests(results, tmp_path / "requests.csv")
    write_series(results, np.arange(0.5, 20.0, 0.5), tmp_path / "series.csv")
    return replace(
        read(tmp_path / "requests.csv"),
        series=read_timeseries(tmp_path / "series.csv"),
    )


def requests_of(*latencies_s: tuple[float, float]) -> ObservedRequests:
    ttft_s, e2el_s = np.array(latencies_s).T
    ones = np.ones(len(latencies_s), np.int64)
    return ObservedRequests(10 * ones, 3 * ones, ttft_s, e2el_s)


FLEET: dict[str, Any] = {
    "pools": [
        {"name": "main", "replicas": 2},
        {"name": "small", "replicas": 1, "engine": {"num_gpu_blocks_override": 130}},
    ],
    "router": {"kind": "least_requests"},
}


def test_a_fleet_of_our_own_is_predicted_without_error(tmp_path: Path) -> None:
    data = config() | {"fleet": FLEET}
    data["workload"]["synthetic"] |= {
        "num_requests": 90,
        "arrivals": {"kind": "poisson", "rate": 20.0},
    }
    fleet = simulate(parse_config(data))
    write_requests(fleet, tmp_path / "requests.csv")
    times_s = np.arange(0.25, 9.0, 0.25)
    write_series(fleet, times_s, tmp_path / "series.csv")
    measured = replace(
        read(tmp_path / "requests.csv"),
        series=read_timeseries(tmp_path / "series.csv"),
    )
    found = validate(parse_config(data), measured)
    report = found.to_dict()
    assert report["metrics"]["num_preemptions"]["measured"] > 0
    errors = {k: v["error_pct"] for k, v in report["metrics"].items()}
    assert {k: v for k, v in errors.items() if v} == {}
    assert max(each["mean_abs"] for each in report["curves"].values()) == 0
    # States are sums over engines, usage the mean: as the rows of requests say.
    requests, series = fleet.requests, measured.series
    assert series is not None
    inside = [
        ((requests["arrival_s"] <= t) & (t < requests["finish_s"])).sum()
        for t in times_s
    ]
    assert series.num_running is not None
    assert series.num_waiting is not None
    assert (series.num_running + series.num_waiting).tolist() == inside
    assert found.usage is not None
    assert found.usage["e2el"].max() > 0.9
    # More blocks are more in each pool.
    more = [each.num_gpu_blocks for each in found.sharpness.more_blocks]
    assert more == [147, 182]
    assert found.sharpness.is_sharp
    alone = {key: value for key, value in data.items() if key != "fleet"}
    with pytest.raises(MeasuredError, match="of 3 engines, the simulation of one"):
        validate(parse_config(alone), measured)


def test_a_run_of_our_own_is_predicted_without_error(measured: Observed) -> None:
    report = validate(run_config(), measured).to_dict()
    assert report["metrics"]["num_preemptions"]["measured"] > 0
    assert set(compare.METRICS) <= set(report["metrics"])
    errors = {
        k: v["error_pct"]
        for k, v in report["metrics"].items()
        if v["measured"] is not None
    }
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-6)
    assert {k.partition("_")[2] for k in set(report["metrics"]) - set(errors)} == {
        "itl_ms"  # a file of requests has no gaps between tokens, and that is said
    }
    assert report["metrics"]["p90_itl_ms"]["predicted"] > 0.0
    assert any("ITL was not measured" in note for note in report["notes"])
    assert {"mean_ttft_ms", "p99_tpot_ms", "p90_e2el_ms", "duration"} <= set(errors)
    for found in report["curves"].values():
        assert found["max_abs"] < 1e-9
        assert found["measured"] > 0.0
        assert found["error_pct"] == pytest.approx(0.0, abs=1e-6)
    assert set(report["curves"]) == {"num_running", "num_waiting", "kv_cache_usage"}
    assert report["by_kv_usage"][-1]["usage_from"] >= 0.8
    for name in ("ttft", "e2el"):
        found = [each[name]["n"] for each in report["by_kv_usage"] if name in each]
        assert sum(found) == 40


def test_another_overhead_shows_and_a_fit_on_the_first_part_finds_it(
    measured: Observed,
) -> None:
    wrong = run_config(step_overhead_s=0.001)
    before = validate(wrong, measured).to_dict()
    assert before["metrics"]["mean_tpot_ms"]["error_pct"] < -5.0
    told: list[tuple[float, int]] = []
    found = validate(
        wrong,
        measured,
        [parse_term("host")],
        0.6,
        on_progress=lambda *progress: told.append(progress),
    )
    assert told == sorted(told)
    assert told[0] == (0, 33)  # about 30 of the fit, then one and two with more blocks
    assert told[-1] == (33, 33)
    assert found.fit is not None
    assert found.fit.values["cost.step_overhead_s"] == pytest.approx(
        STEP_OVERHEAD_S, rel=0.02
    )
    assert found.fit.error_after_pct < 1.0 < found.fit.error_before_pct
    report = found.to_dict()
    assert abs(report["judged_metrics"]["mean_tpot_ms"]["error_pct"]) < 1.0
    assert report["judged_per_request"]["e2el"]["n"] == 40 - found.fit.num_requests


def test_the_rate_of_links_is_found_from_far_off(tmp_path: Path) -> None:
    def on_two(**cost: Any) -> RunConfig:
        data = config(**cost)
        data["engine"] |= {"gpu": "rtx_pro_6000", "tensor_parallel_size": 2}
        return parse_config(data)

    write_requests(
        Simulation(on_two(link_bytes_per_s=9e9)).run(), tmp_path / "requests.csv"
    )
    observed = read(tmp_path / "requests.csv")
    found = validate(on_two(), observed, [parse_term("links")], 0.6).fit
    assert found is not None
    assert found.values["cost.link_bytes_per_s"] == pytest.approx(9e9, rel=0.1)
    assert found.error_after_pct < 1.0 < found.error_before_pct
    assert not found.at_bound


@pytest.mark.slow
def test_what_ended_after_the_split_is_not_fitted_on(measured: Observed) -> None:
    assert measured.requests is not None
    wrong = run_config(step_overhead_s=0.001)
    terms = [parse_term("host")]
    whole = validate(wrong, measured, terms, 0.6).fit
    assert whole is not None
    assert measured.requests.arrival_s is not None
    ends_s = measured.requests.arrival_s + measured.requests.e2el_s
    late = ends_s > whole.split_s
    # all that came later, five times as slow: but for the last, which sets the split
    late[np.argmax(ends_s)] = False
    shrunk = measured.requests.ttft_s + 0.5 * (
        measured.requests.e2el_s - measured.requests.ttft_s
    )
    other = replace(
        measured.requests, e2el_s=np.where(late, shrunk, measured.requests.e2el_s)
    )
    still_late = late & (measured.requests.arrival_s + other.e2el_s > whole.split_s)
    other = replace(
        other, e2el_s=np.where(still_late, other.e2el_s, measured.requests.e2el_s)
    )
    assert still_late.any()
    again = validate(wrong, replace(measured, requests=other), terms, 0.6).fit
    assert again is not None
    assert again.values == whole.values


def test_too_small_a_part_is_refused(measured: Observed) -> None:
    with pytest.raises(MeasuredError, match="at least 10 requests that ended"):
        validate(run_config(), measured, [parse_term("host")], 0.05)


def test_arrivals_and_lengths_are_those_measured(measured: Observed) -> None:
    assert measured.requests is not None
    later = replace(
        measured.requests,
        arrival_s=np.flip(measured.requests.arrival_s + 5.0),  # type: ignore[operator]
        num_output_tokens=np.full(40, 7),
    )
    found = validate(run_config(), replace(measured, requests=later, series=None))
    ours = found.predicted.requests
    assert ours is not None
    np.testing.assert_array_equal(ours.arrival_s, later.arrival_s)
    np.testing.assert_array_equal(ours.num_prompt_tokens, later.num_prompt_tokens)
    assert (ours.num_output_tokens == 7).all()
    assert any("got the output length that was measured" in n for n in found.notes)


@pytest.mark.parametrize(("apart_s", "is_taken"), [(0.05, True), (0.5, False)])
def test_requests_that_overtook_others_are_matched_by_their_prompts(
    apart_s: float, *, is_taken: bool
) -> None:
    """A server records requests as they come, a client as they were sent."""
    sizes = [100, 200, 300, 300, 400]
    sent = [
        RequestSpec(number, number * apart_s, ((number, size),), 5, 99 + number)
        for number, size in enumerate(sizes)
    ]
    came = [sent[1], sent[0], *sent[2:]]
    recorded = [
        each._replace(request_id=place, arrival_s=place * apart_s)
        for place, each in enumerate(came)
    ]
    observed = ObservedRequests(
        num_prompt_tokens=np.array(sizes),
        num_output_tokens=np.full(len(sizes), 5),
        ttft_s=np.full(len(sizes), 0.1),
        e2el_s=np.full(len(sizes), 0.2),
        arrival_s=np.array([each.arrival_s for each in sent]),
    )
    if is_taken:
        found = inputs_of(recorded, observed)
        assert [each.num_prompt_tokens for each in found.specs] == sizes
        assert "1 requests came to the engine before one" in found.notes[-1]
    else:
        with pytest.raises(MeasuredError, match="in the same order"):
            inputs_of(recorded, observed)


def test_another_workload_is_refused(measured: Observed) -> None:
    requests = measured.requests
    assert requests is not None
    other = replace(requests, num_prompt_tokens=requests.num_prompt_tokens + 1)
    with pytest.raises(MeasuredError, match="request 1 has a prompt of"):
        validate(run_config(), replace(measured, requests=other))
    data = config()
    data["workload"]["synthetic"]["num_requests"] = 39

    with pytest.raises(MeasuredError, match="has 39 requests, the measurement 40"):
        validate(parse_config(data), measured)


def test_requests_that_were_not_served_are_left_out_on_both_sides(
    measured: Observed,
) -> None:
    requests = measured.requests
    assert requests is not None
    e2el_s = requests.e2el_s.copy()
    slowest = int(np.argmax(e2el_s))
    e2el_s[slowest] = np.nan
    some = replace(measured, requests=replace(requests, e2el_s=e2el_s))
    whole = float(requests.e2el_s.mean()) * 1e3
    for pair in ((some, measured), (measured, some)):
        found = compare.metrics(*pair)
        for key in ("mean_e2el_ms", "mean_tpot_ms"):
            assert found[key]["error_pct"] == pytest.approx(0.0, abs=1e-9)
        assert found["mean_e2el_ms"]["measured"] < whole
    assert compare.metrics(some, measured)["completed"]["error_pct"] == -2.5


def test_a_latency_that_one_side_lacks_is_left_out_on_both(measured: Observed) -> None:
    requests = measured.requests
    assert requests is not None
    ttft_s = requests.ttft_s.copy()
    ttft_s[np.argmax(ttft_s)] = np.nan
    some = replace(measured, requests=replace(requests, ttft_s=ttft_s))
    found = compare.metrics(measured, some)
    assert found["mean_ttft_ms"]["error_pct"] == pytest.approx(0.0, abs=1e-9)
    assert found["mean_e2el_ms"]["error_pct"] == pytest.approx(0.0, abs=1e-9)


def test_errors_by_literals() -> None:
    theirs = requests_of((1.0, 3.0), (2.0, 4.0), (1.0, 5.0))
    ours = requests_of((1.1, 3.0), (2.0, 5.0), (0.5, 5.0))
    found = compare.per_request(ours, theirs)
    assert found["ttft"] == pytest.approx(
        {
            "n": 3.0,
            "mean_abs_pct": 20.0,
            "p50_abs_pct": 10.0,
            "p90_abs_pct": 42.0,
            "bias_pct": 0.0,
        }
    )
    assert found["e2el"]["bias_pct"] == 0.0
    usage = {
        "ttft": np.array([0.1, 0.97, 1.0]),
        "e2el": np.array([0.6, 0.6, np.nan]),
    }
    bins = compare.by_pressure(ours, theirs, usage)
    assert [(b["usage_from"], b["n"]) for b in bins] == [(0.0, 1), (0.5, 2), (0.95, 2)]
    assert bins[0]["ttft"]["bias_pct"] == pytest.approx(10.0)
    assert [set(b) & {"ttft", "tpot", "e2el"} for b in bins] == [
        {"ttft"},
        {"e2el"},
        {"ttft"},
    ]
    assert bins[1]["e2el"]["bias_pct"] == pytest.approx(12.5)
    assert compare.compared(0.0, 0.0)["error_pct"] == 0.0
    assert compare.compared(3.0, 0.0)["error_pct"] is None
    assert compare.compared(3.0, 1e-320)["error_pct"] is None
    assert compare.compared(3.0, None)["error_pct"] is None
    assert compare.compared(3.0, 4.0) == {
        "predicted": 3.0,
        "measured": 4.0,
        "error_pct": -25.0,
        "abs_error_pct": 25.0,
    }


def test_states_between_two_steps(results: Results) -> None:
    frame = results.steps
    step = frame.iloc[len(frame) // 2]
    middle = step["start_s"] + step["latency_s"] / 2
    series = series_of(results, np.array([-1.0, middle, 1e6]))
    assert series.num_running is not None
    assert series.num_running.tolist() == [0.0, step["num_running"], 0.0]


def test_mean_usage_is_weighted_by_time(results: Results) -> None:
    frame = results.steps
    spans = spans_s(frame)
    last_s = float((frame["start_s"] + spans).max())
    usage = usage_over(results, np.array([0.0]), np.array([last_s]))
    expected = (frame["kv_cache_usage"] * spans).sum() / last_s
    assert expected == pytest.approx(results.summary["kv_cache_usage_mean"])
    assert usage[0] == pytest.approx(expected)
    one = frame.iloc[100]
    inside = usage_over(
        results,
        np.array([one["start_s"]]),
        np.array([one["start_s"] + spans[100]]),
    )
    assert inside[0] == pytest.approx(one["kv_cache_usage"])


def test_usage_is_that_of_the_series_while_a_latency_passed(
    measured: Observed,
) -> None:
    requests, series = measured.requests, measured.series
    assert requests is not None
    assert requests.arrival_s is not None
    assert series is not None
    ramp = replace(series, kv_cache_usage=series.time_s / 100.0)
    usage = validate(run_config(), replace(measured, series=ramp)).usage
    assert usage is not None
    begin_s, first_s = requests.arrival_s, requests.arrival_s + requests.ttft_s
    inside = (begin_s > series.time_s[0]) & (first_s < series.time_s[-1])
    assert inside.sum() > 20
    expected = (begin_s + first_s)[inside] / 200.0
    half_a_tick = 0.25 / 100.0
    np.testing.assert_allclose(usage["ttft"][inside], expected, atol=half_a_tick)
    early = first_s < series.time_s[0]  # over before the series begins: as it begins
    assert early.any()
    np.testing.assert_allclose(usage["ttft"][early], series.time_s[0] / 100.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "step_overhead_s",
            "--fit takes 'host', 'links', 'front_end' or cost.KEY=LOW:HIGH",
        ),
        ("engine.block_size=1:2", "--fit takes 'host'"),
        ("cost.step_overhead_s=2:1", "the range 2:1 is empty"),
        ("cost.step_overhead_s=0:nan", "is empty"),
    ],
)
def test_terms_that_cannot_be_fitted(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--fit") as caught:
        parse_term(text)
    assert message in str(caught.value)


def arguments(tmp_path: Path, results: Results, *more: str) -> list[str]:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config()))
    write_requests(results, tmp_path / "requests.csv")
    write_series(results, np.arange(0.5, 20.0, 0.5), tmp_path / "series.csv")
    return [
        *("validate", str(tmp_path / "config.yaml")),
        *("--measured", str(tmp_path / "requests.csv")),
        *("--out", str(tmp_path / "out"), *more),
    ]


@pytest.mark.slow
def test_the_command_writes_a_report_and_its_figures(
    tmp_path: Path, results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    series = ["--timeseries", str(tmp_path / "series.csv")]
    fit = ["--fit", "host", "--fit-on", "0.6"]
    assert kvsim(arguments(tmp_path, results, *series, *fit)) == 0
    text = capsys.readouterr().out
    assert "mean ttft ms" in text
    assert "fitted: cost.step_overhead_s = 0.00" in text
    assert "curves apart on average: running 0.0" in text
    out = tmp_path / "out"
    names = {path.name for path in out.rglob("*") if path.is_file()}
    assert names == {
        *("config.yaml", "validation.json", "requests.csv"),
        *("states.png", "latencies.png", "per_request.png", "errors_by_kv_usage.png"),
        "block_counts.png",
    }
    report = json.loads((out / "validation.json").read_text())
    found: dict[str, Any] = report["metrics"]["mean_ttft_ms"]
    assert set(found) == {"predicted", "measured", "error_pct", "abs_error_pct"}
    fitted = yaml.safe_load((out / "config.yaml").read_text())["cost"]
    assert fitted["step_overhead_s"] == report["fit"]["values"]["cost.step_overhead_s"]


def test_a_measurement_with_its_header_renamed_is_a_workload(
    tmp_path: Path, results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(tmp_path, results, "--json", "--no-figures")
    header, _, rows = (tmp_path / "requests.csv").read_text().partition("\n")
    for ours, theirs in (
        ("arrival_s", "arrived_at"),
        ("prompt_tokens", "num_prefill_tokens"),
        ("output_tokens", "num_decode_tokens"),
    ):
        header = header.replace(ours, theirs)
    (tmp_path / "workload.csv").write_text(f"{header}\n{rows}")
    trace = {"kind": "vidur", "path": str(tmp_path / "workload.csv")}
    data = config() | {"workload": {"trace": trace}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
    assert kvsim(command) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]["mean_e2el_ms"]
    assert found["error_pct"] == pytest.approx(0.0, abs=1e-6)


def test_measured_arrivals_take_the_place_of_users(measured: Observed) -> None:
    data = config()
    data["workload"]["max_concurrent_users"] = 2
    found = validate(parse_config(data), measured).to_dict()
    assert found["metrics"]["mean_e2el_ms"]["error_pct"] == pytest.approx(0.0, abs=1e-6)


def test_what_only_one_side_served_or_cut_is_noted(measured: Observed) -> None:
    data = config()
    data["engine"]["max_model_len"] = 512
    notes = " ".join(validate(parse_config(data), measured).notes)
    assert "that the engine served are not served in the simulation" in notes
    requests = measured.requests
    assert requests is not None
    e2el_s = requests.e2el_s.copy()
    e2el_s[3] = np.nan
    some = replace(measured, requests=replace(requests, e2el_s=e2el_s), series=None)
    notes = " ".join(validate(run_config(), some).notes)
    assert "1 requests were not served by the engine" in notes
    longer = replace(requests, num_output_tokens=requests.num_output_tokens + 2000)
    notes = " ".join(validate(run_config(), replace(measured, requests=longer)).notes)
    assert "max_model_len 2,048 cut them" in notes


def test_the_command_prints_json_and_repeats_itself(
    tmp_path: Path, results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(tmp_path, results, "--json", "--no-figures")
    assert kvsim(command) == 0
    first = capsys.readouterr().out
    assert json.loads(first)["fit"] is None
    assert kvsim([*command, "--overwrite"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fit-on", "1.5"], "fit_on is a share of the run's time"),
        (["--fit", "ghost"], "--fit takes 'host'"),
        (["--fit", "cost.overhead=0:1"], "overhead"),
        (["--set", "workload.synthetic.num_requests=7"], "7 requests, the measurement"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    tmp_path: Path,
    results: Results,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert kvsim(arguments(tmp_path, results, *more)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_latency_that_is_hardly_one_is_not_compared(measured: Observed) -> None:
    """The fuzzer of inputs found 1e-320 s, of which every error is an infinity."""
    times_s = measured.requests.ttft_s.copy()
    times_s[0] = 1e-320
    odd = replace(measured.requests, ttft_s=times_s)
    errors = compare.relative_errors(measured.requests, odd, "ttft")
    assert np.isnan(errors[0])
    assert (errors[1:] == 0.0).all()
