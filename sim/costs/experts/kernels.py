"""Rates that fused kernels of routed experts reach, by chip and precision."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from sim.costs.rates.efficiencies import efficiencies_of
from sim.hardware.models.quantization import quantization_scheme

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.costs.rates.efficiencies import Choice
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

Precision = Literal["16 bits", "fp8", "nvfp4", "mxfp4", "packed"]
"""Of the experts' weights; `packed` are integers, or floats of four bits on a GPU
without units for them, which the kernel unpacks."""

_MLP_START_S: Final = 9.4e-6
"""Starts of a dense MLP that `layer_latency_s` has: two products, an activation."""
_ROUTER_START_S: Final = 3.5e-6


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """Shares of a datasheet's rates, and what a layer takes whatever its size."""

    bandwidth: float
    compute: float
    """Of the peak of the precision that is multiplied in."""
    kernels_us: float
    """Sorting the tokens, two products, activation and sum of a layer, to start and to
    drain."""

    def by_key(self) -> dict[str, float]:
        """Return the values of keys of `RooflineParameters` that are left to these.

        The latency is what `layer_latency_s` lacks: it has the starts of a dense MLP.
        """
        added_s = 1e-6 * self.kernels_us - _MLP_START_S + _ROUTER_START_S
        return {
            "moe_bandwidth_efficiency": self.bandwidth,
            "moe_compute_efficiency": self.compute,
            "moe_layer_latency_s": max(added_s, 0.0),
        }


COMMON: Final[Mapping[Precision, ExpertKernels]] = MappingProxyType(
    {
        "16 bits": ExpertKernels(0.86, 0.5, 25.0),
        "fp8": ExpertKernels(0.84, 0.25, 30.0),
        "nvfp4": ExpertKernels(0.8, 0.3, 25.0),
        "mxfp4": ExpertKernels(0.8, 0.45, 10.0),
        "packed": ExpertKernels(0.83, 0.5, 10.0),
    }
)
_HOPPER_PACKED: Final = ExpertKernels(0.66, 0.18, 40.0)
_BLACKWELL: Final[Mapping[Precision, ExpertKernels]] = {
    "16 bits": ExpertKernels(0.91, 0.36, 15.5),
    "fp8": ExpertKernels(0.82, 0.16, 28.0),
    "nvfp4": ExpertKernels(0.8, 0.29, 17.0),
    "mxfp4": ExpertKernels(0.46, 0.21, 20.0),
    "packed": ExpertKernels(0.47, 0.09, 40.0),
}
BY_CHIP: Final[Mapping[str, Mapping[Precision, ExpertKernels]]] = MappingProxyType(
    {
        "a100": {"16 bits": ExpertKernels(0.81, 0.32, 27.5)},
        "h100": {
            "16 bits": ExpertKernels(0.91, 0.47, 30.5),
            "fp8": ExpertKernels(0.88, 0.25, 41.0),
            "mxfp4": ExpertKernels(0.72, 0.42, 35.5),
            "packed": ExpertKernels(0.82, 0.19, 42.0),
        },
        "h200": {
            "16 bits": ExpertKernels(0.91, 0.5, 32.5),
            "fp8": ExpertKernels(0.84, 0.24, 41.0),
            "mxfp4": ExpertKernels(0.55, 0.42, 35.0),
            "packed": _HOPPER_PACKED,
        },
        "b200": _BLACKWELL,
        "b300": _BLACKWELL,
        "gb200": _BLACKWELL,
        "l40s": {
            "16 bits": ExpertKernels(0.81, 0.53, 0.0),
            "fp8": ExpertKernels(0.79, 0.46, 0.0),
            "mxfp4": ExpertKernels(0.77, 0.45, 6.0),
            "packed": ExpertKernels(0.83, 0.52, 0.0),
        },
        "rtx_pro_6000": {
            "16 bits": ExpertKernels(0.97, 0.4, 25.5),
            "fp8": ExpertKernels(0.95, 0.29, 31.0),
            "nvfp4": ExpertKernels(0.88, 0.49, 50.0),
            "mxfp4": ExpertKernels(0.87, 0.42, 15.0),
            "packed": ExpertKernels(0.93, 0.51, 10.0),
        },
    }
)
"""Fitted, rounded, to the tables of aiconfigurator-core 0.12 (vLLM 0.24; of the A100
0.14), balanced tokens and a mild power law alike, up to 8,192 tokens on one to eight
ranks, as if their tokens chose freely: half of the points are within 9 to 15 %, and
within 5 to 15 with the experts that these really touch. Without the start half of those
of up to 8 tokens were 12 to 71 % too short. Experts of an L40S show none: its L2 cache
hides it. Compute of 16 bits on an RTX PRO 6000 is between that table and
LLMServingSim's."""
START_INTERVAL_S: Final = (0.0, 48e-6)
EXPERT_KERNELS: Final = (
    "MoE tables of aiconfigurator-core 0.12, by chip and precision; see "
    "sim/costs/README.md"
)


def precision_of(model: ModelArchitecture, gpu: GpuSpec) -> Precision:
    """Return in what a GPU multiplies the experts of a model."""
    scheme = quantization_scheme(model.quantization)
    if scheme is None:
        return "16 bits"
    if scheme.multiplies_fp4 and gpu.fp4_flops_per_s is not None:
        return "nvfp4"
    if scheme.quantized_activation and gpu.fp8_flops_per_s is not None:
        return "fp8"
    return "mxfp4" if str(model.quantization).startswith("mxfp4") else "packed"


def reached_by_key(
    model: ModelArchitecture, gpu: GpuSpec, choice: Choice
) -> dict[str, float]:
    """Return the shares that kernels reach, by their key of `RooflineParameters`."""
    experts = expert_kernels(gpu, precision_of(model, gpu), choice)
    return efficiencies_of(gpu, choice).by_key() | experts.by_key()


def expert_kernels(gpu: GpuSpec, precision: Precision, choice: Choice) -> ExpertKernels:
    """Return the chip's own where `choice` asks and tables tell them, or the usual."""
    own = BY_CHIP.get(gpu.family, {}) if choice == "chip" else {}
    return own.get(precision, COMMON[precision])
