"""Layers that propose draft tokens: heads on a target, or a model of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sim.errors import CapacityError
from sim.hardware.models.bundled import load_model
from sim.hardware.models.layers import LayerKind
from sim.hardware.models.weights import (
    WITHIN_TENSOR_RANKS,
    ExpertRanks,
    allocated_bytes,
    tensor_bytes,
    weight_bytes,
    weight_tensors,
)

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.quantization import QuantizationScheme

_JOINED_STATES = {"eagle": 2, "eagle3": 4, "mtp": 2}
"""Vectors of the hidden size that a head projects to one: the token's embedding and the
target's state; of EAGLE-3 states of three layers, and an attention twice as wide.
Source: vLLM 0.33, ``model_executor/models/llama_eagle.py``, ``llama_eagle3.py``,
``deepseek_mtp.py``."""

HEAD_METHODS = tuple(_JOINED_STATES)
"""Methods of ``speculative_config`` whose drafter is a head on the target."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A model, or a head on the target, that proposes drafts.

    Parameters
    ----------
    model
        Its layers.
    method
        vLLM's ``speculative_config.method``.
    """

    model: ModelArchitecture
    method: str

    @property
    def is_head(self) -> bool:
        """Whether it reads the target's hidden states, and shares its embeddings."""
        return self.method in HEAD_METHODS

    def weight_bytes(
        self,
        tensor_parallel_size: int,
        itemsize_bytes: int,
        scheme: QuantizationScheme | None,
        experts: ExpertRanks = WITHIN_TENSOR_RANKS,
    ) -> int:
        """Return the bytes of its own weights on one rank."""
        model, tp = self.model, tensor_parallel_size
        held = weight_bytes(model, tp, itemsize_bytes, scheme, experts)
        if not self.is_head:
            return held
        embedding = next(weight_tensors(model, tp))
        one = allocated_bytes(tensor_bytes(embedding, itemsize_bytes, None))
        return held - embedding.count * one


def drafter_of(
    target: ModelArchitecture, method: str, model: str | None = None
) -> Drafter | None:
    """Return the drafter of a target; None for n-gram look-up.

    Parameters
    ----------
    target
        The model that verifies them.
    method
        vLLM's ``speculative_config.method``.
    model
        Bundled name or ``config.json`` of the drafter's layers; None for `draft_head`.

    Raises
    ------
    CapacityError
        Where a model is needed, or none is.
    ConfigError
        When there is no such model.
    """
    if method == "ngram":
        if model is not None:
            raise CapacityError(
                f"method ngram looks drafts up in the request's own text and takes no "
                f"model; got {model[:80]!r}: leave it out"
            )
        return None
    if model is None and method not in HEAD_METHODS:
        raise CapacityError(
            f"method {method} needs the model that drafts; give model, a bundled name "
            f"or a config.json"
        )
    if model is None:
        return Drafter(draft_head(target, method), method)
    own = load_model(model)
    joined = _JOINED_STATES.get(method, 0)
    return Drafter(replace(own, num_joined_states=joined), method)


def draft_head(target: ModelArchitecture, method: str) -> ModelArchitecture:
    """Return the head of a model as a model of one layer.

    That of ``mtp`` is as the target's last attention layer, with experts where it has
    some, and stored as it is; others have full attention, a dense MLP and the target's
    precision. Embedding and output projection are the target's.

    Parameters
    ----------
    target
        The model.
    method
        One of `HEAD_METHODS`.
    """
    latent = target.kv_lora_rank is not None
    kind = LayerKind.LATENT_ATTENTION if latent else LayerKind.FULL_ATTENTION
    if method == "mtp":
        (*_, kind) = (each for each in target.layer_kinds if each.is_attention)
    else:
        target = replace(
            target,
            num_experts=0,
            num_experts_per_tok=0,
            num_shared_experts=0,
            shared_expert_intermediate_size=None,
            quantization=None,
        )
    return replace(
        target,
        name=f"{method} head of {target.name}",
        num_hidden_layers=1,
        mixed_layer_kinds=(kind,),
        num_dense_layers=0,
        state_shape=None,
        num_multimodal_parameters=0,
        num_joined_states=_JOINED_STATES[method],
    )
