from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.errors import CapacityError, ConfigError
from sim.hardware.gpus import GIB
from sim.hardware.models import bundled
from sim.hardware.models.architecture import dtype_bytes
from sim.hardware.models.bundled import (
    bundled_models,
    load_model,
    model_from_config,
    resolved_model,
)
from sim.hardware.models.kv_layers import KVCacheOptions, kv_cache_layers
from sim.hardware.models.layers import LayerKind
from sim.hardware.models.quantization import quantization_scheme
from sim.hardware.models.weights import (
    MIB,
    TensorRole,
    allocated_bytes,
    count_active_parameters,
    count_parameters,
    weight_bytes,
    weight_tensors,
)

CONFIGS = Path(bundled.__file__).parent / "configs"


def facts_of(name: str) -> dict[str, Any]:
    """Return the bundled facts of a model, without its encoder."""
    facts = json.loads((CONFIGS / f"{name.replace('/', '--')}.json").read_text())
    return {k: v for k, v in facts.items() if k != "num_multimodal_parameters"}


# Totals of the published safetensors indices (encoders included).
PUBLISHED_PARAMETERS = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-4-Scout-17B-16E": 108_641_793_536,
    "codellama/CodeLlama-7b-hf": 6_738_546_688,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mistral-Small-3.1-24B-Base-2503": 24_011_361_280,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "microsoft/phi-4": 14_659_507_200,
    "moonshotai/Kimi-Dev-72B": 72_706_203_648,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-12b-pt": 12_187_325_040,
    "google/gemma-3-27b-pt": 27_432_406_640,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "google/gemma-3-1b-pt": 999_885_952,
    "google/gemma-3-4b-pt": 4_300_079_472,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-4-Maverick-17B-128E": 401_583_781_376,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "mistralai/Mistral-Large-Instruct-2411": 122_610_069_504,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "codellama/CodeLlama-13b-hf": 13_016_028_160,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "01-ai/Yi-6B": 6_061_035_520,
    "01-ai/Yi-1.5-9B": 8_829_407_232,
    "01-ai/Yi-34B": 34_388_917_248,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-128k-instruct": 13_960_238_080,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "microsoft/phi-2": 2_779_683_840,
    "google/gemma-3-270m": 268_098_176,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen/Qwen2-VL-72B-Instruct": 73_405_560_320,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    # Less the draft layer in the file: 635,311,424 and the same embeddings again with
    # what joins them; one layer of full attention and what joins its two inputs.
    "zai-org/GLM-4.7-Flash": 31_221_488_576 - 635_311_424 - 642_783_232,
    "Qwen/Qwen3.5-4B": 4_659_865_088 - 120_599_552,
    "Qwen/Qwen3.5-9B": 9_653_104_368 - 243_290_624,
    # Of the totals that follow, those of gemma-2-27b, OLMo-2-7B, glm-4-9b, Seed-OSS,
    # SmolLM3, granite-3.3 and internlm2.5 were found in public code, no others.
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "zai-org/glm-4-9b-chat-hf": 9_399_951_360,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "zai-org/GLM-4-32B-0414": 32_566_081_536,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "tiiuae/Falcon3-7B-Base": 7_455_550_464,
    "tiiuae/Falcon3-10B-Base": 10_305_653_760,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "ibm-granite/granite-3.1-2b-instruct": 2_533_531_648,
    "ibm-granite/granite-3.1-8b-instruct": 8_170_848_256,
    "ibm-granite/granite-3.3-8b-instruct": 8_170_864_640,
    "deepseek-ai/deepseek-coder-6.7b-instruct": 6_740_512_768,
    "deepseek-ai/deepseek-coder-33b-instruct": 33_342_991_360,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
    "internlm/internlm2_5-7b-chat": 7_737_708_544,
    "Qwen/Qwen1.5-7B": 7_721_324_544,
    "mistralai/Codestral-22B-v0.1": 22_247_282_688,
}

# Billions in all, and those that a token meets, as announced; a draft head and, for
# some, the embedding left out, as the announcement does.
ANNOUNCED_BILLIONS = {
    "deepseek-ai/DeepSeek-V3": (671, 37),
    "deepseek-ai/DeepSeek-V3.2": (671, 37),
    # 25.2 and 30.7, and the encoder of 0.55
    "google/gemma-4-26B-A4B": (25.8, 3.8),
    "google/gemma-4-31B": (31.3, 30.7),
    "ibm-granite/granite-4.0-h-micro": (3.19, 3.19),
    "ibm-granite/granite-4.0-h-small": (32.2, 9),
    "ibm-granite/granite-4.0-h-tiny": (6.94, 1.5),
    "MiniMaxAI/MiniMax-M2": (229, 10),
    # 13.5 and an encoder of 0.4
    "mistralai/Ministral-3-14B-Base-2512": (13.9, 13.5),
    "mistralai/Mistral-Large-3-675B-Instruct-2512": (673, 39),
    "mistralai/Mistral-Medium-3.5-128B": (128, 128),
    "moonshotai/Kimi-K2-Instruct": (1026, 32),
    "moonshotai/Kimi-K2.5": (1026, 32),
    "nvidia/Nemotron-H-8B-Base-8K": (8.1, 7.6),
    "nvidia/Nemotron-H-56B-Base-8K": (56, 55),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.2),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (120.6, 12.2),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (80, 3.5),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (31.1, 3),
    "Qwen/Qwen3-VL-32B-Instruct": (33.4, 32),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (235.7, 22),
    "Qwen/Qwen3.5-27B": (27.4, 26),
    "Qwen/Qwen3.5-35B-A3B": (35, 3),
    "Qwen/Qwen3.5-122B-A10B": (122.6, 9.4),
    "Qwen/Qwen3.5-397B-A17B": (397, 17),
    "XiaomiMiMo/MiMo-V2-Flash": (309, 15),
    "zai-org/GLM-4.5": (355, 32),
    "zai-org/GLM-4.5-Air": (106, 12.5),
    "zai-org/GLM-5": (744, 40),
    "codellama/CodeLlama-70b-hf": (69, 69),
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_parameters_equal_the_published_count(name: str, published: int) -> None:
    assert count_parameters(load_model(name)) == published


QWEN_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "image_size": 896,
}
# What config.json says of encoders, and the published total of the checkpoint.
ENCODERS = {
    "Qwen2.5-VL-7B": (
        QWEN_TEXT
        | {
            "model_type": "qwen2_5_vl",
            "vision_config": {"hidden_size": 1280, "depth": 32},
        },
        8_292_166_656,
    ),
    "Qwen2-VL-7B": (
        QWEN_TEXT
        | {
            "model_type": "qwen2_vl",
            "vision_config": {"embed_dim": 1280, "depth": 32, "mlp_ratio": 4},
        },
        8_291_375_616,
    ),
    "Qwen3-VL-8B": (
        {
            "model_type": "qwen3_vl",
            "text_config": facts_of("Qwen/Qwen3-8B") | {"model_type": "qwen3_vl_text"},
            "vision_config": {"hidden_size": 1152, "depth": 27, "patch_size": 16},
        },
        8_767_123_696,
    ),
    "Qwen3.5-9B": (
        {
            "model_type": "qwen3_5",
            "text_config": facts_of("Qwen/Qwen3.5-9B"),
            "vision_config": {"hidden_size": 1152, "depth": 27, "patch_size": 16},
        },
        9_653_104_368 - 243_290_624,
    ),
    "gemma-3-27b": (
        facts_of("google/gemma-3-27b-pt") | {"vision_config": SIGLIP},
        27_432_406_640,
    ),
    "Mistral-Small-3.1-24B": (
        {
            "model_type": "mistral3",
            "text_config": facts_of("mistralai/Mistral-Small-24B-Base-2501"),
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
        24_011_361_280,
    ),
    "llava-1.5-7b": (
        {
            "model_type": "llava",
            "text_config": facts_of("meta-llama/Llama-2-7b-hf") | {"vocab_size": 32064},
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "image_size": 336,
            },
        },
        7_063_427_072,
    ),
}


@pytest.mark.parametrize(("config", "published"), ENCODERS.values(), ids=ENCODERS)
def test_encoders_are_counted_as_published(
    config: dict[str, Any], published: int
) -> None:
    model = model_from_config(config, "it", "a test")
    assert count_parameters(model) == published
    assert model.has_encoder
    assert not model.doubts


def test_an_encoder_that_is_not_known_is_not_made_up() -> None:
    other = QWEN_TEXT | {"model_type": "other", "vision_config": {"depth": 3}}
    model = model_from_config(other, "it", "a test")
    assert (model.num_multimodal_parameters, model.has_encoder) == (0, True)


# Bytes of safetensors that were told of checkpoints with several precisions; heads that
# draft are left out of the models here, and of the 35B these have 1.6 GiB in 16 bits.
MIXED_GIB = (
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", None, 6.03e9 / GIB),
    ("nvidia/Qwen3-14B-NVFP4", None, 10.54e9 / GIB),
    ("Qwen/Qwen3.5-35B-A3B", "nvfp4-mlp", 22.1),
    ("nvidia/Qwen3.6-35B-A3B-NVFP4", None, 21.8 - 1.57),
)


@pytest.mark.parametrize(("name", "scheme", "gib"), MIXED_GIB)
def test_mixed_precisions_weigh_what_was_published(
    name: str, scheme: str | None, gib: float
) -> None:
    model = load_model(name)
    stored = quantization_scheme(scheme or model.quantization)
    assert weight_bytes(model, 1, 2, stored) / GIB == pytest.approx(gib, rel=0.02)


def test_the_rest_of_a_mixed_model_is_stored_in_the_other_scheme() -> None:
    model = load_model("Qwen/Qwen3.5-27B")

    def gib(name: str) -> float:
        return weight_bytes(model, 1, 2, quantization_scheme(name)) / GIB

    saved_by_fp8 = gib("fp8-tensor-but-attention") - gib("fp8-tensor")
    assert gib("nvfp4-mlp") - gib("nvfp4-mlp+fp8-tensor") > saved_by_fp8 > 0
    assert gib("nvfp4") < gib("nvfp4-mlp+fp8-tensor") < gib("nvfp4-mlp")
    head = model.vocab_size * model.hidden_size / GIB
    saved = gib("nvfp4-mlp") - gib("nvfp4-mlp-head")
    assert saved == pytest.approx(head * (2 - 9 / 16), rel=0.01)


@pytest.mark.parametrize(("name", "billions"), ANNOUNCED_BILLIONS.items())
def test_parameters_are_as_announced(name: str, billions: tuple[float, float]) -> None:
    model, (total, active) = load_model(name), billions
    assert count_parameters(model) / 1e9 == pytest.approx(total, rel=0.01)
    assert count_active_parameters(model) / 1e9 == pytest.approx(active, rel=0.05)


def test_every_bundled_file_is_checked_against_a_published_count() -> None:
    checked = (*PUBLISHED_PARAMETERS, *ANNOUNCED_BILLIONS)
    counts = {count_parameters(load_model(name)) for name in checked}
    for name in bundled_models():
        assert count_parameters(load_model(name)) in counts, name


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("meta-llama/Llama-2-7b-hf", 524_288),
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("meta-llama/Llama-3.1-70B", 327_680),
        ("Qwen/Qwen2.5-7B", 57_344),
        ("Qwen/Qwen3-32B", 262_144),
        ("deepseek-ai/DeepSeek-V2-Lite", 31_104),
    ],
)
def test_kv_bytes_per_token(name: str, num_bytes: int) -> None:
    assert load_model(name).kv_bytes_per_token() == num_bytes


def test_kv_bytes_halve_down_to_one_head_a_rank() -> None:
    model = load_model("Qwen/Qwen2.5-7B")  # four KV heads
    sizes = [model.kv_bytes_per_token(tp) for tp in (1, 2, 4, 28)]
    assert sizes == [57_344, 28_672, 14_336, 14_336]
    assert model.kv_bytes_per_token(1, kv_itemsize_bytes=1) == 28_672


def test_latent_attention_is_not_divided() -> None:
    model = load_model("deepseek-ai/DeepSeek-V2-Lite")
    assert model.kv_bytes_per_token(8) == model.kv_bytes_per_token(1)


def test_head_dim_is_not_derived_where_given() -> None:
    assert load_model("Qwen/Qwen3-0.6B").head_dim == 128  # 1024 / 16 is 64
    assert load_model("mistralai/Mistral-Small-24B-Instruct-2501").head_dim == 128
    assert load_model("meta-llama/Llama-3.1-8B").head_dim == 128


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("qwen/qwen3-8b-base", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("CodeLlama-34b", "codellama/CodeLlama-34b-hf"),
        ("codellama/CodeLlama-34b-Instruct-hf", "codellama/CodeLlama-34b-hf"),
        ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3-70B"),
        ("llama 3.1 8b", "meta-llama/Llama-3.1-8B"),
        ("Mistral-Nemo", "mistralai/Mistral-Nemo-Base-2407"),
        ("01-ai/Yi-34B-Chat", "01-ai/Yi-34B"),
        ("Phi-3-medium-128k", "microsoft/Phi-3-medium-128k-instruct"),
        ("qwen3-4b-instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("Qwen2-7B", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("GLM-4-32B", "zai-org/GLM-4-32B-0414"),
        ("OLMo-2-7B-Instruct", "allenai/OLMo-2-1124-7B"),
        ("Llama-4-Scout", "meta-llama/Llama-4-Scout-17B-16E"),
        ("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct"),
        ("Qwen3-Coder-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    ],
)
def test_names_as_they_are_typed_share_a_shape(alias: str, name: str) -> None:
    assert load_model(alias) == replace(load_model(name), name=alias)


@pytest.mark.parametrize("name", ["Qwen-27B", "Llama-38B", "Qwen27B"])
def test_sizes_are_not_made_of_versions(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown model: .*; did you mean "):
        load_model(name)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("glm4", "zai-org/GLM-4-9B-0414"),
        ("seed_oss", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    ],
)
def test_a_bias_of_queries_is_not_one_of_the_output(kind: str, model: str) -> None:
    read = load_model(model)
    assert (read.model_type, read.qkv_bias) == (kind, True)
    assert not read.attention_output_bias


def test_a_name_is_not_taken_for_another_shape() -> None:
    # a date that changes the length, a precision, an owner that is not known
    dated = load_model("Qwen3-4B-Instruct-2507")
    assert (
        dated.max_position_embeddings > load_model("Qwen3-4B").max_position_embeddings
    )
    assert load_model("Qwen3-8B-FP8").quantization == "fp8-block128"
    for name in ("someone/Llama-3-8B", "Llama-3-8B-AWQ", "Phi-3-mini", "Qwen3"):
        with pytest.raises(ConfigError, match="unknown model"):
            load_model(name)
    for name in bundled_models():
        assert load_model(name.partition("/")[2]) == replace(
            load_model(name), name=name.partition("/")[2]
        )


@pytest.mark.parametrize(
    ("name", "base", "scheme"),
    [
        ("RedHatAI/Qwen3-235B-A22B-FP8-dynamic", "Qwen/Qwen3-235B-A22B", "fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8", "Llama-3.1-70B", "fp8-tensor"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "Llama-3.1-8B", "fp8-tensor"),
        ("casperhansen/llama-3-70b-instruct-awq", "meta-llama/Meta-Llama-3-70B", "awq"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "Llama-3.1-70B", "awq"),
        ("TheBloke/Llama-2-13B-chat-GPTQ", "meta-llama/Llama-2-13b-hf", "gptq"),
        ("RedHatAI/gemma-3-12b-it-quantized.w4a16", "google/gemma-3-12b-pt", "w4a16"),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w8a16", "Llama-3.1-8B", "w8a16"),
        ("RedHatAI/Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("unsloth/Llama-3.3-70B-Instruct", "Llama-3.1-70B", None),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "Llama-3.1-70B", "nvfp4"),
        ("nvidia/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B", "nvfp4"),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "Qwen/Qwen3.5-397B-A17B", "nvfp4-experts"),
        ("Qwen/Qwen3.8-27B-FP8", "Qwen/Qwen3.5-27B", "fp8-block128"),
    ],
)
def test_a_quantiser_names_anothers_model_and_a_scheme(
    name: str, base: str, scheme: str | None
) -> None:
    model = load_model(name)
    assert model == replace(load_model(base), name=name, quantization=scheme)
    for unknown in ("RedHatAI/Other-9B-FP8", "someone/Qwen3-8B-FP8-dynamic"):
        with pytest.raises(ConfigError, match="unknown model"):
            load_model(unknown)


def test_quantized_aliases_name_their_scheme() -> None:
    model = load_model("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16")
    assert model.quantization == "w4a16"


def test_sliding_layers() -> None:
    gemma = load_model("google/gemma-3-12b-it")
    assert (gemma.num_sliding_layers, gemma.sliding_window) == (40, 1024)
    oss = load_model("openai/gpt-oss-20b")
    assert (oss.num_sliding_layers, oss.sliding_window) == (12, 128)
    mistral = load_model("mistralai/Mistral-7B-v0.1")
    assert mistral.num_sliding_layers == mistral.num_hidden_layers
    assert load_model("Qwen/Qwen2.5-7B").sliding_window is None
    scout = load_model("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert (scout.num_sliding_layers, scout.chunked_attention) == (36, True)


def test_layers_with_a_state() -> None:
    qwen = load_model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert qwen.num_layers_of(LayerKind.GATED_DELTA_NET) == 36
    assert qwen.layer_kinds[3] is qwen.layer_kinds[47] is LayerKind.FULL_ATTENTION
    assert qwen.state_shape is not None
    assert qwen.state_shape.state_shapes(2) == ((3, 4096), (16, 128, 128))
    granite = load_model("ibm-granite/granite-4.0-h-small")
    attention = [i for i, of in enumerate(granite.layer_kinds) if of.is_attention]
    assert attention == [5, 15, 25, 35]
    assert granite.state_shape is not None
    # A group is copied to every rank.
    assert granite.state_shape.state_shapes(4) == ((3, 2304), (32, 64, 128))
    nemotron = load_model("nvidia/Nemotron-H-8B-Base-8K")
    assert (nemotron.num_mlps, nemotron.num_state_layers) == (24, 24)
    assert nemotron.num_attention_layers == 4
    assert nemotron.state_dtype == "float32"


def test_sliding_layers_may_have_heads_of_their_own() -> None:
    mimo = load_model("XiaomiMiMo/MiMo-V2-Flash")
    assert mimo.kv_bytes_per_layer() == 4 * (192 + 128) * 2
    sliding = LayerKind.SLIDING_ATTENTION
    assert mimo.kv_bytes_per_layer(kind=sliding) == 8 * (192 + 128) * 2
    assert mimo.kv_bytes_per_token() == (9 * 4 + 39 * 8) * (192 + 128) * 2


def test_global_heads_are_the_full_layers_own() -> None:
    gemma = load_model("google/gemma-4-31B")
    assert gemma.kv_bytes_per_layer() == 4 * 2 * 512 * 2
    sliding = LayerKind.SLIDING_ATTENTION
    assert gemma.kv_bytes_per_layer(kind=sliding) == 16 * 2 * 256 * 2


def test_an_indexer_keeps_keys_of_its_own() -> None:
    model = load_model("deepseek-ai/DeepSeek-V3.2")
    assert model.kv_bytes_per_layer(8) == 576 * 2 + 132
    assert model.index_topk == 2048
    assert model.kv_bytes_per_token(8) == 61 * (576 * 2 + 132)


def test_layers_may_share_the_choice_of_one_before() -> None:
    data = json.loads((CONFIGS / "zai-org--GLM-5.json").read_text())
    plain = model_from_config(data, "glm", "a file")
    for given, own in (
        ({"index_topk_freq": 4}, [0, 1, *range(5, 78, 4)]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [*range(0, 78, 2)]),
        ({"index_topk_pattern": "FSS" * 26}, [*range(0, 78, 3)]),
    ):
        model = model_from_config(data | given, "glm", "a file")
        assert list(model.index_layers) == own
        layers = kv_cache_layers(model, KVCacheOptions(block_size=64))
        named = [name for name in layers if name.endswith("indexer")]
        assert named == [f"model.layers.{each}.indexer" for each in own]
        less = (78 - len(own)) * 132
        assert plain.kv_bytes_per_token() - model.kv_bytes_per_token() == less
        assert count_parameters(model) < count_parameters(plain)


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*Llama-3\.1-8B"):
        load_model("meta-llama/Llama-3.1-9B")
    with pytest.raises(ConfigError, match="did you mean 01-ai/Yi-"):
        load_model("Yi")
    with pytest.raises(ConfigError, match="unknown model: 'zzz'"):
        load_model("zzz")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (
            "meta-llama/Llama-3.1-405B-Instruct-FP8",
            "meta-llama/Llama-3.1-405B-Instruct with quantization fp8",
        ),
        (
            "nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4",
            "nvidia/Qwen3-Next-80B-A3B-Instruct with quantization nvfp4",
        ),
        (
            "unsloth/Llama-3.3-70B-Instruct-bnb-4bit",
            "unsloth/Llama-3.3-70B-Instruct with quantization fp8",
        ),
    ],
)
def test_an_unknown_scheme_of_a_known_model_names_the_model(
    name: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}, or in another sch"):
        load_model(name)
    model, _, scheme = meant.partition(" with quantization ")
    assert resolved_model(load_model(model), quantization=scheme)


def test_the_model_as_the_engine_runs_it() -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    assert resolved_model(model) == model
    assert resolved_model(model, "float32", "fp8") == replace(
        model, dtype="float32", quantization="fp8"
    )
    quantised = load_model("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16")
    assert resolved_model(quantised).quantization == "w4a16"
    with pytest.raises(CapacityError, match="unknown dtype: 'int3'"):
        resolved_model(model, "int3")
    with pytest.raises(CapacityError, match="unknown quantization: 'q4'"):
        resolved_model(model, quantization="q4")


def test_gemma_says_its_length_after_scaling() -> None:
    assert load_model("google/gemma-3-12b-it").max_position_embeddings == 131072


def test_bits_and_groups_cost_what_they_say() -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    linear = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)

    def bytes_of(name: str) -> float:
        return weight_bytes(model, 1, 2, quantization_scheme(name))

    more = bytes_of("gptq-8bit") - bytes_of("gptq")
    assert more == pytest.approx(linear * (0.5 + 0.5 / 128), rel=0.005)
    finer = bytes_of("gptq-g8") - bytes_of("gptq")
    assert finer == pytest.approx(linear * 2.5 * (1 / 8 - 1 / 128), rel=0.05)
    assert bytes_of("awq-gchannel") < bytes_of("awq")


def test_unknown_quantization_and_dtype() -> None:
    with pytest.raises(CapacityError, match="unknown quantization: 'q4_k'"):
        quantization_scheme("q4_k")
    with pytest.raises(CapacityError, match="must name a scheme"):
        quantization_scheme("compressed-tensors")
    with pytest.raises(CapacityError, match="unknown dtype: 'int3'"):
        dtype_bytes("int3")


@pytest.mark.parametrize(
    ("num_bytes", "allocated"),
    [
        (1, 512),
        (5 * MIB, 5 * MIB),
        (10 * MIB, 10 * MIB),
        (31 * MIB + MIB // 2, 32 * MIB),  # half a MiB is not split off
        (24 * MIB + MIB // 2, 24 * MIB + MIB // 2),  # one and a half is
    ],
)
def test_allocated_bytes(num_bytes: int, allocated: int) -> None:
    assert allocated_bytes(num_bytes) == allocated


def test_weights_of_qwen_match_the_engine_to_four_decimals() -> None:
    # vLLM prints "Model loading took 14.2487 GiB".
    model = load_model("Qwen/Qwen2.5-7B")
    assert round(weight_bytes(model, 1, 2, None) / 2**30, 4) == 14.2487


def test_quantization_leaves_embeddings_and_norms() -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    linear = sum(
        tensor.num_elements * tensor.count
        for tensor in weight_tensors(model)
        if tensor.role is TensorRole.LINEAR
    )
    plain = weight_bytes(model, 1, 2, None)
    fp8 = weight_bytes(model, 1, 2, quantization_scheme("fp8"))
    int4 = weight_bytes(model, 1, 2, quantization_scheme("w4a16"))
    assert plain - fp8 == pytest.approx(linear, rel=0.01)
    assert plain - int4 == pytest.approx(linear * (2 - 0.5 - 2 / 128), rel=0.01)


def test_fp8_by_blocks_has_a_scale_for_each_block() -> None:
    model = load_model("deepseek-ai/DeepSeek-V3")
    assert model.quantization == "fp8-block128"
    scheme = quantization_scheme("fp8-block128")
    # One byte an element, one more for 1.85e9 of the vocabulary, and two for the
    # 1.02e9 that are kept a second time, absorbed; a scale is four bytes.
    expected = 671.03e9 * (1 + 4 / 128**2) + 1.85e9 + 2 * 1.02e9
    assert weight_bytes(model, 1, 2, scheme) == pytest.approx(expected, rel=0.001)


def test_parts_of_a_model_may_keep_their_precision() -> None:
    model = load_model("Qwen/Qwen3-30B-A3B")
    sizes = [
        weight_bytes(model, 1, 2, quantization_scheme(name)) / 2**30
        for name in ("nvfp4", "nvfp4-mlp", "nvfp4-experts")
    ]
    assert sizes[0] < sizes[1] == sizes[2]  # no shared experts, no dense MLP
    attention = 48 * 2048 * (4096 + 1024 + 4096)
    assert (sizes[1] - sizes[0]) * 2**30 == pytest.approx(
        attention * (2 - 0.5 - 1 / 16), rel=0.02
    )
    with pytest.raises(CapacityError, match="unknown quantization: 'fp4-mlp'"):
        quantization_scheme("fp4-mlp")


def test_norms_and_latent_projections_are_replicated() -> None:
    model = load_model("deepseek-ai/DeepSeek-V2-Lite")
    one, two = (weight_bytes(model, tp, 2, None) for tp in (1, 2))
    assert one / 2 < two < one / 2 * 1.01


@pytest.mark.parametrize(
    ("checkpoint", "asked", "stored"),
    [
        ("Qwen2.5-7B-Instruct-AWQ", "fp8", "awq"),
        ("Qwen2.5-7B-Instruct-GPTQ-Int4", "fp8", "gptq"),
        ("Qwen2.5-7B-Instruct-AWQ", "gptq", "awq"),
        ("Qwen3-8B-FP8", "awq", "fp8-block128"),
        ("openai/gpt-oss-20b", "fp8", "mxfp4"),
    ],
)
def test_a_quantised_checkpoint_is_not_turned_into_another_scheme(
    checkpoint: str, asked: str, stored: str
) -> None:
    """So does vLLM's `_verify_quantization`, whatever the release."""
    model = load_model(checkpoint)
    with pytest.raises(CapacityError) as refused:
        resolved_model(model, quantization=asked)
    line = str(refused.value)
    assert f"quantization is '{asked}'" in line
    assert f"is stored in '{stored}" in line
    assert "leave quantization out" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("checkpoint", "asked", "held"),
    [
        ("Qwen2.5-7B-Instruct-AWQ", "awq_marlin", "awq"),
        ("Qwen2.5-7B-Instruct-AWQ", "awq-g32", "awq-g32"),
        ("Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq_marlin", "gptq"),
        ("Qwen2.5-7B-Instruct-GPTQ-Int8", "gptq_marlin", "gptq-8bit"),
        ("Qwen3-8B-FP8", "fp8", "fp8-block128"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "modelopt", "fp8-tensor"),
        (
            "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
            "compressed-tensors",
            "w4a16",
        ),
        ("openai/gpt-oss-20b", "mxfp4", "mxfp4"),
        ("meta-llama/Llama-3.1-8B", "fp8", "fp8"),
    ],
)
def test_a_method_of_the_checkpoints_kind_keeps_its_groups(
    checkpoint: str, asked: str, held: str
) -> None:
    model = load_model(checkpoint)
    assert resolved_model(model, quantization=asked).quantization == held
