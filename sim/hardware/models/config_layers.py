"""The layers of a ``config.json``: attention, states, experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.errors import ConfigError
from sim.hardware.models.layers import (
    STATE_DTYPES,
    AttentionHeads,
    GatedDeltaNetShape,
    LayerKind,
    Mamba2Shape,
)

if TYPE_CHECKING:
    from sim.hardware.models.facts import Facts

DELTA_NETS = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})
MAMBAS = frozenset({"granitemoehybrid", "nemotron_h"})

_FULL, _SLIDING = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION
_LAYER_TYPES = {
    "full_attention": _FULL,
    "attention": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": LayerKind.CHUNKED_ATTENTION,
    "linear_attention": LayerKind.GATED_DELTA_NET,
    "mamba": LayerKind.MAMBA2,
}
_PATTERN = {
    "M": LayerKind.MAMBA2,
    "*": _FULL,
    "-": LayerKind.MLP,
    "E": LayerKind.MLP,
}
"""Letters of Nemotron-H: a Mamba2, an attention, an MLP and a sparse MLP layer."""
_USUAL_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt_oss": 2}
_FULL_EVERY = 4
"""Full attention among delta nets, and among the chunks of Llama 4."""


def layer_facts(text: Facts, kind: str, layers: int) -> dict[str, Any]:
    """Return the kinds of layers, the window, and the state, where layers differ."""
    kinds = _listed_kinds(text, kind, layers) or _patterned_kinds(text, kind, layers)
    chunk = text.natural("attention_chunk_size")
    window = text.natural("sliding_window")
    if not text.flag("use_sliding_window", default=True):
        window = 0
    if not window:
        kinds = [_FULL if name is _SLIDING else name for name in kinds]
    if not chunk:
        chunked = LayerKind.CHUNKED_ATTENTION
        kinds = [_FULL if name is chunked else name for name in kinds]
    if all(name is _FULL for name in kinds):
        return {}
    facts: dict[str, Any] = {"mixed_layer_kinds": tuple(kinds)}
    if LayerKind.CHUNKED_ATTENTION in kinds:
        facts["sliding_window"] = chunk
    elif _SLIDING in kinds:
        facts["sliding_window"] = window
        facts |= _sliding_heads(text, kind)
    return facts | _state_facts(text, kinds)


def _listed_kinds(text: Facts, kind: str, layers: int) -> list[LayerKind]:
    """Return the kinds that a file lists layer by layer; none where it does not."""
    types = text.items("layer_types")
    if types and len(types) != layers:
        raise ConfigError(
            f"layer_types must name each of the {layers} num_hidden_layers in"
            f" {text.source}; got {len(types)}"
        )
    known = {
        name
        for name, of in _LAYER_TYPES.items()
        if not of.has_state
        or (kind in DELTA_NETS and of is LayerKind.GATED_DELTA_NET)
        or (kind in MAMBAS and of is LayerKind.MAMBA2)
    }
    for layer in types:
        if not isinstance(layer, str) or layer not in known:
            names = ", ".join(sorted(known - {"attention"}))
            raise ConfigError(
                f"layer_types must be of {names} in {text.source}; got"
                f" {str(layer)[:40]!r}, whose memory is not modelled"
            )
    return [_LAYER_TYPES[layer] for layer in types]


def _patterned_kinds(text: Facts, kind: str, layers: int) -> list[LayerKind]:
    """Return the kinds that a rule of the model's family gives."""
    if kind == "nemotron_h":
        return _nemotron_kinds(text, layers)
    if kind in DELTA_NETS:
        every = text.count("full_attention_interval", _FULL_EVERY)
        return _every(every, layers, LayerKind.GATED_DELTA_NET)
    if text.items("hybrid_layer_pattern"):
        return _flagged_kinds(text, layers)
    if text.natural("attention_chunk_size") and kind == "llama4":
        return _every(_FULL_EVERY, layers, LayerKind.CHUNKED_ATTENTION)
    return _sliding_kinds(text, kind, layers)


def _sliding_kinds(text: Facts, kind: str, layers: int) -> list[LayerKind]:
    """Return full attention and windows.

    Gemma 2 slides on every other layer, Qwen from ``max_window_layers`` on, and Mistral
    on all layers where the window is given.
    """
    every = text.natural("sliding_window_pattern")
    every = every or text.natural("_sliding_window_pattern")
    every = every or _USUAL_PATTERN.get(kind, 0)
    if every:
        return _every(every, layers, _SLIDING)
    if kind.startswith("qwen") and text.flag("use_sliding_window"):
        first = text.natural("max_window_layers")
        return [_SLIDING if index >= first else _FULL for index in range(layers)]
    return [_SLIDING if kind in {"mistral", "mixtral"} else _FULL] * layers


def _every(period: int, layers: int, other: LayerKind) -> list[LayerKind]:
    """Return full attention on every `period`-th layer, `other` on the rest."""
    return [_FULL if (index + 1) % period == 0 else other for index in range(layers)]


_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def nemotron_pattern(text: Facts) -> str:
    """Return a letter a layer; newer files name the layers in words."""
    words = text.items("layers_block_type")
    spelled = "".join(_LETTERS.get(str(word), "?") for word in words)
    return spelled or text.text("hybrid_override_pattern")


def _nemotron_kinds(text: Facts, layers: int) -> list[LayerKind]:
    pattern = nemotron_pattern(text)
    if len(pattern) != layers or not set(pattern) <= set(_PATTERN):
        raise text.wrong(
            "hybrid_override_pattern", f"{layers} letters of {', '.join(_PATTERN)}"
        )
    return [_PATTERN[letter] for letter in pattern]


def _flagged_kinds(text: Facts, layers: int) -> list[LayerKind]:
    pattern = text.items("hybrid_layer_pattern")
    if len(pattern) != layers or any(one not in (0, 1) for one in pattern):
        raise text.wrong("hybrid_layer_pattern", f"a list of {layers} 0 or 1")
    return [_SLIDING if one else _FULL for one in pattern]


def _sliding_heads(text: Facts, kind: str) -> dict[str, Any]:
    """Return the heads of sliding layers, where a file tells them apart."""
    if "global_head_dim" in text.values:  # Gemma 4: the others are the ones apart
        count, width = text.count("num_attention_heads"), text.count("head_dim")
        kv_heads = text.count("num_key_value_heads", count)
        return {
            "sliding_heads": AttentionHeads(count, kv_heads, width, width),
            "head_dim": text.count("global_head_dim", width),
            "num_key_value_heads": text.count("num_global_key_value_heads", kv_heads),
        }
    if "swa_num_key_value_heads" not in text.values:
        return {}
    heads = AttentionHeads(
        text.count("swa_num_attention_heads", text.count("num_attention_heads")),
        text.count("swa_num_key_value_heads"),
        text.count("swa_head_dim", text.count("head_dim")),
        text.count("swa_v_head_dim", text.count("head_dim")),
    )
    return {"sliding_heads": heads}


def _state_facts(text: Facts, kinds: list[LayerKind]) -> dict[str, Any]:
    if LayerKind.GATED_DELTA_NET in kinds:
        return {
            "state_shape": GatedDeltaNetShape(
                num_key_heads=text.count("linear_num_key_heads"),
                num_value_heads=text.count("linear_num_value_heads"),
                key_head_dim=text.count("linear_key_head_dim"),
                value_head_dim=text.count("linear_value_head_dim"),
                conv_kernel=text.count("linear_conv_kernel_dim"),
            ),
            "state_dtype": _state_dtype(text, "mamba_ssm_dtype"),
            "attention_output_gate": True,
        }
    if LayerKind.MAMBA2 not in kinds:
        return {}
    if "mamba_n_heads" in text.values:  # Granite
        return {
            "state_shape": Mamba2Shape(
                num_heads=text.count("mamba_n_heads"),
                head_dim=text.count("mamba_d_head"),
                state_size=text.count("mamba_d_state"),
                num_groups=text.count("mamba_n_groups", 1),
                conv_kernel=text.count("mamba_d_conv"),
            )
        }
    return {
        "state_shape": Mamba2Shape(
            num_heads=text.count("mamba_num_heads"),
            head_dim=text.count("mamba_head_dim"),
            state_size=text.count("ssm_state_size"),
            num_groups=text.count("n_groups", 1),
            conv_kernel=text.count("conv_kernel"),
        ),
        # The release keeps these states in float32 unless the file says otherwise.
        "state_dtype": _state_dtype(text, "mamba_ssm_cache_dtype") or "float32",
    }


def _state_dtype(text: Facts, key: str) -> str | None:
    dtype = text.text(key)
    if dtype and dtype not in STATE_DTYPES:
        raise text.wrong(key, f"one of {', '.join(STATE_DTYPES)}")
    return dtype or None


def expert_facts(text: Facts, kind: str, layers: int) -> dict[str, Any]:
    """Return routed and shared experts, and which layers have none."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(filter(None, map(text.natural, keys)), 0)
    if not experts:
        return {}
    chosen = text.count("num_experts_per_tok", text.count("top_k_experts", 1))
    if chosen > experts:
        raise text.wrong("num_experts_per_tok", f"at most the {experts} experts")
    dense = _num_dense_layers(text, layers)
    if dense > layers:
        raise ConfigError(
            "first_k_dense_replace or mlp_only_layers must leave at most"
            f" {layers} dense layers in {text.source}; got {dense}"
        )
    inner = text.natural("moe_intermediate_size")
    if "intermediate_size_mlp" in text.values:  # Llama 4
        inner = text.count("intermediate_size")
    shared = next(
        filter(
            None,
            map(
                text.natural,
                (
                    "shared_expert_intermediate_size",
                    "moe_shared_expert_intermediate_size",
                    "shared_intermediate_size",
                ),
            ),
        ),
        None,
    )
    if kind == "gemma4":  # a dense MLP beside the experts of every layer
        shared = text.count("intermediate_size")
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner or None,
        "num_shared_experts": text.natural("n_shared_experts"),
        "shared_expert_intermediate_size": shared,
        "shared_expert_gate": "shared_expert_intermediate_size" in text.values
        and bool(shared),
        "moe_latent_size": text.natural("moe_latent_size") or None,
        "num_dense_layers": dense,
        "router_bias": kind in _ROUTERS_WITH_BIAS,
        "expert_bias": kind == "gpt_oss",
    }


_ROUTERS_WITH_BIAS = frozenset(
    {
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "kimi_k2",
        "mimo_v2_flash",
        "minimax_m2",
        "nemotron_h",
    }
)


def _num_dense_layers(text: Facts, layers: int) -> int:
    """Count the layers of a mixture of experts whose MLP is dense."""
    if pattern := nemotron_pattern(text):  # letters say which are sparse
        return pattern.count("-")
    if isinstance(text.values.get("moe_layer_freq"), list):
        return text.items("moe_layer_freq").count(0)
    for key in ("interleave_moe_layer_step", "decoder_sparse_step"):
        if (step := text.natural(key)) > 1:
            return layers - layers // step
    listed = len(text.items("mlp_only_layers"))
    return text.natural("first_k_dense_replace") or listed


def latent_facts(text: Facts, layers: int) -> dict[str, Any]:
    """Return the widths of latent attention, and of its indexer where it has one."""
    latent = text.natural("kv_lora_rank")
    if not latent:
        return {"v_head_dim": text.natural("v_head_dim")}
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    facts: dict[str, Any] = {key: text.count(key) for key in keys} | {
        "kv_lora_rank": latent,
        "q_lora_rank": text.natural("q_lora_rank") or None,
    }
    if topk := text.natural("index_topk"):
        facts |= {
            "index_num_heads": text.count("index_n_heads"),
            "index_head_dim": text.count("index_head_dim"),
            "index_topk": topk,
            "index_layers": _index_layers(text, layers),
        }
    return facts


def _index_layers(text: Facts, layers: int) -> tuple[int, ...]:
    """Return the layers with an indexer, where some share the choice of one before.

    Source: vLLM 0.33.0, ``models/deepseek_v32/attention.py``.
    """
    pattern = text.values.get("index_topk_pattern")
    if isinstance(pattern, str | list) and pattern:
        shares = [mark == "S" for mark in pattern[:layers]]
        shares += [False] * (layers - len(shares))
    else:
        every = text.count("index_topk_freq", 1)
        given = text.optional("index_skip_topk_offset")
        before = 2 if given is None else given
        shares = [max(at - before + 1, 0) % every != 0 for at in range(layers)]
    own = tuple(at for at, shared in enumerate(shares) if not shared)
    return own if len(own) < layers else ()
