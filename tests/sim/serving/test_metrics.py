"""``/metrics`` beside the list of the release, and beside the results of the run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.shared import ROOT
from tests.sim.serving.client import MODEL, Client

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

RELEASE_033 = """
gauge num_requests_running num_requests_waiting num_requests_waiting_by_reason
gauge engine_sleep_state kv_cache_usage_perc cache_config_info
counter estimated_flops_per_gpu estimated_read_bytes_per_gpu
counter estimated_write_bytes_per_gpu mm_cache_queries mm_cache_hits
counter prefix_cache_queries prefix_cache_hits external_prefix_cache_queries
counter external_prefix_cache_hits num_preemptions prompt_tokens
counter prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source
counter generation_tokens request_success admission_rejections
histogram request_prompt_tokens request_generation_tokens iteration_tokens_total
histogram request_max_num_generation_tokens request_params_n request_params_max_tokens
histogram time_to_first_token_seconds inter_token_latency_seconds
histogram request_time_per_output_token_seconds e2e_request_latency_seconds
histogram request_queue_time_seconds request_inference_time_seconds
histogram request_prefill_time_seconds request_decode_time_seconds
histogram request_num_preemptions request_prefill_kv_computed_tokens
"""


def scraped(client: Client) -> dict[str, Metric]:
    status, text = client.ask("/metrics")
    assert status == 200
    families = text_string_to_metric_families(text.decode())
    return {each.name: each for each in families if "_created" not in each.name}


def value(family: Metric, ending: str = "", **labels: Any) -> float:
    (found,) = (
        sample.value
        for sample in family.samples
        if sample.name == family.name + ending
        and labels.items() <= sample.labels.items()
    )
    return found


def test_names_types_and_labels_are_those_of_the_release() -> None:
    expected: dict[str, str] = {}
    for line in RELEASE_033.strip().splitlines():
        kind, *names = line.split()
        expected |= {f"vllm:{name}": kind for name in names}
    client = Client()
    try:
        families = scraped(client)
    finally:
        client.end()
    assert {name: family.type for name, family in families.items()} == expected
    for family in families.values():
        for sample in family.samples:
            if family.name == "vllm:admission_rejections":
                assert sample.labels["model_name"] == MODEL
            else:
                assert sample.labels["engine"] == "0"


def test_counts_are_those_of_the_results() -> None:
    client = Client("workload.max_tokens=9")
    try:
        for prompt in ("x" * 4000, "x" * 4000, "y" * 99):
            client.completion(prompt=prompt, max_tokens=5, ignore_eos=True, n=1)
        client.completion(prompt="short")
        families = scraped(client)
    finally:
        client.end()
    (results,) = client.served_engine.results
    told = results.summary
    for name, ending, expected in (
        ("prompt_tokens", "_total", told["total_input_tokens"]),
        ("generation_tokens", "_total", told["total_output_tokens"]),
        ("prefix_cache_queries", "_total", told["prefix_cache_queries"]),
        ("prefix_cache_hits", "_total", told["prefix_cache_hits"]),
        ("num_preemptions", "_total", 0),
        ("num_requests_running", "", 0),
        ("num_requests_waiting", "", 0),
        ("time_to_first_token_seconds", "_count", 4),
        ("time_to_first_token_seconds", "_sum", results.requests["ttft_s"].sum()),
        ("e2e_request_latency_seconds", "_sum", results.requests["e2el_s"].sum()),
        ("request_queue_time_seconds", "_sum", results.requests["queue_s"].sum()),
        ("request_params_max_tokens", "_count", 3),
        ("inter_token_latency_seconds", "_count", told["total_output_tokens"] - 4),
    ):
        family = families[f"vllm:{name}"]
        assert value(family, ending) == pytest.approx(expected), name
    success = families["vllm:request_success"]
    assert value(success, "_total", finished_reason="length") == 3
    assert value(success, "_total", finished_reason="stop") == 1
    assert told["prefix_cache_hits"] > 900
    info = families["vllm:cache_config_info"].samples[0].labels
    assert info["num_gpu_blocks"] == str(told["num_gpu_blocks"])
    dashboard = (ROOT / "examples/serving/grafana.json").read_text()
    shown = set(re.findall(r"vllm:\w+", dashboard))
    known = {sample.name for each in families.values() for sample in each.samples}
    assert len(shown) > 9
    assert shown <= known


def test_sglang_has_its_own_names_and_tells_of_its_server() -> None:
    client = Client("engine.scheduler=sglang", "engine.enable_prefix_caching=null")
    try:
        client.completion(prompt="x" * 400, max_tokens=5, ignore_eos=True)
        families = scraped(client)
        status, text = client.ask("/get_server_info")
    finally:
        client.end()
    assert status == 200
    assert b"max_total_num_tokens" in text
    assert value(families["sglang:num_running_reqs"]) == 0
    assert value(families["sglang:prompt_tokens"], "_total") == 100
    assert value(families["sglang:generation_tokens"], "_total") == 5
    assert value(families["sglang:inter_token_latency_seconds"], "_count") == 4
    assert all(name.startswith("sglang:") for name in families)
