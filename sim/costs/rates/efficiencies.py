"""Shares of a datasheet's rates that kernels reach: of all GPUs alike, or by chip."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.hardware.gpus import GpuSpec

Choice = Literal["common", "chip"]
CHOICES: Final = ("common", "chip")
Sharpness = Literal[2, 4]
"""How soon the larger of memory's and compute's seconds alone counts: the order of the
root of their powers. Both are roots of roots, which all platforms round alike."""


@dataclass(frozen=True, slots=True)
class Products:
    """Shares of the datasheet's rates at which a GPU multiplies by weights."""

    bandwidth: float
    """Share of the memory's bandwidth."""
    compute: float
    """Share of the peak of their precision."""
    sharpness: Sharpness = 2


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Shares of the datasheet's rates of a GPU, by kind of kernel."""

    products: Products
    """In 16 bits."""
    fp8_products: Products
    """Of weights and activations of 8 bits."""
    decode_bandwidth: float
    """Of decodes that read a KV cache of 16 bits."""
    fp8_decode_bandwidth: float

    def by_key(self) -> dict[str, float]:
        """Return the values of keys of `RooflineParameters` that are left to these."""
        return {
            "gemm_compute_efficiency": self.products.compute,
            "gemm_bandwidth_efficiency": self.products.bandwidth,
            "fp8_gemm_compute_efficiency": self.fp8_products.compute,
            "decode_bandwidth_efficiency": self.decode_bandwidth,
            "fp8_decode_bandwidth_efficiency": self.fp8_decode_bandwidth,
        }


COMMON: Final = Efficiencies(Products(0.86, 0.8), Products(0.86, 0.5), 0.9, 0.73)
BY_CHIP: Final[Mapping[str, Efficiencies]] = MappingProxyType(
    {
        "h100": Efficiencies(Products(0.88, 0.82, 4), Products(0.75, 0.5), 0.93, 0.8),
        "h200": Efficiencies(
            Products(0.835, 0.805, 4), Products(0.66, 0.54), 0.9, 0.62
        ),
        "b200": Efficiencies(Products(0.83, 0.72), Products(0.59, 0.49), 1.0, 1.0),
        "b300": Efficiencies(Products(0.83, 0.8), Products(0.61, 0.52), 0.99, 1.0),
        "gb200": Efficiencies(Products(0.825, 0.715), Products(0.57, 0.49), 1.0, 1.0),
        "l40s": Efficiencies(Products(0.795, 0.66), Products(0.71, 0.52), 0.83, 0.81),
    }
)
"""Fitted, rounded, to the tables of aiconfigurator-core 0.12 (vLLM 0.14 and 0.24), chip
by chip: products of at least 40 MB of weights with all octaves of tokens up to 8,192
alike, and decodes of heads of 128 whose keys exceed the L2 cache one and a half times.
Published tables of the A100 and of the RTX PRO 6000 differ by 16 and 8 %, and `COMMON`
lies between, so both stay with it."""


CHIP_SOURCE: Final = (
    "aiconfigurator-core 0.12, tables of this chip; see sim/costs/README.md"
)


def soft_maximum(one_s: float, other_s: float, sharpness: Sharpness) -> float:
    """Return the seconds of two limits that both bind near where they meet."""
    one_s, other_s = one_s * one_s, other_s * other_s
    if sharpness == 2:
        return sqrt(one_s + other_s)
    return sqrt(sqrt(one_s * one_s + other_s * other_s))


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """A product of rows with weights, which are read once for all of them.

    Parameters
    ----------
    weights_s
        Seconds to read the weights.
    row_memory_s, row_compute_s
        Seconds to read and write a row, and to multiply it.
    sharpness
        See `Sharpness`.
    """

    weights_s: float
    row_memory_s: float
    row_compute_s: float
    sharpness: Sharpness

    def seconds(self, num_rows: int) -> float:
        memory_s = self.weights_s + self.row_memory_s * num_rows
        return soft_maximum(memory_s, self.row_compute_s * num_rows, self.sharpness)


def efficiencies_of(gpu: GpuSpec, choice: Choice) -> Efficiencies:
    """Return `COMMON`, or the chip's own where `choice` asks and tables tell them."""
    return BY_CHIP.get(gpu.family, COMMON) if choice == "chip" else COMMON


def efficiencies_told(gpu: GpuSpec, choice: Choice) -> dict[str, Any] | None:
    """Return whose efficiencies they are, where they are not those of all."""
    if choice == "common":
        return None
    is_known = gpu.family in BY_CHIP
    return {
        "of": gpu.family if is_known else "common",
        "source": CHIP_SOURCE if is_known else "no table of this chip was fitted",
    }
