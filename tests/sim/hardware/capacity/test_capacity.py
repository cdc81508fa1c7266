from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import CapacityError, ConfigError
from sim.hardware.capacity import CapacityEstimate, estimate_capacity, format_capacity
from sim.hardware.capacity.constants import ERAS, era_of
from sim.hardware.gpus import GIB, load_gpu
from sim.hardware.models.bundled import load_model

LLAMA = "meta-llama/Llama-3.1-8B"


def estimate(
    model: str = LLAMA, gpu: str = "h100_sxm", **more: Any
) -> CapacityEstimate:
    return estimate_capacity(model, gpu, **({"engine_version": "0.19"} | more))


def test_the_parts_add_up() -> None:
    for result in (estimate(), estimate(engine_version="0.33", gpu="h200_sxm")):
        held = result.weights_bytes + result.activation_peak_bytes
        other = result.non_torch_bytes + result.cuda_graph_bytes
        assert result.requested_bytes == held + other + result.available_kv_bytes
        assert result.num_gpu_blocks == result.available_kv_bytes // result.block_bytes
        low, high = result.num_gpu_blocks_low, result.num_gpu_blocks_high
        assert low < result.num_gpu_blocks < high


@given(
    name=st.sampled_from([LLAMA, "Qwen/Qwen3-14B", "google/gemma-2-9b"]),
    utilization=st.floats(0.7, 1.0),
    block_size=st.sampled_from([8, 16, 32, 128]),
)
def test_fp8_kv_doubles_the_tokens(
    name: str, utilization: float, block_size: int
) -> None:
    plain, fp8 = (
        estimate(
            name,
            gpu_memory_utilization=utilization,
            block_size=block_size,
            kv_cache_dtype=dtype,
        )
        for dtype in ("auto", "fp8")
    )
    assert plain.block_bytes == 2 * fp8.block_bytes
    assert fp8.num_gpu_blocks - 2 * plain.num_gpu_blocks in {0, 1}


@given(st.floats(0.5, 1.0), st.floats(0.5, 1.0))
def test_more_utilization_never_gives_fewer_blocks(one: float, other: float) -> None:
    less, more = sorted((one, other))
    blocks = [
        estimate(gpu_memory_utilization=share).num_gpu_blocks for share in (less, more)
    ]
    assert blocks == sorted(blocks)


def test_tensor_parallelism_halves_a_block_down_to_one_kv_head() -> None:
    sizes = [
        estimate("Qwen/Qwen2.5-14B", tensor_parallel_size=tp).block_bytes
        for tp in (1, 2, 4, 8, 40)
    ]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4, sizes[0] // 8, sizes[4]]
    assert sizes[4] == sizes[3]


def test_the_v1_pool_does_not_depend_on_max_model_len() -> None:
    blocks = {estimate(max_model_len=n).num_gpu_blocks for n in (1024, 8192, 131072)}
    assert len(blocks) == 1


def test_v0_profiles_its_longest_prompt() -> None:
    short, long = (
        estimate(gpu="a100_sxm", engine_version="0.6.4", max_model_len=n)
        for n in (4096, 32768)
    )
    assert short.num_gpu_blocks > long.num_gpu_blocks
    assert (short.max_num_batched_tokens, long.max_num_batched_tokens) == (4096, 32768)
    assert short.num_cpu_blocks == 2048  # 4 GiB of 2 MiB
    assert any("V0" in reason for reason in short.extrapolated)


@pytest.mark.parametrize(
    ("gpu", "version", "tokens", "seqs"),
    [
        ("h100_sxm", "0.11", 8192, 1024),
        ("h200_sxm", "0.33", 8192, 1024),
        ("a100_sxm", "0.33", 2048, 256),
        ("l40s", "0.19", 2048, 256),
        ("b200_sxm", "0.33", 16384, 1024),
        ("b200_sxm", "0.19", 8192, 1024),
    ],
)
def test_defaults_of_the_release(
    gpu: str, version: str, tokens: int, seqs: int
) -> None:
    result = estimate(gpu=gpu, engine_version=version)
    assert (result.max_num_batched_tokens, result.max_num_seqs) == (tokens, seqs)
    assert result.defaults[:3] == (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
    later = {"engine_version"} if version == "0.33" else set()
    standing = {"gpu_memory_utilization", "block_size", "kv_cache_dtype"}
    assert set(result.defaults[3:]) == standing | later
    assert estimate(max_num_batched_tokens=64).max_num_seqs == 64


def test_an_engine_takes_more_of_its_gpu_from_0_20_on() -> None:
    for version, share in (
        *(("0.1.0", 0.9), ("0.2.7", 0.9), ("0.7.3", 0.9), ("5.17", 0.9)),
        *(("0.19", 0.9), ("0.20", 0.92), ("0.33", 0.92)),
    ):
        found = estimate(engine_version=version)
        assert found.gpu_memory_utilization == share
        assert "gpu_memory_utilization" in found.defaults
        assert f"utilization={share}" in format_capacity(found)
        assert replace(found, plan=None) == replace(
            estimate(engine_version=version, gpu_memory_utilization=share), plan=None
        )
        for other in {0.9, 0.92, 0.95} - {share}:
            stated = estimate(engine_version=version, gpu_memory_utilization=other)
            assert stated.gpu_memory_utilization == other
            assert "gpu_memory_utilization" not in stated.defaults
            less = stated.num_gpu_blocks < found.num_gpu_blocks
            assert less == (other < share)


def test_eras_are_in_order() -> None:
    releases = [era.first for era in ERAS]
    assert releases == sorted(releases)
    assert era_of(6, 4) is not era_of(6)  # 0.6 is its last, 0.6.6
    assert era_of(6, 5) is era_of(6)


def test_cuda_graphs_are_subtracted_since_0_20() -> None:
    assert estimate(engine_version="0.19").cuda_graph_bytes == 0
    assert estimate(engine_version="0.20").cuda_graph_bytes > 0
    assert estimate(engine_version="0.20", enforce_eager=True).cuda_graph_bytes == 0
    # the second model runner of these takes graphs for nothing, and has no experts
    assert estimate(engine_version="0.25").cuda_graph_bytes == 0
    assert estimate(engine_version="0.28").cuda_graph_bytes == 0
    assert estimate(engine_version="0.29").cuda_graph_bytes > 0
    experts = {"model": "Qwen/Qwen3-30B-A3B", "engine_version": "0.26"}
    assert estimate(**experts).cuda_graph_bytes > 0


def test_inside_the_data_nothing_is_extrapolated() -> None:
    assert estimate().extrapolated == ()
    spread = estimate().num_gpu_blocks_high - estimate().num_gpu_blocks_low
    assert spread / estimate().num_gpu_blocks < 0.01


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"gpu": "a100_sxm"}, "measured on H100"),
        ({"gpu": "rtx_4090"}, "consumer"),
        ({"engine_version": "0.33"}, "newer than 0.19"),
        ({"engine_version": "0.33"}, "CUDA graphs"),
        ({"engine_version": "0.9"}, "older than 0.11"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size 8"),
        ({"enforce_eager": True}, "enforce_eager"),
        ({"quantization": "w4a16"}, "packed layouts"),
        ({"max_num_batched_tokens": 16384}, "measured with 8192 and 1024 only"),
        ({"max_num_seqs": 256}, "max_num_batched_tokens 8192, max_num_seqs 256: mea"),
        ({"gpu": "l40s"}, "max_num_batched_tokens 2048, max_num_seqs 256: measured"),
        ({"model": "google/gemma-3-12b-it"}, "multimodal"),
        ({"engine_version": "0.17", "tensor_parallel_size": 4}, "not measured in thi"),
        ({"engine_version": "0.15", "tensor_parallel_size": 4}, "not measured in thi"),
        (
            {
                "gpu": "a100_sxm",
                "engine_version": "0.6.4",
                "max_model_len": 8192,
                "tensor_parallel_size": 2,
            },
            "tensor_parallel_size 2: not measured",
        ),
        ({"gpu": "a100_sxm", "quantization": "fp8"}, "no FP8 units: weight-only"),
    ],
)
def test_outside_the_data_the_interval_says_why(
    more: dict[str, Any], reason: str
) -> None:
    result = estimate(**more)
    assert any(reason in said for said in result.extrapolated)
    assert reason in format_capacity(result)


def test_a_measured_size_of_the_release_is_no_reason() -> None:
    for version, tp in (("0.11", 2), ("0.18", 4), ("0.33", 2)):
        result = estimate(engine_version=version, tensor_parallel_size=tp)
        assert not any("tensor_parallel" in said for said in result.extrapolated)


def test_another_batch_widens_the_interval() -> None:
    def width(**more: Any) -> int:
        result = estimate(**more)
        return result.num_gpu_blocks_high - result.num_gpu_blocks_low

    assert width(max_num_seqs=256) > 4 * width()
    assert width(max_num_seqs=1024, max_num_batched_tokens=8192) == width()


def test_a_gpu_without_fp8_copies_no_quantised_input() -> None:
    h100 = load_gpu("h100_sxm")
    name = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"  # its MLP is the peak
    with_units, without = (
        estimate_capacity(
            load_model(name), gpu, engine_version="0.19", quantization="fp8"
        )
        for gpu in (h100, replace(h100, fp8_flops_per_s=None))
    )
    assert with_units.activation_peak_bytes > without.activation_peak_bytes
    int8 = estimate_capacity(
        load_model(name),
        replace(h100, fp8_flops_per_s=None),
        engine_version="0.19",
        quantization="w8a8",
    )
    assert int8.activation_peak_bytes == with_units.activation_peak_bytes


def test_v0_with_images_is_refused_unless_the_pool_is_given() -> None:
    arguments = {"model": "google/gemma-3-12b-it", "engine_version": "0.6.6"}
    with pytest.raises(CapacityError, match="as many images as fit, which is not mod"):
        estimate(**arguments)
    assert estimate(**arguments, num_gpu_blocks_override=500).num_gpu_blocks == 500


def test_an_override_is_no_part_of_the_sum() -> None:
    result = estimate(gpu="rtx_4090", num_gpu_blocks_override=10_000)
    text = format_capacity(result)
    assert "= left                 5.05 GiB  not used: num_gpu_blocks_override" in text
    assert "KV cache              19.53 GiB  by num_gpu_blocks_override" in text
    assert "interval" not in text
    assert "warning: the pool needs 19.53 GiB beside 16.11 GiB of the engine's" in text
    assert estimate(num_gpu_blocks_override=100).warnings == ()
    told = estimate(kv_cache_memory_bytes=90 * GIB).warnings
    assert "would run out of memory" in told[0]


def test_override_and_kv_cache_memory_win() -> None:
    result = estimate(num_gpu_blocks_override=100, kv_cache_memory_bytes=GIB)
    assert (result.num_gpu_blocks, result.num_gpu_blocks_low) == (100, 100)
    assert result.pool_source == "num_gpu_blocks_override"
    assert result.max_model_len == 99 * 16  # the null block holds no tokens
    assert result.extrapolated == ()
    result = estimate(kv_cache_memory_bytes=GIB)
    assert (result.num_gpu_blocks, result.pool_source) == (512, "kv_cache_memory_bytes")


def test_max_model_len_is_the_models_or_the_pools() -> None:
    assert estimate().max_model_len == 131072
    small = estimate(gpu="rtx_4090")
    assert small.max_model_len == (small.num_gpu_blocks - 1) * 16
    assert small.max_concurrency >= 1


def test_weights_given_in_gib() -> None:
    assert estimate(weights_gib=14.0).weights_bytes == 14 * GIB
    own = replace(load_model(LLAMA), quantization="my-own-scheme")
    odd = estimate_capacity(own, "h100_sxm", weights_gib=4.5)
    assert odd.quantization == "my-own-scheme"
    with pytest.raises(CapacityError, match="unknown quantization: 'gibberish'"):
        estimate(weights_gib=4.5, quantization="gibberish")


def test_prediction_of_a_real_engine_to_the_block() -> None:
    result = estimate(LLAMA, gpu_memory_utilization=0.95)
    assert result.num_gpu_blocks == 29_751  # vLLM 0.19 on an H100


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"block_size": 0}, "block_size must be a positive integer; got 0"),
        ({"block_size": 16.0}, "block_size must be a positive integer"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a positive"),
        ({"tensor_parallel_size": 3}, "must divide the 32 attention heads"),
        ({"gpu_memory_utilization": 0}, r"must be a number in \(0, 1\]; got 0"),
        ({"gpu_memory_utilization": 1.01}, r"must be a number in \(0, 1\]"),
        ({"gpu_memory_utilization": float("nan")}, r"in \(0, 1\]; got nan"),
        ({"gpu_memory_utilization": True}, r"in \(0, 1\]; got True"),
        ({"weights_gib": float("inf")}, r"weights_gib must be a number in \(0"),
        ({"weights_gib": 1e308}, r"weights_gib must be a number in \(0, 1e\+06\]"),
        ({"num_gpu_blocks_override": 10**29}, "num_gpu_blocks_override must be at mo"),
        ({"kv_cache_memory_bytes": 10**400}, "kv_cache_memory_bytes must be at most"),
        ({"max_num_seqs": 10**5000}, "max_num_seqs must be at most .* bits; lower it"),
        ({"swap_space": 1e300}, "swap_space must be a number in"),
        ({"swap_space": -0.5}, "swap_space must be a number in"),
        ({"num_gpu_blocks_override": 1}, "must hold two blocks at least .* give 2"),
        ({"engine_version": "0.34"}, "must be at most 0.33, .* known; got '0.34'"),
        ({"engine_version": "0." + "9" * 30}, "must be at most 0.33"),
        ({"block_size": 10**6}, "a larger GPU, a smaller block_size or"),
        ({"max_num_batched_tokens": 2**20}, "less than 1048576 for max_num_batched_to"),
        ({"pipeline_parallel_size": 33}, "at most the 32 layers of .*; got 33"),
        (
            {"pipeline_parallel_size": 2, "engine_version": "0.7.3"},
            "pipelines are modelled for releases from 0.8 on",
        ),
        ({"max_num_seqs": -1}, "max_num_seqs must be a positive integer"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 65}, "at least max_num_seqs"),
        ({"max_model_len": 10**6}, r"max_model_len must fit .* lower it to \d+"),
        ({"engine_version": "1.0"}, "engine_version must be a vLLM release"),
        ({"engine_version": "new"}, "engine_version must be a vLLM release"),
        ({"kv_cache_dtype": "int4"}, "unknown kv_cache_dtype"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"quantization": "gguf"}, "unknown quantization"),
        ({"kv_cache_memory_bytes": 1000}, "must hold two blocks"),
        ({"model": "Qwen/Qwen2.5-72B"}, "no room|weights must fit"),
        ({"gpu_memory_utilization": 0.2}, "no room .* less than 1024 for max_num_seqs"),
        ({"model": "Qwen/Qwen2.5-7B", "tensor_parallel_size": 7}, "4 KV heads"),
        (
            {
                "model": "ibm-granite/granite-4.0-h-small",
                "disable_hybrid_kv_cache_manager": True,
            },
            "the hybrid manager can be off only where",
        ),
        (
            {"model": "ibm-granite/granite-4.0-h-tiny", "engine_version": "0.9"},
            "share a pool with attention since 0.10; .* use 0.10 or later",
        ),
        (
            {"model": "nvidia/Nemotron-H-8B-Base-8K", "num_speculative_tokens": -1},
            "num_speculative_tokens must be a positive integer",
        ),
    ],
)
def test_mistakes_are_answered_in_one_line(more: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message) as caught:
        estimate(**more)
    assert "\n" not in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="unknown model"):
        estimate("nobody/nothing")
    with pytest.raises(ConfigError, match="unknown gpu"):
        estimate(gpu="tpu")


def test_text_and_json_tell_the_same() -> None:
    result = estimate(gpu_memory_utilization=0.95)
    text = format_capacity(result)
    assert "= KV cache            58.11 GiB  what is left" in text
    assert "block_size=16, kv_cache_dtype=bfloat16" in text
    assert "num_gpu_blocks: 29,751" in text
    assert "at their defaults: max_model_len=131072" in text
    told = json.loads(json.dumps(result.to_dict()))
    assert told["num_gpu_blocks"] == 29_751
    assert told["defaults"][0] == "max_model_len"


def test_importing_is_cheap() -> None:
    code = (
        "import sys, sim.hardware.capacity;"
        "print([m for m in ('pandas', 'scipy', 'numpy', 'simpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
