"""From the ``quantization_config`` of a checkpoint to the name of a scheme."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sim.hardware.models.quantization import packed_scheme_name

if TYPE_CHECKING:
    from sim.hardware.models.facts import Facts


def quantization_name(config: Facts) -> str | None:
    """Return the scheme of a ``quantization_config``, or the name of its method."""
    if not config.values:
        return None
    algorithm = config.text("quant_algo")  # which ModelOpt alone tells
    method = config.text("quant_method") or ("modelopt" if algorithm else "")
    if not method:
        raise config.wrong("quant_method", "the name of a method")
    if method.split("_")[0] in {"gptq", "awq"}:
        bits = "w_bit" if "w_bit" in config.values else "bits"
        group = "q_group_size" if "q_group_size" in config.values else "group_size"
        size = config.optional(group, least=-1)
        if size is None:
            raise config.wrong(group, "the weights of a group, or -1")
        return packed_scheme_name(method, config.count(bits), size)
    if method == "modelopt" and algorithm == "MIXED_PRECISION":
        return _mixed_name(config.mapping("quantized_layers")) or method
    name = None
    if method == "fp8" and config.items("weight_block_size"):
        name = "fp8-block128"
    elif method == "fp8" and config.text("activation_scheme") == "static":
        name = "fp8-tensor"
    elif method == "modelopt":
        name = _ALGORITHMS.get(algorithm)
    elif method == "compressed-tensors":
        groups = config.mapping("config_groups")
        names = {_group_name(groups.mapping(key)) for key in groups.values}
        name = names.pop() if len(names) == 1 else None
    return _of_part(name, config) if name else method


def kv_cache_dtype_name(config: Facts, *, is_latent: bool) -> str | None:
    """Return the precision in which a checkpoint asks its cache to be kept, if it does.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/utils/torch_utils.py`` (`get_kv_cache_quant_algo_string`)
    and ``model_executor/layers/attention/attention.py``; layers of latent attention do
    not read the scheme of compressed-tensors.
    """
    method = config.text("quant_method")
    if method.startswith("modelopt"):
        inner = (
            config.mapping("quantization")
            if "quantization" in config.values
            else config
        )
        keys = ("kv_cache_scheme", "kv_cache_quant_algo")
        places = [(facts, key) for key in keys for facts in (inner, config)]
        asked = next((f.values[key] for f, key in places if f.values.get(key)), None)
        if isinstance(asked, dict):
            return _dtype_of_scheme(asked)
        return _CACHE_ALGORITHMS.get(str(asked).lower())
    if method != "compressed-tensors" or is_latent:
        return None
    scheme = config.mapping("kv_cache_scheme").values
    if config.values.get("kv_cache_scheme") is None:
        return None
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise config.wrong(
            "kv_cache_scheme", "floats of 8 bits, as the engine takes it"
        )
    return "fp8"


def _dtype_of_scheme(scheme: dict[str, Any]) -> str | None:
    """Return the precision of a scheme of ModelOpt; None for one not obeyed."""
    if scheme.get("type") != "float":
        return None
    if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
        return _CACHE_ALGORITHMS["fp8"]
    return _CACHE_ALGORITHMS["nvfp4"] if scheme.get("num_bits") == 4 else None


_CACHE_ALGORITHMS = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_NVFP4_GROUP = 16
_FOUR_BITS = frozenset({"NVFP4", "W4A16_NVFP4"})
_ALGORITHMS = {"FP8": "fp8-tensor", "NVFP4": "nvfp4"}
_WHOLE_ATTENTION = re.compile(r"attn(\W*|\.(q|q_b|kv_b)_proj)$")
_WHOLE_MIXER = re.compile(r"mixer\.q_proj$")
_MLP = re.compile(r"\b(mlp|(shared_)?experts?)\b")
_SHARED_EXPERTS = re.compile(r"shared_experts?\W*$")


def _of_part(name: str, config: Facts) -> str:
    """Return the name of a scheme that leaves out the modules of ``ignore``."""
    listed = [str(module) for module in config.items("ignore")]
    if any(map(_WHOLE_MIXER.search, listed)):
        return f"{name}-but-attention"
    if not any(map(_WHOLE_ATTENTION.search, listed)):
        return name
    only_experts = any(map(_SHARED_EXPERTS.search, listed))
    return f"{name}-experts" if only_experts else f"{name}-mlp"


def _mixed_name(layers: Facts) -> str | None:
    """Return the scheme of ModelOpt's MLPs in four bits and the rest in FP8, if it is.

    Layers have names such as ``model.layers.0.self_attn.q_proj``.
    """
    kinds: dict[str, set[str]] = {"head": set(), "mlp": set(), "rest": set()}
    for name in layers.values:
        kind = "mlp" if _MLP.search(name) else "rest"
        algorithm = layers.mapping(name).text("quant_algo")
        kinds["head" if name.endswith("lm_head") else kind].add(algorithm)
    is_known = kinds["mlp"] <= _FOUR_BITS and kinds["rest"] <= {"FP8"}
    if not kinds["mlp"] or not is_known or not kinds["head"] <= _FOUR_BITS:
        return None
    name = "nvfp4-mlp-head" if kinds["head"] else "nvfp4-mlp"
    return f"{name}+fp8-tensor" if kinds["rest"] else name


def _fp8_name(strategy: str, *, is_dynamic: bool) -> str:
    if strategy == "block":
        return "fp8-block128"
    return "fp8" if is_dynamic or strategy != "tensor" else "fp8-tensor"


def _group_name(group: Facts) -> str | None:
    """Return the scheme of one of the groups of compressed-tensors."""
    weights = group.mapping("weights")
    bits, kind = weights.natural("num_bits"), weights.text("type")
    size = weights.optional("group_size", least=-1)
    if bits == 8:
        inputs = group.mapping("input_activations")
        if kind != "float":
            return "w8a8" if inputs.values else "w8a16"
        return _fp8_name(weights.text("strategy"), is_dynamic=inputs.flag("dynamic"))
    if bits == 4 and kind == "float" and size == _NVFP4_GROUP:
        return "nvfp4"
    if bits == 4 and kind == "int":
        if weights.text("strategy") == "channel":
            size = -1
        return packed_scheme_name("w4a16", bits, size)
    return None
