"""``/metrics`` beside the list of the release, and beside the results of the run."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.shared import ROOT
from tests.sim.serving.client import MODEL, Client

if TYPE_CHECKING:
    from collections.abc import Mapping

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

SGLANG_059 = """
gauge num_running_reqs num_used_tokens token_usage pending_prealloc_token_usage
gauge swa_token_usage mamba_usage decode_sum_seq_lens gen_throughput num_queue_reqs
gauge num_grammar_queue_reqs num_running_reqs_offline_batch cache_hit_rate
gauge max_total_num_tokens spec_accept_length spec_accept_rate num_retracted_reqs
gauge num_paused_reqs num_prefill_prealloc_queue_reqs num_prefill_inflight_queue_reqs
gauge num_decode_prealloc_queue_reqs num_decode_transfer_queue_reqs
gauge kv_transfer_speed_gb_s kv_transfer_latency_ms kv_transfer_bootstrap_ms
gauge kv_transfer_alloc_ms kv_transfer_total_mb utilization
gauge max_running_requests_under_SLO engine_startup_time engine_load_weights_time
gauge is_cuda_graph num_unique_running_routing_keys routing_key_running_req_count
gauge routing_key_all_req_count new_token_ratio cache_config_info
counter num_retracted_requests num_retracted_input_tokens num_retracted_output_tokens
counter num_bootstrap_failed_reqs num_transfer_failed_reqs num_prefill_retries
counter num_grammar_cache_hit num_grammar_aborted num_grammar_timeout num_grammar
counter cuda_graph_passes realtime_tokens gpu_execution_seconds
counter dp_cooperation_realtime_tokens dp_cooperation_gpu_execution_seconds
counter prefill_delayer_outcomes prompt_tokens generation_tokens cached_tokens
counter num_requests num_so_requests num_aborted_requests
histogram queue_time_seconds grammar_compilation_time_seconds grammar_schema_count
histogram grammar_ebnf_size grammar_tree_traversal_time_avg
histogram grammar_tree_traversal_time_max per_stage_req_latency_seconds
histogram prefill_delayer_wait_forward_passes prefill_delayer_wait_seconds
histogram time_to_first_token_seconds inter_token_latency_seconds
histogram e2e_request_latency_seconds num_retractions
"""
SGLANG_LABELS = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}


def listed(release: str, prefix: str) -> dict[str, str]:
    """Return the types of a release's metrics by their names."""
    found: dict[str, str] = {}
    for line in release.strip().splitlines():
        kind, *names = line.split()
        found |= {f"{prefix}:{name}": kind for name in names}
    return found


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
    expected = listed(RELEASE_033, "vllm")
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


def asked_in_turn(*settings: str) -> tuple[Mapping[str, Any], dict[str, Metric]]:
    """Return the summary of a small pool, and what was told of it."""
    client = Client("engine.num_gpu_blocks_override=200", *settings)
    try:
        for index in (0, 1, 2, 0, 1, 2):
            text = f"{index}" * 4800
            client.completion(prompt=text, max_tokens=20, ignore_eos=True)
        families = scraped(client)
    finally:
        client.end()
    (results,) = client.served_engine.results
    return results.summary, families


def test_hits_of_host_memory_are_told() -> None:
    told, families = asked_in_turn("engine.kv_offloading_size=4")
    assert told["external_prefix_cache_hits"] > 0
    for name in ("external_prefix_cache_queries", "external_prefix_cache_hits"):
        assert value(families[f"vllm:{name}"], "_total") == told[name], name
    by_source = families["vllm:prompt_tokens_by_source"]
    named = ("local_compute", "local_cache_hit", "external_kv_transfer")
    computed, local, outer = (value(by_source, "_total", source=name) for name in named)
    assert outer == told["external_prefix_cache_hits"]
    assert local == told["prefix_cache_hits"]
    # Of a prompt that is found whole, one token is computed again.
    assert 0 <= computed + local + outer - told["total_input_tokens"] <= 6


def test_drafts_are_told() -> None:
    told, families = asked_in_turn(
        "workload.acceptance={kind: constant, rate: 0.6}",
        "engine.speculative_config={method: eagle, num_speculative_tokens: 3}",
    )
    num_accepted = told["spec_decode_accepted_tokens"]
    assert num_accepted > 0
    for name, expected in (
        ("num_drafts", told["spec_decode_num_drafts"]),
        ("num_draft_tokens", told["spec_decode_draft_tokens"]),
        ("num_accepted_tokens", num_accepted),
    ):
        family = families[f"vllm:spec_decode_{name}"]
        assert value(family, "_total") == expected, name
    family = families["vllm:spec_decode_num_accepted_tokens_per_pos"]
    by_position = [
        value(family, "_total", position=str(position)) for position in range(3)
    ]
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == num_accepted


def test_sglang_has_its_own_names_and_tells_of_its_server() -> None:
    client = Client("engine.scheduler=sglang", "engine.enable_prefix_caching=null")
    try:
        client.completion(prompt="x" * 400, max_tokens=5, ignore_eos=True)
        families = scraped(client)
        status, text = client.ask("/get_server_info")
        load = client.ask("/get_load")[1]
    finally:
        client.end()
    assert status == 200
    assert b"max_total_num_tokens" in text
    types = {name: family.type for name, family in families.items()}
    assert types == listed(SGLANG_059, "sglang")
    assert set(families["sglang:num_running_reqs"].samples[0].labels) == SGLANG_LABELS
    assert set(families["sglang:prompt_tokens"].samples[0].labels) == {"model_name"}
    assert value(families["sglang:num_running_reqs"]) == 0
    assert value(families["sglang:prompt_tokens"], "_total") == 100
    assert value(families["sglang:generation_tokens"], "_total") == 5
    assert value(families["sglang:inter_token_latency_seconds"], "_count") == 4
    assert value(families["sglang:num_retractions"], "_sum") == 0
    (computed,) = (
        sample.value
        for sample in families["sglang:realtime_tokens"].samples
        if sample.name.endswith("_total") and sample.labels["mode"] == "prefill_compute"
    )
    assert computed == 100
    told = families["sglang:max_total_num_tokens"]
    assert value(told) == json.loads(text)["max_total_num_tokens"]
    assert json.loads(load) == [
        {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0}
        | {key: json.loads(load)[0][key] for key in ("num_tokens", "ts_tic")}
    ]
