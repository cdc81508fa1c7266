"""Model architectures: the facts of a Hugging Face ``config.json`` that cost memory.

Bundled facts live in ``sim/models/*.json``, one file a model, in the keys of its
``config.json``; ``aliases.json`` names the checkpoints that share a shape. Each file's
parameters are counted and equal the published total of the checkpoint. Any other model
is read from a ``config.json`` by path.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sim.errors import CapacityError, ConfigError
from sim.weights import count_parameters

DTYPE_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float": 4,
    "float32": 4,
}
"""Bytes of an element by vLLM's ``dtype`` name."""


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A transformer's shape, in the names of its ``config.json``."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    quantization: str | None = None
    """Scheme of the checkpoint, a key of `sim.weights.QUANTIZATION_SCHEMES`."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys pass a norm with weights (one per head dimension)."""
    num_norms_per_layer: int = 2
    attention_sinks: bool = False
    """Whether every head has a learned sink."""
    sliding_window: int | None = None
    """Keys that a sliding (or chunked) layer sees; None where no layer slides."""
    num_sliding_layers: int = 0
    chunked_attention: bool = False
    """Whether the sliding layers see fixed chunks instead (Llama 4)."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    """Layers of a mixture of experts whose MLP is dense."""
    expert_bias: bool = False
    kv_lora_rank: int | None = None
    """Width of MLA's latent; None for ordinary attention."""
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_rotary_positions: int | None = None
    """Positions in the rotary tables; None for `max_position_embeddings`."""
    num_multimodal_parameters: int = 0
    """Parameters of the encoder and its projector; 0 where there is none, or where
    ``config.json`` does not say (see `has_encoder`)."""
    has_encoder: bool = False
    """Whether the model has an encoder for images or sound."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the checkpoint, counted from the shape."""
        return count_parameters(self)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_hidden_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def expert_size(self) -> int:
        """Intermediate width of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary table covers."""
        return self.qk_rope_head_dim or self.head_dim

    def kv_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        """Return KV heads on one rank: at least one, replicated beyond that."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)

    def kv_bytes_per_layer(
        self, tensor_parallel_size: int = 1, kv_itemsize_bytes: int | None = None
    ) -> int:
        """Return the bytes that one token takes in one layer on one rank.

        MLA stores one latent with the rotary key and replicates it over the ranks.
        """
        itemsize = kv_itemsize_bytes or dtype_bytes(self.dtype)
        if self.kv_lora_rank:
            return (self.kv_lora_rank + self.qk_rope_head_dim) * itemsize
        heads = self.kv_heads_per_rank(tensor_parallel_size)
        return 2 * heads * self.head_dim * itemsize

    def kv_bytes_per_token(
        self, tensor_parallel_size: int = 1, kv_itemsize_bytes: int | None = None
    ) -> int:
        """Return the KV bytes of one token over all layers, on one rank.

        Parameters
        ----------
        tensor_parallel_size
            Ranks among which the KV heads are divided.
        kv_itemsize_bytes
            Bytes of a KV element; None for the model's precision.
        """
        per_layer = self.kv_bytes_per_layer(tensor_parallel_size, kv_itemsize_bytes)
        return self.num_hidden_layers * per_layer


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element of vLLM's `dtype`.

    Raises
    ------
    CapacityError
        When the name is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise CapacityError(
            f"unknown dtype: {dtype!r}; use 'auto' or one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]


def bundled_models() -> tuple[str, ...]:
    """Return the Hugging Face names of all bundled models, sorted."""
    return tuple(sorted(_index()))


def load_model(name: str | Path) -> ModelArchitecture:
    """Return a bundled model by name, or the one of a ``config.json`` by path.

    Parameters
    ----------
    name
        A Hugging Face name (case does not matter, ``-Instruct``, ``-Base`` and ``-it``
        may be left out or added), the path of a ``config.json``, or of a directory
        that holds one.

    Raises
    ------
    ConfigError
        When the name is neither (the nearest names are given), or the file is not
        readable or lacks a key.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _read_config(path)
    found = _find_bundled(str(name))
    if found is None:
        near = difflib.get_close_matches(str(name), bundled_models(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"unknown model: {str(name)!r}; {hint}any other model is read from the path"
            " of its config.json"
        )
    facts, quantization = found
    model = model_from_config(facts, str(name), f"the bundled facts of {name}")
    return replace(model, quantization=quantization or model.quantization)


def model_from_config(
    config: dict[str, Any], name: str, source: str
) -> ModelArchitecture:
    """Return the architecture of a parsed ``config.json``.

    Parameters
    ----------
    config
        The parsed file; a multimodal one nests the text model in ``text_config``.
    name, source
        The model's name, and where the facts come from (for messages).

    Raises
    ------
    ConfigError
        When a key is missing or no positive integer; the message names it.
    """
    text = {**config, **config.get("text_config", {})}
    kind = str(text.get("model_type", "")).removesuffix("_text")
    heads = _count(text, "num_attention_heads", source)
    hidden = _count(text, "hidden_size", source)
    encoder = int(config.get("num_multimodal_parameters", 0))
    bias = bool(text.get("attention_bias", False))
    return ModelArchitecture(
        name=name,
        num_hidden_layers=_count(text, "num_hidden_layers", source),
        hidden_size=hidden,
        intermediate_size=_count(text, "intermediate_size", source),
        num_attention_heads=heads,
        num_key_value_heads=_count(text, "num_key_value_heads", source, heads),
        head_dim=_count(text, "head_dim", source, hidden // heads),
        vocab_size=_count(text, "vocab_size", source),
        max_position_embeddings=_count(text, "max_position_embeddings", source),
        dtype=str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", "gemma" in kind)),
        quantization=_quantization_name(config.get("quantization_config")),
        qkv_bias=bias or kind in {"qwen2", "qwen2_moe"},
        attention_output_bias=bias,
        mlp_bias=bool(text.get("mlp_bias", False)),
        qk_norm=kind in {"qwen3", "qwen3_moe", "gemma3"},
        num_norms_per_layer=4 if kind in {"gemma2", "gemma3"} else 2,
        attention_sinks=kind == "gpt_oss",
        expert_bias=kind == "gpt_oss",
        num_rotary_positions=_rotary_positions(text),
        num_multimodal_parameters=encoder,
        has_encoder=bool(encoder or {"vision_config", "audio_config"} & config.keys()),
        **_sliding_facts(text, kind),
        **_expert_facts(text),
        **_latent_facts(text),
    )


def _sliding_facts(text: dict[str, Any], kind: str) -> dict[str, Any]:
    """Count the layers that see a window only.

    ``layer_types`` says so in new files; gemma2 slides on every other layer, and
    Mistral on all of them where the window is given.
    """
    window = text.get("attention_chunk_size") or text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return {}
    layers = int(text["num_hidden_layers"])
    pattern = int(text.get("sliding_window_pattern") or (2 if kind == "gemma2" else 0))
    if "layer_types" in text:
        sliding = sum(kind != "full_attention" for kind in text["layer_types"])
    elif pattern:
        sliding = layers - layers // pattern
    else:
        sliding = layers if kind in {"mistral", "mixtral"} else 0
    if not sliding:
        return {}
    return {
        "sliding_window": int(window),
        "num_sliding_layers": sliding,
        "chunked_attention": "attention_chunk_size" in text,
    }


def _rotary_positions(text: dict[str, Any]) -> int:
    """Return positions in vLLM's rotary tables: linear scaling stretches them."""
    positions = int(text["max_position_embeddings"])
    scaling = text.get("rope_scaling") or {}
    local = positions if text.get("rope_local_base_freq") else 0
    if (scaling.get("rope_type") or scaling.get("type")) == "linear":
        positions = int(positions * float(scaling.get("factor", 1)))
    return positions + local


def _expert_facts(text: dict[str, Any]) -> dict[str, Any]:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(text[key]) for key in keys if text.get(key)), 0)
    if not experts:
        return {}
    dense = text.get("first_k_dense_replace") or len(text.get("mlp_only_layers") or ())
    return {
        "num_experts": experts,
        "num_experts_per_tok": int(text.get("num_experts_per_tok") or 1),
        "moe_intermediate_size": text.get("moe_intermediate_size"),
        "num_shared_experts": int(text.get("n_shared_experts") or 0),
        "num_dense_layers": int(dense),
    }


def _latent_facts(text: dict[str, Any]) -> dict[str, Any]:
    if not text.get("kv_lora_rank"):
        return {}
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    facts: dict[str, Any] = {key: int(text.get(key) or 0) for key in keys}
    return facts | {
        "kv_lora_rank": int(text["kv_lora_rank"]),
        "q_lora_rank": text.get("q_lora_rank"),
    }


def _count(
    config: dict[str, Any], key: str, source: str, default: int | None = None
) -> int:
    if default is not None and config.get(key) is None:
        return default
    if key not in config:
        raise ConfigError(
            f"{key} is missing in {source}; add it, as in the model's own config.json"
        )
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(
            f"{key} must be a positive integer in {source}; got {value!r}"
        )
    return value


def _quantization_name(config: dict[str, Any] | None) -> str | None:
    """Return our scheme's name for a ``quantization_config``, or the method's own."""
    if not config:
        return None
    method = str(config.get("quant_method", ""))
    if method != "compressed-tensors":
        return method or None
    for group in config.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type")
        if bits == 8:
            return "fp8" if kind == "float" else "w8a8"
        if bits == 4 and kind == "int":
            return "w4a16"
    return method


def _read_config(path: Path) -> ModelArchitecture:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "not readable"
        raise ConfigError(
            f"no readable config.json at {path}: {reason}; give the path of one"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} must hold JSON; {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path} must hold a JSON object; got a {type(config).__name__}"
        )
    name = str(config.get("_name_or_path") or path.parent.name or path.stem)
    return model_from_config(config, name, str(path))


def _find_bundled(name: str) -> tuple[dict[str, Any], str | None] | None:
    folded = {known.lower(): known for known in _index()}
    for candidate in _spellings(name.lower()):
        if candidate in folded:
            file_name, quantization = _index()[folded[candidate]]
            return _bundled_json(file_name), quantization
    return None


def _spellings(name: str) -> list[str]:
    suffixes = ("-instruct", "-base", "-it", "-chat")
    bare = next(
        (name.removesuffix(end) for end in suffixes if name.endswith(end)), name
    )
    return [name, bare, *(bare + end for end in suffixes)]


@cache
def _index() -> dict[str, tuple[str, str | None]]:
    """Map every bundled name to its file and quantisation scheme."""
    folder = resources.files("sim") / "models"
    files = {
        entry.name.removesuffix(".json").replace("--", "/", 1): (entry.name, None)
        for entry in folder.iterdir()
        if "--" in entry.name
    }
    index: dict[str, tuple[str, str | None]] = dict(files)
    for alias, target in _bundled_json("aliases.json").items():
        index[alias] = (files[target["model"]][0], target.get("quantization"))
    return index


def _bundled_json(file_name: str) -> dict[str, Any]:
    text = (resources.files("sim") / "models" / file_name).read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts
