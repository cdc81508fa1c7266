from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sim.costs import RooflineCost
from sim.errors import CapacityError, ConfigError
from sim.hardware.capacity import estimate_capacity, format_capacity
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import bundled_models, load_model, model_from_config
from sim.hardware.models.weights import count_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write the facts of Qwen3-8B as a user's ``config.json``."""
    facts = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    path = tmp_path / "my-model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(facts), encoding="utf-8")
    return path


def rewrite(path: Path, **changes: object) -> None:
    facts = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in facts.items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")


def test_config_by_file_and_by_directory(config: Path) -> None:
    by_file, by_folder = load_model(config), load_model(str(config.parent))
    assert by_file == by_folder
    assert by_file.name == "my-model"
    assert replace(by_file, name="Qwen/Qwen3-8B") == load_model("Qwen/Qwen3-8B")


def test_config_nests_the_text_model(config: Path) -> None:
    text = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({"model_type": "x", "text_config": text}))
    assert count_parameters(load_model(config)) == 8_190_735_360


def test_missing_key_is_named_with_its_file(config: Path) -> None:
    rewrite(config, num_hidden_layers=...)
    with pytest.raises(ConfigError, match=r"num_hidden_layers is missing in .*config"):
        load_model(config)


def test_optional_keys(config: Path) -> None:
    rewrite(config, head_dim=None, num_key_value_heads=...)
    model = load_model(config)
    assert (model.head_dim, model.num_key_value_heads) == (128, 32)
    rewrite(config, head_dim="wide")
    with pytest.raises(ConfigError, match="head_dim must be a positive integer"):
        load_model(config)


def test_an_encoder_is_seen_but_not_counted(config: Path) -> None:
    rewrite(config, vision_config={"hidden_size": 1024})
    model = load_model(config)
    assert model.has_encoder
    assert model.num_multimodal_parameters == 0
    said = estimate_capacity(model, "h100_sxm").extrapolated
    assert any("give weights_gib" in reason for reason in said)


@pytest.mark.parametrize("value", [0, -1, "32", True, 1.5, None])
def test_wrong_value_is_named(config: Path, value: object) -> None:
    rewrite(config, vocab_size=value)
    with pytest.raises(ConfigError, match="vocab_size must be a positive integer"):
        load_model(config)


FUZZED: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "attention_bias": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "type": "yarn"},
        "rope_local_base_freq": 1e4,
        "text_config": {},
        "vision_config": {},
        "num_multimodal_parameters": 0,
    },
    "sliding": {
        "model_type": "gemma2",
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "use_sliding_window": True,
        "attention_chunk_size": None,
    },
    "listed": {
        "model_type": "mistral",
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 128,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_local_experts": None,
        "n_routed_experts": None,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "latent": {
        "model_type": "deepseek_v2",
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "delta nets": {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "states": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "shared_intermediate_size": 64,
    },
    "letters": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
    },
    "own heads": {
        "model_type": "gemma4",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "flagged": {
        "model_type": "mimo_v2_flash",
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "sliding_window": 128,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "indexed": {
        "model_type": "deepseek_v32",
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "index_topk": 128,
        "index_n_heads": 4,
        "index_head_dim": 128,
    },
    "ignored": {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.0.self_attn*"],
        }
    },
    "packed": {
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}
    },
    "grouped": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}
            },
        }
    },
}
COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
BAD = [None, "x", "8", -1, 0, 1.5, True, [], {}, [1], {"a": 1}, 10**30, math.nan, 1e300]


def paths(
    facts: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    for key, value in facts.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


@pytest.mark.parametrize("kind", FUZZED)
def test_any_wrong_value_is_answered_in_one_line(kind: str) -> None:
    base = COMMON | FUZZED[kind]
    gpu, complaints, accepted = load_gpu("b200_sxm"), [], 0
    known = model_from_config(base, "m", "the test")
    assert estimate_capacity(known, gpu).num_gpu_blocks > 1000
    assert RooflineCost(model=known, gpu=gpu)
    for path, bad in itertools.product(list(paths(base)), BAD):
        facts = copy.deepcopy(base)
        inner = facts
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = bad
        try:
            model = model_from_config(facts, "m", "the test")
            estimate = estimate_capacity(model, gpu, weights_gib=None)
            format_capacity(estimate)
            RooflineCost(model=model, gpu=gpu)
        except (ConfigError, CapacityError) as error:
            complaints.append(str(error))
        else:
            accepted += 1
    assert accepted >= 5
    assert len(complaints) > 100
    assert all("\n" not in said and len(said) < 400 for said in complaints)


def test_lists_and_lengths_that_contradict(config: Path) -> None:
    rewrite(config, layer_types=["full_attention"])
    with pytest.raises(ConfigError, match="must name each of the 36 num_hidden_lay"):
        load_model(config)
    rewrite(config, layer_types=None, num_attention_heads=8192, head_dim=None)
    with pytest.raises(ConfigError, match=r"at most hidden_size \(4096\)"):
        load_model(config)


def test_an_unknown_model_type_is_doubted(config: Path) -> None:
    plain = load_model(config)
    for kind, said in (("falcon", "model_type 'falcon' is not known"), (..., "no mod")):
        rewrite(config, model_type=kind)
        model = load_model(config)
        known, doubted = (
            estimate_capacity(m, "h100_sxm", engine_version="0.11.2")
            for m in (plain, model)
        )
        assert known.extrapolated == ()
        assert any(said in reason for reason in doubted.extrapolated)
        assert doubted.num_gpu_blocks_low < 0.95 * known.num_gpu_blocks_low
    assert all(not load_model(name).doubts for name in bundled_models())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("interleave_moe_layer_step", 2),
        ("decoder_sparse_step", 2),
        ("moe_layer_freq", [0, 1]),
        ("shared_expert_intermediate_size", 5632),
        ("full_attention_interval", 4),
        ("num_kv_shared_layers", 10),
    ],
)
def test_layers_that_are_not_counted_are_refused(
    config: Path, key: str, value: object
) -> None:
    rewrite(config, **{key: value})
    with pytest.raises(ConfigError, match=f"{key} must be . or left out"):
        load_model(config)


def test_linear_attention_is_refused(config: Path) -> None:
    rewrite(config, layer_types=["linear_attention"] * 36)
    with pytest.raises(ConfigError, match="'linear_attention', whose memory is not"):
        load_model(config)


# What published files say of their layers, in the keys that they use.
PUBLISHED_FORMS: dict[str, dict[str, Any]] = {
    "google/gemma-3-4b-pt": {
        "model_type": "gemma3",
        "num_multimodal_parameters": 419_816_304,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "meta-llama/Llama-4-Maverick-17B-128E": {
        "model_type": "llama4",
        "num_multimodal_parameters": 871_932_416,
        "text_config": {
            "model_type": "llama4_text",
            "attention_chunk_size": 8192,
            "head_dim": 128,
            "hidden_size": 5120,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 1048576,
            "num_attention_heads": 40,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "vocab_size": 202048,
        },
    },
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        "model_type": "nemotron_h",
        "conv_kernel": 4,
        "head_dim": 128,
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "layers_block_type": [
            {"M": "mamba", "E": "moe", "*": "attention"}[letter]
            for letter in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
        ],
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_groups": 8,
        "n_routed_experts": 128,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "ssm_state_size": 128,
        "vocab_size": 131072,
    },
}


@pytest.mark.parametrize("name", PUBLISHED_FORMS)
def test_published_files_are_read_as_they_are(name: str) -> None:
    read = model_from_config(PUBLISHED_FORMS[name], name, "the test")
    known = load_model(name)
    assert read.layer_kinds == known.layer_kinds
    assert count_parameters(read) == count_parameters(known)
    assert read.kv_bytes_per_token() == known.kv_bytes_per_token()
    assert read.state_shape == known.state_shape


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern must be 36 letters"),
        ({"hybrid_layer_pattern": [1, 2]}, "must be a list of 36 0 or 1"),
        ({"model_type": "qwen3_next"}, "linear_num_key_heads is missing"),
    ],
)
def test_layers_that_a_file_tells_badly(
    config: Path, facts: dict[str, object], message: str
) -> None:
    rewrite(config, **facts)
    with pytest.raises(ConfigError, match=message):
        load_model(config)


@pytest.mark.parametrize(
    ("scaling", "longest", "rotary"),
    [
        (None, 40960, 40960),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
            131072,
            131072,
        ),
        ({"type": "yarn", "factor": 2.0}, 81920, 81920),
        ({"type": "linear", "factor": 2}, 81920, 81920),
        ({"rope_type": "dynamic", "factor": 2}, 81920, 81920),
        ({"rope_type": "llama3", "factor": 8}, 40960, 40960),
        ({"type": "longrope"}, 40960, 40960),
        ({"rope_type": "default"}, 40960, 40960),
    ],
)
def test_rope_scaling_stretches_the_longest_request(
    config: Path, scaling: object, longest: int, rotary: int
) -> None:
    rewrite(config, rope_scaling=scaling)
    model = load_model(config)
    assert model.max_position_embeddings == longest
    assert model.num_rotary_positions == rotary


def test_names_that_are_none(tmp_path: Path) -> None:
    for empty in ("", "  "):
        with pytest.raises(ConfigError, match="model must be a bundled name"):
            load_model(empty)
    for long in ("x" * 100_000, "x" * 100_000 + ".json", f"{tmp_path}/{'d' * 300}"):
        with pytest.raises(ConfigError) as caught:
            load_model(long)
        assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError) as caught:
        load_model("a\nb.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="must hold JSON"):
        load_model("a\0b.json")


def test_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable config\.json at"):
        load_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold JSON"):
        load_model(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_model(path)
    for content in (b"\xff\xfe{", b"[" * 100_000, b'{"vocab_size": 1' + b"0" * 5000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="must hold JSON") as caught:
            load_model(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "scheme"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq-g64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "gptq-8bit-g32"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq-gchannel"),
        ({"num_bits": 8, "type": "float"}, "fp8"),
        ({"num_bits": 8, "type": "int"}, "w8a16"),
        ({"num_bits": 4, "type": "int", "group_size": 128}, "w4a16"),
        ({"num_bits": 4, "type": "int", "group_size": 32}, "w4a16-g32"),
        ({"num_bits": 4, "type": "int", "strategy": "channel"}, "w4a16-gchannel"),
        ({"num_bits": 3, "type": "int"}, "compressed-tensors"),
        ({"num_bits": 8, "type": "float", "strategy": "block"}, "fp8-block128"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8-tensor"),
        ({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8-tensor"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block128"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8-tensor"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["backbone.layers.12.mixer.q_proj"],
            },
            "nvfp4-but-attention",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.3.self_attn.q_b_proj"],
            },
            "nvfp4-mlp",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.0.self_attn*"],
            },
            "nvfp4-mlp",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*"],
            },
            "nvfp4-experts",
        ),
    ],
)
def test_quantization_config(
    config: Path, facts: dict[str, object], scheme: str
) -> None:
    groups = {"group_0": {"weights": facts}}
    tensors = {"quant_method": "compressed-tensors", "config_groups": groups}
    rewrite(config, quantization_config=facts if "quant_method" in facts else tensors)
    assert load_model(config).quantization == scheme


FP8_PROJECTION = {"quant_algo": "FP8"}
FP4_PROJECTION = {"quant_algo": "W4A16_NVFP4", "group_size": 16}


@pytest.mark.parametrize(
    ("layers", "scheme"),
    [
        ({"mlp.up_proj": FP4_PROJECTION}, "nvfp4-mlp"),
        (
            {"self_attn.q_proj": FP8_PROJECTION, "mlp.up_proj": FP4_PROJECTION},
            "nvfp4-mlp+fp8-tensor",
        ),
        (
            {"linear_attn.out_proj": FP8_PROJECTION, "mlp.experts": FP4_PROJECTION}
            | {"lm_head": FP4_PROJECTION},
            "nvfp4-mlp-head+fp8-tensor",
        ),
        (
            {"mixer.in_proj": FP8_PROJECTION, "mixer.experts.3.up_proj": FP4_PROJECTION}
            | {"mixer.shared_experts.up_proj": FP4_PROJECTION},
            "nvfp4-mlp+fp8-tensor",
        ),
        ({"mlp.up_proj": FP8_PROJECTION}, "modelopt"),
        ({"self_attn.q_proj": FP4_PROJECTION}, "modelopt"),
    ],
)
def test_mixed_precision(
    config: Path, layers: dict[str, dict[str, object]], scheme: str
) -> None:
    asked = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    told = {f"model.layers.0.{name}": facts for name, facts in layers.items()}
    rewrite(config, quantization_config=asked | {"quantized_layers": told})
    assert load_model(config).quantization == scheme


def test_what_model_opt_tells_in_a_file_of_its_own_is_read(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config.read_text())
    plain = load_model(tmp_path)
    told = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    apart = tmp_path / "hf_quant_config.json"
    apart.write_text(
        json.dumps({"quantization": told | {"exclude_modules": ["lm_head"]}})
    )
    found = load_model(tmp_path)
    assert (plain.quantization, found.quantization) == (None, "nvfp4")
    assert found.kv_cache_dtype == "fp8_e4m3"
    apart.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object; got a list"):
        load_model(tmp_path)


def test_the_scheme_of_the_text_counts(config: Path) -> None:
    """Kimi-K2.5 has its scheme in ``text_config``, and a release reads it there."""
    asked = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    rewrite(config, text_config={"quantization_config": asked})
    assert load_model(config).quantization == "fp8-block128"


def test_bytes_multiply_bytes_where_inputs_are_quantised_too(config: Path) -> None:
    group = {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
    }
    facts = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    rewrite(config, quantization_config=facts)
    assert load_model(config).quantization == "w8a8"
    group["input_activations"] = None  # as vLLM's rule for weights alone has it
    rewrite(config, quantization_config=facts)
    assert load_model(config).quantization == "w8a16"


def test_inputs_that_are_scaled_as_they_come_have_a_scale_a_row(config: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"weights": weights, "input_activations": {"dynamic": True}}
    tensors = {"quant_method": "compressed-tensors", "config_groups": {"a": group}}
    rewrite(config, quantization_config=tensors)
    assert load_model(config).quantization == "fp8"


def test_videos_have_longer_rotary_tables(config: Path) -> None:
    text = load_model(config)
    rewrite(config, model_type="qwen2_5_vl")
    assert load_model(config).num_rotary_positions == 4 * text.num_rotary_positions


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"quant_method": "gptq", "group_size": 128}, "quantization_config.bits is mi"),
        ({"quant_method": "gptq", "bits": 4}, "group_size must be the weights of a gr"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits of 4; got 8"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "bits of 2, 3, 4, 8"),
        ({"quant_method": "gptq_x", "bits": 4, "group_size": 1}, "quant_method must b"),
        ({"bits": 4}, "quant_method must be the name of a method"),
    ],
)
def test_quantization_that_is_not_modelled(
    config: Path, facts: dict[str, object], message: str
) -> None:
    rewrite(config, quantization_config=facts)
    with pytest.raises(ConfigError, match=message):
        load_model(config)


GPU = load_gpu("h200_sxm")
STATIC_FP8 = {"type": "float", "num_bits": 8, "dynamic": False}


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC_FP8}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "modelopt", "kv_cache_scheme": STATIC_FP8}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, None),
        (
            {
                "quant_method": "modelopt_fp4",
                "quantization": {"kv_cache_quant_algo": "FP8"},
            },
            "fp8_e4m3",
        ),
        (
            {
                "quant_method": "modelopt",
                "kv_cache_scheme": STATIC_FP8 | {"dynamic": True},
            },
            None,
        ),
        (
            {
                "quant_method": "modelopt",
                "kv_cache_scheme": {"type": "float", "num_bits": 4},
            },
            "nvfp4",
        ),
        ({"quant_method": "fp8", "kv_cache_scheme": STATIC_FP8}, None),
    ],
)
def test_checkpoint_asks_for_the_precision_of_its_cache(
    config: Path, quantised: dict[str, Any], dtype: str | None
) -> None:
    rewrite(config, quantization_config=quantised)
    model = load_model(config)
    assert model.kv_cache_dtype == dtype

    def kept(engine_version: str, kv_cache_dtype: str = "auto") -> str:
        return estimate_capacity(
            model,
            "h200_sxm",
            engine_version=engine_version,
            kv_cache_dtype=kv_cache_dtype,
            weights_gib=15.0,
        ).kv_cache_dtype

    assert kept("0.33") == kept("0.15") == (dtype or "bfloat16")
    assert kept("0.14") == "bfloat16"
    assert kept("0.33", "bfloat16") == "bfloat16"
    if dtype != "nvfp4":
        cost = RooflineCost(model=replace(model, quantization=None), gpu=GPU)
        assert cost.kv_itemsize_bytes() == (1 if dtype else 2)


def test_latent_attention_does_not_read_the_scheme_of_compressed_tensors() -> None:
    facts: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    asked = {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC_FP8}
    model = model_from_config(facts | {"quantization_config": asked}, "mine", "here")
    assert model.kv_cache_dtype is None
    asked["quant_method"] = "modelopt"
    model = model_from_config(facts | {"quantization_config": asked}, "mine", "here")
    assert model.kv_cache_dtype == "fp8_e4m3"


def test_a_scheme_that_the_engine_refuses_is_refused(config: Path) -> None:
    scheme = {"type": "int", "num_bits": 8}
    asked = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    rewrite(config, quantization_config=asked)
    with pytest.raises(ConfigError, match="kv_cache_scheme must be floats of 8 bits"):
        load_model(config)


def test_steps_in_a_precision_without_a_price_are_refused(config: Path) -> None:
    asked = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}
    rewrite(config, quantization_config=asked)
    model = replace(load_model(config), quantization=None)
    with pytest.raises(ConfigError, match="asks for nvfp4, in which steps have no"):
        RooflineCost(model=model, gpu=GPU)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"attn_type_list": [0, 1] * 18}, "1 in each layer .lightning attention"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "Kimi delta attention"),
        ({"block_types": ["recurrent", "attention"]}, "recurrent blocks: not model"),
        ({"compress_ratios": [1, [4]]}, "keys compressed over tokens"),
        ({"cross_attention_layers": [3]}, "attention to images"),
        ({"use_cla": True}, "keys shared across layers"),
        ({"is_encoder_decoder": True}, "attention to an encoder"),
        ({"layer_group_size": 8}, "linear attention between full layers"),
        ({"layers_block_type": ["mamba", "hybrid"] * 18}, "layers that keep states"),
        ({"mb_per_layer": 2}, "layers that keep states"),
    ],
)
def test_attention_that_remembers_otherwise_is_refused_by_name(
    config: Path, changes: dict[str, Any], what: str
) -> None:
    rewrite(config, **changes)
    with pytest.raises(ConfigError, match=what):
        load_model(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_type_list": [1] * 36},
        {"compress_ratios": [1] * 36},
        {"use_cla": False, "block_types": None, "cross_attention_layers": []},
        {"is_encoder_decoder": False, "layers_block_type": ["attention"] * 36},
    ],
)
def test_keys_that_change_nothing_are_let_be(
    config: Path, changes: dict[str, Any]
) -> None:
    plain = load_model(config)
    rewrite(config, **changes)
    assert load_model(config) == plain
