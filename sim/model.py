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
from sim.model_config import architecture_facts
from sim.weights import count_parameters, quantization_scheme

DTYPE_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float": 4,
    "float32": 4,
}
"""Bytes of an element by vLLM's ``dtype`` name."""

KV_CACHE_DTYPE_BYTES: dict[str, int] = {
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}
"""Bytes of an element by vLLM's ``kv_cache_dtype``, but for "auto", which is the
precision of the model."""


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
    """Tokens of the longest request, stretched as the rope scaling says."""
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    quantization: str | None = None
    """Scheme of the checkpoint, a name that `sim.weights.quantization_scheme` reads,
    or the checkpoint's method where that is not modelled."""
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
    doubts: tuple[str, ...] = ()
    """Why the shape may be counted wrongly, in words; empty for known models."""

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
    if not str(name).strip():
        raise ConfigError(
            f"model must be a bundled name or the path of a config.json; got {name!r}"
        )
    path = Path(name)
    if _is_directory(path):
        path = path / "config.json"
    if path.suffix == ".json":
        return _read_config(path)
    found = _find_bundled(str(name))
    if found is None:
        shown = _shortened(str(name))
        near = difflib.get_close_matches(shown, bundled_models(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"unknown model: {shown!r}; {hint}any other model is read from the path"
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
        When a key is missing or wrong, or the model's shape is not modelled; the
        message names the key.
    """
    return ModelArchitecture(name=name, **architecture_facts(config, source))


def resolved_model(
    model: ModelArchitecture, dtype: str = "auto", quantization: str | None = None
) -> ModelArchitecture:
    """Return the model as the engine runs it.

    Parameters
    ----------
    model
        The checkpoint's architecture.
    dtype, quantization
        The engine's arguments: "auto" and None take the checkpoint's own.

    Raises
    ------
    CapacityError
        When the precision or the scheme is unknown.
    """
    dtype = model.dtype if dtype == "auto" else dtype
    dtype_bytes(dtype)
    quantization = quantization or model.quantization
    quantization_scheme(quantization)
    return replace(model, dtype=dtype, quantization=quantization)


def _read_config(path: Path) -> ModelArchitecture:
    where = _shortened(str(path))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "not readable"
        raise ConfigError(
            f"no readable config.json at {where}: {reason}; give the path of one"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where} must hold JSON; it is nested too deep") from error
    except ValueError as error:  # no JSON, no UTF-8, or a null byte in the path
        reason = _shortened(str(error))
        raise ConfigError(f"{where} must hold JSON; {reason}") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{where} must hold a JSON object; got a {type(config).__name__}"
        )
    name = config.get("_name_or_path")
    if not isinstance(name, str) or not name:
        name = path.parent.name or path.stem
    return model_from_config(config, _shortened(name), where)


def _shortened(text: str, most: int = 200) -> str:
    """Return `text` on one line, and its end only where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"...{line[-most:]}"


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name too long for the file system
        return False


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
