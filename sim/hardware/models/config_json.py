"""From a parsed ``config.json`` to the facts of a `ModelArchitecture`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sim.errors import ConfigError
from sim.hardware.models.quantization import packed_scheme_name

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

UNDERSTOOD_MODEL_TYPES = frozenset(
    {
        "deepseek_v2",
        "gemma2",
        "gemma3",
        "gpt_oss",
        "llama",
        "llama4",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""Values of ``model_type`` (without ``_text``) whose count of parameters equals that of
a published checkpoint. Another one is counted as a Llama, and the estimate says so."""

_UNCOUNTED_ABOVE = {
    "interleave_moe_layer_step": 1,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "full_attention_interval": 1,
    "shared_expert_intermediate_size": 0,
    "num_kv_shared_layers": 0,
    "mamba_d_state": 0,
    "linear_num_key_heads": 0,
}
"""Keys that change which tensors there are, and the largest value that does not."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_UNSCALED_ROPE = frozenset({"su", "longrope", "llama3", "mrope", "default"})
"""Rope scalings that ``max_position_embeddings`` already includes, or that do not
stretch it. Source: vLLM ``_get_and_verify_max_len``."""

_MOST = 2**31 - 1
_MOST_PARAMETERS = 2**50
_MOST_FACTOR = 2**20


@dataclass(frozen=True, slots=True)
class Facts:
    """A mapping of a ``config.json`` whose values are checked as they are read."""

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def wrong(self, key: str, rule: str) -> ConfigError:
        shown = repr(self.values.get(key))
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return ConfigError(
            f"{self.prefix}{key} must be {rule} in {self.source}; got {shown}"
        )

    def optional(self, key: str, most: int = _MOST, least: int = 0) -> int | None:
        """Return an integer of `least` to `most`; None for null or no key."""
        value = self.values.get(key)
        if value is None:
            return None
        kind = "a positive integer" if least == 1 else f"an integer of {least} or more"
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, kind)
        if value > most:
            raise self.wrong(key, f"{kind}, at most {most}")
        return value

    def natural(self, key: str, most: int = _MOST) -> int:
        """Return an integer of 0 or more; 0 for null or no key."""
        return self.optional(key, most) or 0

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer: `default` for null or no key, if there is one."""
        if default is not None and self.values.get(key) is None:
            return default
        if key not in self.values:
            raise ConfigError(
                f"{self.prefix}{key} is missing in {self.source}; add it, as in the"
                " model's own config.json"
            )
        value = self.optional(key, least=1)
        if value is None:
            raise self.wrong(key, "a positive integer")
        return value

    def factor(self, key: str) -> float:
        """Return a finite number of 1 or more; 1 for null or no key."""
        value = self.values.get(key)
        if value is None:
            return 1.0
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 1 <= value <= _MOST_FACTOR:
            raise self.wrong(key, f"a number of 1 to {_MOST_FACTOR}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean; `default` for null or no key."""
        return self._typed(key, "true or false", default)

    def text(self, key: str) -> str:
        """Return a string; an empty one for null or no key."""
        return self._typed(key, "a string", "")

    def items(self, key: str) -> list[Any]:
        """Return a list; an empty one for null or no key."""
        return self._typed(key, "a list", [])

    def _typed(self, key: str, rule: str, default: T) -> T:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, type(default)):
            raise self.wrong(key, rule)
        return value

    def mapping(self, key: str) -> Facts:
        """Return a nested mapping; an empty one for null or no key."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Facts(value or {}, self.source, f"{self.prefix}{key}.")


def architecture_facts(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of a `ModelArchitecture`, but for its name."""
    whole = Facts(config, source)
    text = Facts({**config, **whole.mapping("text_config").values}, source)
    kind = text.text("model_type").removesuffix("_text")
    _refuse_uncounted(text)
    layers = text.count("num_hidden_layers")
    heads, hidden = text.count("num_attention_heads"), text.count("hidden_size")
    if heads > hidden and text.values.get("head_dim") is None:
        raise text.wrong("num_attention_heads", f"at most hidden_size ({hidden})")
    encoder = whole.natural("num_multimodal_parameters", _MOST_PARAMETERS)
    bias = text.flag("attention_bias")
    towers = (config.get(key) for key in ("vision_config", "audio_config"))
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": text.count("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": text.count("num_key_value_heads", heads),
        "head_dim": text.count("head_dim", hidden // heads),
        "vocab_size": text.count("vocab_size"),
        "dtype": _dtype(text),
        "tie_word_embeddings": text.flag(
            "tie_word_embeddings", default="gemma" in kind
        ),
        "quantization": quantization_name(whole.mapping("quantization_config")),
        "qkv_bias": bias or kind == "qwen2",
        "attention_output_bias": bias,
        "mlp_bias": text.flag("mlp_bias"),
        "qk_norm": kind in {"qwen3", "qwen3_moe", "gemma3"},
        "num_norms_per_layer": 4 if kind in {"gemma2", "gemma3"} else 2,
        "attention_sinks": kind == "gpt_oss",
        "expert_bias": kind == "gpt_oss",
        "num_multimodal_parameters": encoder,
        "has_encoder": bool(encoder or any(towers)),
        "doubts": _doubts(kind),
        **_position_facts(text, kind),
        **_sliding_facts(text, kind, layers),
        **_expert_facts(text, layers),
        **_latent_facts(text),
    }


def _doubts(kind: str) -> tuple[str, ...]:
    if kind in UNDERSTOOD_MODEL_TYPES:
        return ()
    named = f"model_type {kind[:40]!r} is not known" if kind else "no model_type"
    return (f"{named}: its weights are counted as a Llama's",)


def _refuse_uncounted(text: Facts) -> None:
    for key, most in _UNCOUNTED_ABOVE.items():
        value = text.values.get(key)
        number = isinstance(value, int | float)
        if value and not (number and math.isfinite(value) and value <= most):
            raise text.wrong(
                key,
                f"{most} or left out (what it changes in the layers is not modelled)",
            )
    for layer in text.items("layer_types"):
        if not isinstance(layer, str) or layer not in _LAYER_TYPES:
            known = ", ".join(sorted(_LAYER_TYPES))
            raise ConfigError(
                f"layer_types must be of {known} in {text.source}; got"
                f" {str(layer)[:40]!r}, whose memory is not modelled"
            )


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
    rope = scaling.text("rope_type") or scaling.text("type") or "default"
    factor = 1.0 if rope in _UNSCALED_ROPE else scaling.factor("factor")
    base = longest
    if rope == "yarn":
        base = scaling.count("original_max_position_embeddings", longest)
    positions = int(base * factor)
    local = longest if text.values.get("rope_local_base_freq") else 0
    return {
        "max_position_embeddings": longest if kind == "gemma3" else positions,
        "num_rotary_positions": positions + local,
    }


def _sliding_facts(text: Facts, kind: str, layers: int) -> dict[str, Any]:
    """Count the layers that see a window only.

    ``layer_types`` says so in new files; gemma2 slides on every other layer, Qwen from
    ``max_window_layers`` on, and Mistral on all layers where the window is given.
    """
    types = text.items("layer_types")
    if types and len(types) != layers:
        raise ConfigError(
            f"layer_types must name each of the {layers} num_hidden_layers in"
            f" {text.source}; got {len(types)}"
        )
    chunk = text.natural("attention_chunk_size")
    window = chunk or text.natural("sliding_window")
    if not window or not text.flag("use_sliding_window", default=True):
        return {}
    if types:
        sliding = sum(name != "full_attention" for name in types)
    else:
        sliding = _sliding_layers(text, kind, layers)
    if not sliding:
        return {}
    return {
        "sliding_window": window,
        "num_sliding_layers": sliding,
        "chunked_attention": bool(chunk),
    }


def _sliding_layers(text: Facts, kind: str, layers: int) -> int:
    pattern = text.natural("sliding_window_pattern")
    pattern = pattern or text.natural("_sliding_window_pattern")
    pattern = pattern or (2 if kind == "gemma2" else 0)
    if pattern:
        return layers - layers // pattern
    if kind.startswith("qwen") and text.flag("use_sliding_window"):
        return max(0, layers - text.natural("max_window_layers"))
    return layers if kind in {"mistral", "mixtral"} else 0


def _expert_facts(text: Facts, layers: int) -> dict[str, Any]:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(filter(None, map(text.natural, keys)), 0)
    if not experts:
        return {}
    chosen = text.count("num_experts_per_tok", 1)
    if chosen > experts:
        raise text.wrong("num_experts_per_tok", f"at most the {experts} experts")
    listed = len(text.items("mlp_only_layers"))
    dense = text.natural("first_k_dense_replace") or listed
    if dense > layers:
        raise ConfigError(
            "first_k_dense_replace or mlp_only_layers must leave at most"
            f" {layers} dense layers in {text.source}; got {dense}"
        )
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": text.natural("moe_intermediate_size") or None,
        "num_shared_experts": text.natural("n_shared_experts"),
        "num_dense_layers": dense,
    }


def _latent_facts(text: Facts) -> dict[str, Any]:
    latent = text.natural("kv_lora_rank")
    if not latent:
        return {}
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {key: text.count(key) for key in keys} | {
        "kv_lora_rank": latent,
        "q_lora_rank": text.natural("q_lora_rank") or None,
    }


def quantization_name(config: Facts) -> str | None:
    """Return the scheme of a ``quantization_config``, or the name of its method."""
    if not config.values:
        return None
    method = config.text("quant_method")
    if not method:
        raise config.wrong("quant_method", "the name of a method")
    if method.split("_")[0] in {"gptq", "awq"}:
        bits = "w_bit" if "w_bit" in config.values else "bits"
        group = "q_group_size" if "q_group_size" in config.values else "group_size"
        size = config.optional(group, least=-1)
        if size is None:
            raise config.wrong(group, "the weights of a group, or -1")
        return packed_scheme_name(method, config.count(bits), size)
    if method != "compressed-tensors":
        return method
    groups = config.mapping("config_groups")
    names = {_group_name(groups.mapping(key)) for key in groups.values}
    return names.pop() or method if len(names) == 1 else method


def _group_name(group: Facts) -> str | None:
    """Return the scheme of one of the groups of compressed-tensors."""
    weights = group.mapping("weights")
    bits, kind = weights.natural("num_bits"), weights.text("type")
    size = weights.optional("group_size", least=-1)
    if bits == 8:
        return "fp8" if kind == "float" else "w8a8"
    if bits == 4 and kind == "int":
        if weights.text("strategy") == "channel":
            size = -1
        return packed_scheme_name("w4a16", bits, size)
    return None
