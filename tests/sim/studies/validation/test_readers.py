from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.studies.validation.compare import metrics
from sim.studies.validation.observed import MeasuredError, Observed
from sim.studies.validation.readers import read
from sim.studies.validation.readers.requests_csv import read_timeseries

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "arrival_s,queued_s,first_token_s,last_token_s,prompt_tokens,output_tokens\n"
SCRAPE = """\
# HELP vllm:num_preemptions_total Cumulative number of preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} 1000.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} 250.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="stop"} 3.0
vllm:request_success_total{finished_reason="length"} 5.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 4.0
vllm:time_to_first_token_seconds_bucket{le="0.2"} 8.0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 8.0
vllm:time_to_first_token_seconds_count 8.0
vllm:time_to_first_token_seconds_sum 0.96
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "measured"
    path.write_text(text)
    return path


def test_requests_are_timed_from_the_queue(tmp_path: Path) -> None:
    text = HEADER + "1.0,1.5,2.0,6.0,100,5\n2.0,2.0,2.5,2.5,30,1\n3.0,3.0,,,40,0\n"
    requests = read(write(tmp_path, text)).requests
    assert requests is not None
    assert requests.arrival_s is not None
    assert requests.arrival_s.tolist() == [1.5, 2.0, 3.0]
    assert requests.num_prompt_tokens.tolist() == [100, 30, 40]
    np.testing.assert_array_equal(requests.ttft_s, [0.5, 0.5, np.nan])
    np.testing.assert_array_equal(requests.e2el_s, [4.5, 0.5, np.nan])
    np.testing.assert_array_equal(requests.tpot_s, [1.0, np.nan, np.nan])
    assert requests.num_preemptions is None


def test_without_a_queue_arrivals_count(tmp_path: Path) -> None:
    text = (
        "arrival_s,first_token_s,last_token_s,prompt_tokens,output_tokens,preemptions"
    )
    requests = read(write(tmp_path, f"{text}\n1,2,3,10,4,2\n")).requests
    assert requests is not None
    assert requests.ttft_s.tolist() == [1.0]
    assert requests.num_preemptions is not None
    assert requests.num_preemptions.tolist() == [2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "column 'arrival_s' is missing; it has a, b"),
        (HEADER, "has a header and no row"),
        (HEADER + "1,1,2\n", "row 1 has 3 cells, the header has 6"),
        (HEADER + "1,1,2,3,4,x\n", "output_tokens of row 1 must be a number >= 0"),
        (HEADER + "1,1,2,3,4.5,4\n", "prompt_tokens of row 1 must be a whole number"),
        (HEADER + "1,1,2,3,1e300,4\n", "must be a whole number up to 2"),
        (HEADER + "1,1,0.5,3,4,4\n", "first_token_s of row 1 is 0.5 s, before"),
        (HEADER + "1,1,2,1.5,4,4\n", "last_token_s of row 1 is 1.5 s, before"),
        (HEADER + "1,,2,3,4,4\n", "row 1 has no arrival"),
        (HEADER + "1,inf,2,3,4,4\n", "queued_s of row 1 must be a number >= 0"),
        (HEADER + "1,1,2,3,4,0\n", "output_tokens of row 1 must be 1 or more"),
        (HEADER + "1,1,,,4,\n", "no request was served"),
        (HEADER + "1,1,,0.5,4,3\n", "last_token_s of row 1 is 0.5 s, before"),
        (HEADER + "1,2026-04-25T18:47:18Z,2,3,4,4\n", "give seconds on any clock"),
        (HEADER + "1,1,-1,-1,4,4\n", "leave it empty if the request failed"),
        ("index," + HEADER + "0,1,1,2,3,4,4\n0,1,1,2,3,4,4\n", "same number twice"),
        ("queued_s," + HEADER + "1,1,1,2,3,4,4\n", "two columns are called 'queued_s'"),
        (SCRAPE + 'vllm:num_preemptions_total{engine="1"} 2\n', "of 2 engines (0, 1)"),
        ("hello\n", "is no file of measurements that is known"),
        ('{"ttfts": []}', "it has no 'completed'"),
        ("vllm:nothing 1\n", "has none of vLLM's counters"),
        ('{"completed": 1, "ttfts": [', "is cut off or no JSON"),
        ("[1, 2]", "is no result of 'vllm bench serve'"),
        (SCRAPE.replace("0.96", "NaN"), "must be a number >= 0; got nan"),
        (SCRAPE.replace(" 7.0", " +Inf"), "must be a number >= 0; got inf"),
        ('vllm:x{le="} 1 2 3 4\n', "is no Prometheus text"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(MeasuredError, match="measured") as caught:
        read(write(tmp_path, text))
    assert message in str(caught.value)


def test_rows_are_put_in_the_order_of_their_index(tmp_path: Path) -> None:
    rows = "2,9,9,10,11,30,3\n0,1,1,2,3,10,1\n1,5,5,6,7,20,2\n"
    requests = read(write(tmp_path, f"index,{HEADER}{rows}")).requests
    assert requests is not None
    assert requests.num_prompt_tokens.tolist() == [10, 20, 30]
    assert requests.num_output_tokens.tolist() == [1, 2, 3]
    assert requests.arrival_s is not None
    assert requests.arrival_s.tolist() == [1.0, 5.0, 9.0]


def test_a_failed_request_needs_no_numbers(tmp_path: Path) -> None:
    text = HEADER + "1,1,,,10,\n2,2,3,4,20,5\n"
    requests = read(write(tmp_path, text)).requests
    assert requests is not None
    assert requests.num_output_tokens.tolist() == [0, 5]
    np.testing.assert_array_equal(requests.e2el_s, [np.nan, 2.0])


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "measured"
    text = HEADER.replace("queued_s,", "") + "1,2,6,100,5\n"
    path.write_text("\ufeff" + text, encoding="utf-8")
    requests = read(path).requests
    assert requests is not None
    assert requests.ttft_s.tolist() == [1.0]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasuredError, match="cannot be read: No such file"):
        read(tmp_path / "nothing.csv")


def test_a_detailed_bench_result(tmp_path: Path) -> None:
    data = {
        "completed": 2,
        "duration": 4.0,
        "mean_ttft_ms": 150.0,
        "median_ttft_ms": 140.0,
        "input_lens": [10, 20, 30],
        "output_lens": [3, 1, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.01, 0.03], [], []],
        "start_times": [100.0, 101.0, 102.0],
    }
    measured = read(write(tmp_path, json.dumps(data)))
    requests = measured.requests
    assert requests is not None
    assert requests.arrival_s is not None
    assert requests.arrival_s.tolist() == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(requests.e2el_s, [0.14, 0.2, np.nan])
    assert measured.itl_s is not None
    assert measured.itl_s.tolist() == [0.01, 0.03]
    assert measured.numbers["p50_ttft_ms"] == 140.0
    assert "client" in measured.notes[0]


def test_a_bench_result_of_totals(tmp_path: Path) -> None:
    measured = read(write(tmp_path, '{"completed": 5, "p99_tpot_ms": 9.5}'))
    assert measured.requests is None
    assert measured.numbers == {"completed": 5.0, "p99_tpot_ms": 9.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttfts": 5}, "ttfts must be a list"),
        ({"ttfts": [10**400]}, "ttfts of row 1 must be a number"),
        ({"itls": [[10**400]]}, "itls of request 1 must be seconds"),
        ({"ttfts": [0.0], "itls": [[]]}, "no request was served"),
        ({"ttfts": [None]}, "no request was served"),
        ({"start_times": [None]}, "start_times must be seconds"),
        ({"start_times": [1.0, 2.0]}, "lists differ in length"),
        ({"itls": [[None]]}, "itls of request 1 must be seconds"),
        ({"itls": [[float("nan")]]}, "itls of request 1 must be seconds"),
        (
            {"ttfts": [], "itls": [], "input_lens": [], "output_lens": []},
            "ttfts is empty",
        ),
    ],
)
def test_a_broken_bench_result_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    data: dict[str, object] = {
        "completed": 1,
        "input_lens": [1],
        "output_lens": [2],
        "ttfts": [0.1],
        "itls": [[0.1]],
    }
    read(write(tmp_path, json.dumps(data)))
    with pytest.raises(MeasuredError, match=message):
        read(write(tmp_path, json.dumps(data | changes)))


def test_totals_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    text = (
        '{"completed": 4, "mean_ttft_ms": NaN, "duration": Infinity, "p99_ttft_ms": 2}'
    )
    assert read(write(tmp_path, text)).numbers == {"completed": 4.0, "p99_ttft_ms": 2.0}


def test_lists_of_different_length_are_refused(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "completed": 1,
            "input_lens": [1],
            "output_lens": [1, 2],
            "ttfts": [0.1],
            "itls": [[]],
        }
    )
    with pytest.raises(MeasuredError, match="lists differ in length"):
        read(write(tmp_path, text))


def test_a_scrape_gives_means_exactly_and_percentiles_in_their_bucket(
    tmp_path: Path,
) -> None:
    measured = read(write(tmp_path, SCRAPE))
    assert measured.numbers == pytest.approx(
        {
            "num_preemptions": 7.0,
            "prefix_cache_queries": 1000.0,
            "prefix_cache_hits": 250.0,
            "completed": 8.0,
            "mean_ttft_ms": 120.0,
            "p50_ttft_ms": 100.0,
            "p90_ttft_ms": 180.0,
            "p95_ttft_ms": 190.0,
            "p99_ttft_ms": 198.0,
        }
    )
    assert "buckets up to 100%" in measured.notes[1]


def test_a_percentile_is_known_to_its_bucket_and_no_better(tmp_path: Path) -> None:
    """One that was predicted in it may be right."""
    measured = read(write(tmp_path, SCRAPE))
    assert measured.bounds["p50_ttft_ms"] == pytest.approx((0.0, 100.0))
    for predicted, beyond in ((150.0, 0.0), (101.0, 0.0), (90.0, -10.0), (236.0, 36.0)):
        simulated = Observed("simulation", numbers={"p99_ttft_ms": predicted})
        told = metrics(simulated, measured)["p99_ttft_ms"]
        assert told["error_pct"] == pytest.approx(100.0 * beyond / 198.0)
    # a mean is known exactly
    told = metrics(Observed("simulation", numbers={"mean_ttft_ms": 150.0}), measured)
    assert told["mean_ttft_ms"]["error_pct"] == pytest.approx(25.0)


def test_a_state_that_nobody_recorded_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "t,running,kv_cache_pct\n1,4,0\n2,5,\n")
    series = read_timeseries(path)
    assert series.num_running is not None
    assert series.num_running.tolist() == [4.0, 5.0]
    assert series.num_waiting is None
    assert series.kv_cache_usage is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t,running\n2,1\n1,1\n", "t must ascend"),
        ("running\n1\n", "column 't' is missing"),
        ("t,kv_cache_pct\n1,150\n", "percentage up to 100; got 150"),
        ("t,load\n1,150\n", "no column running, waiting or kv_cache_pct"),
        ("t,running\n18:47:18,1\n", "give seconds on any clock"),
    ],
)
def test_a_broken_series_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MeasuredError, match=message):
        read_timeseries(write(tmp_path, text))
