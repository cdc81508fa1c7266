"""Precisions of weights, by the names that tables of kernels give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.costs.measured.geometry import expert_weight_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.hardware.models.architecture import ModelArchitecture

DTYPES_OF_BITS: Final[Mapping[int, tuple[str, ...]]] = {
    16: ("bfloat16", "float16"),
    8: ("fp8", "fp8_block", "int8_wo"),
    4: ("int4_wo", "nvfp4", "w4a16_mxfp4"),
}
"""Bits of a weight to the precisions of tables that are taken for it, best first.

Products of FP8 by blocks come last: their tables hold what the host takes to launch
them, 55 us and more on h100, h200 and b200 whatever the shape."""


def dtypes_of(model: ModelArchitecture, bits: int) -> tuple[str, ...]:
    """Return the precisions of tables that fit products of a model, best first."""
    names = DTYPES_OF_BITS[bits]
    if bits == 4 and (model.quantization or "").startswith("nvfp4"):
        return tuple(sorted(names, key=lambda name: name != "nvfp4"))
    return names


def expert_dtypes(model: ModelArchitecture) -> tuple[str, ...]:
    """Return the precisions of tables that fit the model's experts, best first."""
    scheme = model.quantization or ""
    if scheme.startswith("mxfp4"):
        return ("w4a16_mxfp4",)
    if scheme.startswith("fp8-block"):
        return ("fp8_block", "fp8")
    return dtypes_of(model, expert_weight_bits(model))


def weight_bits(dtype: str) -> int:
    """Return bits an element of ``bfloat16``, ``fp8_block``, ``int4_wo``, ``nvfp4``."""
    if dtype in {"bfloat16", "float16", "half"}:
        return 16
    return 4 if "4" in dtype else 8
