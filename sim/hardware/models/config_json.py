"""From a parsed ``config.json`` to the facts of a `ModelArchitecture`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from sim.hardware.models.config_encoders import encoder_parameters
from sim.hardware.models.config_layers import (
    DELTA_NETS,
    MAMBAS,
    expert_facts,
    latent_facts,
    layer_facts,
)
from sim.hardware.models.config_quantization import (
    kv_cache_dtype_name,
    quantization_name,
)
from sim.hardware.models.facts import Facts

if TYPE_CHECKING:
    from collections.abc import Mapping

UNDERSTOOD_MODEL_TYPES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "granite",
        "granitemoehybrid",
        "internlm2",
        "kimi_k2",
        "llama",
        "llama4",
        "mimo_v2_flash",
        "minimax_m2",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""Values of ``model_type`` (without ``_text``) whose count of parameters equals that of
a published checkpoint. Another one is counted as a Llama, and the estimate says so."""

_UNCOUNTED_ABOVE: dict[str, tuple[int, frozenset[str]]] = {
    "interleave_moe_layer_step": (1, frozenset({"llama4"})),
    "decoder_sparse_step": (1, frozenset({"qwen3_moe", "qwen3_vl_moe"}) | DELTA_NETS),
    "moe_layer_freq": (1, frozenset({"mimo_v2_flash"})),
    "full_attention_interval": (1, DELTA_NETS),
    "shared_expert_intermediate_size": (0, DELTA_NETS),
    "num_kv_shared_layers": (0, frozenset()),
    "mamba_d_state": (0, MAMBAS),
    "linear_num_key_heads": (0, DELTA_NETS),
}
"""Keys that change which tensors there are, the largest value that does not, and the
model types for which it is counted all the same."""

_OTHER_ATTENTION: dict[str, tuple[str, frozenset[Any]]] = {
    "attn_type_list": ("lightning attention", frozenset({1})),
    "block_types": ("recurrent blocks", frozenset({"attention"})),
    "is_encoder_decoder": ("attention to an encoder", frozenset()),
    "layer_group_size": ("linear attention between full layers", frozenset({1})),
    "layers_block_type": ("layers that keep states", frozenset({"attention"})),
    "mb_per_layer": ("layers that keep states", frozenset()),
    "compress_ratios": ("keys compressed over tokens", frozenset({0, 1})),
    "cross_attention_layers": ("attention to images", frozenset()),
    "linear_attn_config": ("Kimi delta attention", frozenset()),
    "sparse_attention_config": ("block-sparse attention", frozenset()),
    "attention_other_setting": ("heads of their own in sliding layers", frozenset()),
    "use_cla": ("keys shared across layers", frozenset()),
}
"""Keys of attention that remembers otherwise: its name, and values without it."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "vocab_size": 262208,
    },
    "llama4": {"n_shared_experts": 1},
    "minimax_m2": {"n_shared_experts": 0},
    "nemotron_h": {"n_groups": 8},
    "starcoder2": {"tie_word_embeddings": True, "use_bias": True},
}
"""Defaults of the class of a model type, for keys that its file lacks.

Source: transformers 5.17, ``models/*/configuration_*.py``."""

_QK_NORMS = frozenset(
    {"gemma3", "gemma4", "olmo2", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"}
) | (DELTA_NETS)
_OWN_QK_NORM = frozenset({"glm4_moe", "minimax_m2"})
_WIDE_QK_NORM = frozenset({"minimax_m2", "olmo2"})
_OUTPUT_WITHOUT_BIAS = frozenset({"glm", "glm4", "glm4_moe", "seed_oss"})
"""Families whose ``attention_bias`` is of queries, keys and values alone."""
"""Families with a norm of queries and keys, always or where ``use_qk_norm`` says so."""
_NORMS_PER_LAYER = {
    "gemma2": 4,
    "gemma3": 4,
    "gemma4": 4,
    "glm4": 4,
    "nemotron_h": 1,
    "phi": 1,
}
_BIASED_NORMS = frozenset({"phi", "starcoder2"})
_UNGATED = frozenset({"nemotron_h", "phi", "starcoder2"})
"""Families whose MLPs have no gate beside their up-projection."""
_GATING = ("silu", "swish", "swiglu", "geglu", "swigluoai")
"""Activations of MLPs with a gate, in families that are not known."""

_SIZE = re.compile(r"size|dim|rank|width|heads|layers|experts|channels|num_")
"""Words in names of sizes, in a file of a family that is not known."""
_READ_SIZES = frozenset(
    {
        "attention_head_dim",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "kv_lora_rank",
        "max_window_layers",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "num_multimodal_parameters",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "shared_expert_intermediate_size",
        "v_head_dim",
        "vocab_size",
    }
)
"""Sizes that are counted whatever the family."""

_UNSCALED_ROPE = frozenset({"su", "longrope", "llama3", "mrope", "default"})
"""Rope scalings that ``max_position_embeddings`` already includes, or that do not
stretch it. Source: vLLM ``_get_and_verify_max_len``."""

_VIDEO_ROPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_VIDEO_POSITIONS = 4
"""Their rotary tables are so many times as long, for videos. Those of ``qwen3_5`` are,
too, and cover a fourth of a head. Source: vLLM ``rotary_embedding/mrope.py``."""

_MOST_PARAMETERS = 2**50


def architecture_facts(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of a `ModelArchitecture`, but for its name."""
    whole = Facts(config, source)
    text = Facts({**config, **whole.mapping("text_config").values}, source)
    kind = text.text("model_type").removesuffix("_text")
    text = Facts({**_DEFAULTS.get(kind, {}), **text.values}, source)
    _refuse_uncounted(text, kind)
    _refuse_other_attention(text, kind)
    layers = text.count("num_hidden_layers")
    heads, hidden = text.count("num_attention_heads"), text.count("hidden_size")
    if heads > hidden and text.values.get("head_dim") is None:
        raise text.wrong("num_attention_heads", f"at most hidden_size ({hidden})")
    encoder = whole.natural("num_multimodal_parameters", _MOST_PARAMETERS)
    encoder = encoder or encoder_parameters(whole, text, kind)
    quantised = whole.mapping("quantization_config")
    if not quantised.values:  # of models with an encoder, of the text alone
        quantised = text.mapping("quantization_config")
    is_biased = kind == "phi" or (kind == "starcoder2" and text.flag("use_bias"))
    bias = text.flag("attention_bias") or is_biased
    use_qk_norm = text.flag("use_qk_norm")
    towers = (config.get(key) for key in ("vision_config", "audio_config"))
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": _intermediate_size(text, kind),
        "num_attention_heads": heads,
        "num_key_value_heads": text.count("num_key_value_heads", heads),
        "head_dim": text.count(
            "head_dim", text.count("attention_head_dim", hidden // heads)
        ),
        "vocab_size": text.count("vocab_size"),
        "model_type": kind,
        "dtype": _dtype(text),
        "tie_word_embeddings": text.flag(
            "tie_word_embeddings", default="gemma" in kind
        ),
        "quantization": quantization_name(quantised),
        "kv_cache_dtype": kv_cache_dtype_name(
            quantised, is_latent=bool(text.natural("kv_lora_rank"))
        ),
        "qkv_bias": bias or kind in {"qwen2", "qwen2_vl", "qwen2_5_vl"},
        "attention_output_bias": bias and kind not in _OUTPUT_WITHOUT_BIAS,
        "mlp_bias": text.flag("mlp_bias") or is_biased,
        "mlp_has_gate": _has_gate(text, kind),
        "norm_bias": kind in _BIASED_NORMS,
        "head_bias": kind == "phi",
        "qk_norm": kind in _QK_NORMS or (kind in _OWN_QK_NORM and use_qk_norm),
        "qk_norm_spans_heads": kind in _WIDE_QK_NORM,
        "num_norms_per_layer": _NORMS_PER_LAYER.get(kind, 2),
        "attention_sinks": kind == "gpt_oss",
        "shares_key_and_value": text.flag("attention_k_eq_v"),
        "num_multimodal_parameters": encoder,
        "has_encoder": bool(encoder or any(towers)),
        "doubts": _doubts(text, kind),
        **_position_facts(text, kind),
        **layer_facts(text, kind, layers),
        **expert_facts(text, kind, layers),
        **latent_facts(text, layers),
    }


def _has_gate(text: Facts, kind: str) -> bool:
    """Return whether MLPs have a gate: by the family, else by the activation."""
    if kind in UNDERSTOOD_MODEL_TYPES:
        return kind not in _UNGATED
    activation = _activation(text)
    return not activation or activation.startswith(_GATING)


def _activation(text: Facts) -> str:
    return text.text("hidden_act") or text.text("activation_function")


def _doubts(text: Facts, kind: str) -> tuple[str, ...]:
    """Return the unknowns of a family, and the sizes of its file that are unread.

    A key is a size where its name or its value says so.
    """
    if kind in UNDERSTOOD_MODEL_TYPES:
        return ()
    named = f"model_type {kind[:40]!r} is not known" if kind else "no model_type"
    doubts = [f"{named}: its weights and attention are counted as a Llama's"]
    if not _has_gate(text, kind):
        doubts.append(
            f"hidden_act {_activation(text)[:40]!r}: its MLPs are counted without a "
            f"gate"
        )
    unread = sorted(
        key[:40]
        for key, value in text.values.items()
        if key not in _READ_SIZES
        and isinstance(value, int)
        and not isinstance(value, bool)
        and value > 1
        and _SIZE.search(key)
    )
    if unread:
        more = f" and {len(unread) - 6} more" if len(unread) > 6 else ""
        doubts.append(f"sizes that are not counted: {', '.join(unread[:6])}{more}")
    return tuple(doubts)


def _refuse_uncounted(text: Facts, kind: str) -> None:
    for key, (most, counted_for) in _UNCOUNTED_ABOVE.items():
        value = text.values.get(key)
        number = isinstance(value, int | float)
        if kind in counted_for or not value:
            continue
        if not (number and math.isfinite(value) and value <= most):
            raise text.wrong(
                key,
                f"{most} or left out (what it changes in the layers is not modelled)",
            )


def _refuse_other_attention(text: Facts, kind: str) -> None:
    """Refuse layers whose cache would be counted as if they were plain attention."""
    for key, (what, plain) in _OTHER_ATTENTION.items():
        if kind in MAMBAS and key == "layers_block_type":
            continue  # its layers are known
        value = text.values.get(key)
        listed = value if isinstance(value, list) else [value]
        is_plain = all(isinstance(each, str | int) and each in plain for each in listed)
        if not value or is_plain:
            continue
        least = ", ".join(map(str, sorted(plain)))
        without = f"left out, or {least} in each layer" if plain else "left out"
        raise text.wrong(key, f"{without} ({what}: not modelled)")


def _intermediate_size(text: Facts, kind: str) -> int:
    """Return the inner size of dense MLPs, which some families call otherwise."""
    if "intermediate_size_mlp" in text.values:  # Llama 4
        return text.count("intermediate_size_mlp")
    if kind == "granitemoehybrid" and not text.natural("num_local_experts"):
        return text.count("shared_intermediate_size")
    inner = text.natural("moe_intermediate_size") or None
    return text.count("intermediate_size", inner)


def _dtype(text: Facts) -> str:
    name = text.text("torch_dtype") or text.text("dtype") or "bfloat16"
    return name.removeprefix("torch.")


def _position_facts(text: Facts, kind: str) -> dict[str, Any]:
    """Return the longest request and the rows of the rotary tables, as vLLM has them.

    Yarn counts from ``original_max_position_embeddings``, other scalings that stretch
    count from the model's own; gemma3's length already includes its scaling.
    """
    longest = text.count("max_position_embeddings")
    scaling = text.mapping("rope_scaling")
    if not scaling.values:  # its name in newer files
        scaling = text.mapping("rope_parameters")
    rope = scaling.text("rope_type") or scaling.text("type") or "default"
    factor = 1.0 if rope in _UNSCALED_ROPE else scaling.factor("factor")
    base = longest
    if rope == "yarn":
        base = scaling.count("original_max_position_embeddings", longest)
    positions = int(base * factor)
    local = longest if text.values.get("rope_local_base_freq") else 0
    tables = _VIDEO_POSITIONS if kind in _VIDEO_ROPES else 1
    return {
        "max_position_embeddings": longest if kind == "gemma3" else positions,
        "num_rotary_positions": tables * positions + local,
    }
