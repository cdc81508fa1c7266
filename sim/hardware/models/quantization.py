"""Quantisation schemes: what weights weigh in them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from sim.errors import CapacityError, ConfigError


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How a scheme stores linear layers (`weight_bits`) and their scales."""

    weight_bits: float
    group_size: int | None
    """Input elements per scale; None is one scale per output row."""
    scale_bytes: float
    group_rows: int = 1
    """Output rows that share those scales."""
    only_experts: bool = False
    only_mlps: bool = False
    """Whether attention, and layers with a state, keep the model's precision."""
    left_part: str = ""
    """The `WeightTensor.part` that keeps it."""
    has_head: bool = False
    """Whether an output head of its own is stored so, too."""
    others: QuantizationScheme | None = None
    """How the projections are stored that it leaves out, if not as they were."""
    quantized_activation: bool = False
    """Whether the layer's input is copied at one byte an element."""
    multiplies_fp4: bool = False
    """Whether a GPU with FP4 units multiplies in four bits."""
    needs_fp8_units: bool = False
    """Whether the input stays as it is on a GPU without FP8 units."""

    def quantizes_activation(self, has_fp8_units: bool) -> bool:
        """Return whether inputs are copied on a GPU with or without FP8 units."""
        return self.quantized_activation and (has_fp8_units or not self.needs_fp8_units)


_INT8 = QuantizationScheme(8, None, 4, quantized_activation=True)
QUANTIZATION_SCHEMES: dict[str, QuantizationScheme] = {
    "fp8": replace(_INT8, needs_fp8_units=True),
    "fp8-block128": replace(
        _INT8, group_size=128, group_rows=128, needs_fp8_units=True
    ),
    # One scale a tensor, of weights and of inputs, which are known beforehand.
    "fp8-tensor": replace(_INT8, scale_bytes=0, needs_fp8_units=True),
    "w8a8": _INT8,
    "int8": _INT8,
    # One scale a row in the model's precision; inputs stay as they are.
    "w8a16": QuantizationScheme(8, None, 2),
    # E2M1 weights with one byte of scale per 32.
    "mxfp4": QuantizationScheme(4, 32, 1, only_experts=True),
    # E2M1 weights with one byte of scale per 16.
    "nvfp4": QuantizationScheme(4, 16, 1, multiplies_fp4=True),
}
"""Scheme by vLLM's ``quantization`` name; those of packed integers are in
`PACKED_BITS`. Embeddings, head, norms, routers and biases keep the model's precision
in all of them. Source: vLLM ``model_executor/layers/quantization``."""

PACKED_BITS: dict[str, tuple[int, ...]] = {
    "gptq": (4, 2, 3, 8),
    "gptq_marlin": (4, 8),
    "awq": (4,),
    "awq_marlin": (4,),
    "w4a16": (4,),
}
"""Bits that each scheme of packed integers has, the usual ones first. A name may add
bits and group, as in ``gptq-8bit-g32`` (``gchannel`` for one group a row)."""
CONTAINERS = frozenset(
    {"compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed"}
)
"""Methods whose schemes only a checkpoint tells."""
USUAL_GROUP_SIZE = 128
_PARTS: dict[str, dict[str, Any]] = {
    "-mlp": {"only_mlps": True},
    "-mlp-head": {"only_mlps": True, "has_head": True},
    "-experts": {"only_experts": True},
    "-but-attention": {"left_part": "attention"},
    "-but-states": {"left_part": "states"},
}
"""Ends of names of schemes that only part of a model is stored in; the projections
of the rest may be in another, as of ``nvfp4-mlp+fp8-tensor``."""
_PACKED_NAME = re.compile(r"([a-z0-9_]+?)(?:-(\d)bit)?(?:-g(\d{1,9}|channel))?")


def packed_scheme_name(method: str, bits: int, group_size: int | None) -> str:
    """Return the name of a scheme of packed integers; -1 and None are a group a row."""
    if method not in PACKED_BITS:
        known = ", ".join(PACKED_BITS)
        raise ConfigError(f"quant_method must be of {known}; got {method[:40]!r}")
    usual = PACKED_BITS[method]
    if bits not in usual:
        known = ", ".join(map(str, sorted(usual)))
        raise ConfigError(
            f"quantization of {method} must have bits of {known}; got {bits}"
        )
    name = method if bits == usual[0] else f"{method}-{bits}bit"
    if group_size is None or group_size <= 0:
        return f"{name}-gchannel"
    return name if group_size == USUAL_GROUP_SIZE else f"{name}-g{group_size}"


def quantization_scheme(name: str | None) -> QuantizationScheme | None:
    """Return the scheme of that name, or None for an unquantised model."""
    if name is None:
        return None
    if name in CONTAINERS:
        raise CapacityError(
            f"quantization must name a scheme: {name!r} says neither bits"
            " nor groups; use 'fp8', 'w8a8' or 'w4a16', or the path of a config.json"
        )
    first, joined, rest = name.partition("+")
    if joined:
        return replace(_scheme(first), others=_scheme(rest))
    return _scheme(name)


def _scheme(name: str) -> QuantizationScheme:
    whole, part = name, {}
    for ending, fields in _PARTS.items():
        if name.endswith(ending):
            whole, part = name.removesuffix(ending), fields
    scheme = QUANTIZATION_SCHEMES.get(whole) or _packed_scheme(whole)
    if scheme is None:
        known = ", ".join(sorted({*QUANTIZATION_SCHEMES, *PACKED_BITS}))
        raise CapacityError(
            f"unknown quantization: {name[:40]!r}; use one of {known}, or, for a"
            " checkpoint's own scheme, the path of its config.json as the model"
        )
    return replace(scheme, **part) if part else scheme


def held_scheme_name(
    asked: str | None, of_checkpoint: str | None, checkpoint: str
) -> str | None:
    """Return the scheme in which an engine holds a checkpoint.

    Parameters
    ----------
    asked
        The engine's ``quantization``, or None for the checkpoint's own.
    of_checkpoint
        The scheme that it is stored in, or None.
    checkpoint
        Its name, for the refusal.

    Raises
    ------
    CapacityError
        If the scheme asked for is unknown, or not the kind of the checkpoint's.

    Notes
    -----
    Source: vLLM 0.11.2 and 0.33, ``vllm/config/model.py`` (`_verify_quantization`):
    only a checkpoint without a scheme is quantised when it is loaded, and a method such
    as ``fp8`` or ``awq_marlin`` reads groups and parts of the checkpoint.
    """
    if asked is None or (of_checkpoint is not None and asked in CONTAINERS):
        return of_checkpoint
    quantization_scheme(asked)
    if of_checkpoint is None:
        return asked
    if _kind(asked) == _kind(of_checkpoint):
        return asked if "-" in asked else of_checkpoint
    raise CapacityError(
        f"quantization is {asked!r}, and the checkpoint {checkpoint[:60]!r} is stored"
        f" in {of_checkpoint!r}, which no engine turns into another; leave quantization"
        " out, or name a checkpoint that is not quantised"
    )


def _kind(name: str) -> str:
    """Return the kind of a scheme: its layouts of groups and scales are left out."""
    whole = name.partition("-")[0].removesuffix("_marlin")
    return "int8" if whole == "w8a8" else whole


def _packed_scheme(name: str) -> QuantizationScheme | None:
    matched = _PACKED_NAME.fullmatch(name)
    usual = PACKED_BITS.get(matched[1]) if matched else None
    if not matched or not usual:
        return None
    bits = int(matched[2] or usual[0])
    group = matched[3] or USUAL_GROUP_SIZE
    group_size = None if group == "channel" else int(group)
    if bits not in usual or group_size == 0:
        return None
    # A scale in 16 bits, and a zero point where the scheme has one.
    scale_bytes = 2.0 if matched[1] == "w4a16" else 2 + bits / 8
    return QuantizationScheme(bits, group_size, scale_bytes)
