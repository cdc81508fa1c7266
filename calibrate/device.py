"""The datasheet of a GPU: the limits that every fit is bounded by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.hardware.gpus import GpuSpec

# Streaming multiprocessors and L2 bytes by the start of a system's name, longest first:
# NVIDIA's architecture white papers and data sheets.
_CHIPS: Final[dict[str, tuple[int, int]]] = {
    "a100": (108, 40 << 20),
    "h100_pcie": (114, 50 << 20),
    "h100": (132, 50 << 20),
    "h200": (132, 50 << 20),
    "gh200": (132, 50 << 20),
    "b200": (148, 126 << 20),
    "gb200": (148, 126 << 20),
    "b300": (148, 126 << 20),
    "gb300": (148, 126 << 20),
    "l40s": (142, 96 << 20),
    "l4": (58, 48 << 20),
    "rtx_pro_6000": (188, 128 << 20),
    "rtx_4090": (128, 72 << 20),
    "rtx_3090": (82, 6 << 20),
}
_UNKNOWN_CHIP: Final = (132, 50 << 20)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Datasheet of the device that a table was measured on (dense rates)."""

    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    """Of 16-bit matrix products."""
    flops_8bit_per_s: float
    """Of 8-bit ones; the 16-bit rate where the device has no units for them."""
    host_bytes_per_s: float
    link_bytes_per_s: float
    """GPU to GPU, one direction."""
    num_sms: int
    l2_bytes: int

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if key != "name" and not 0 < value < float("inf"):
                raise UserError(
                    f"device.{key} must be a finite number > 0; got {value!r}"
                )

    @classmethod
    def of_gpu(cls, gpu: GpuSpec) -> DeviceFacts:
        num_sms, l2_bytes = chip_facts(gpu.name)
        return cls(
            name=gpu.name,
            bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
            flops_per_s=gpu.bf16_flops_per_s,
            flops_8bit_per_s=gpu.fp8_flops_per_s or gpu.bf16_flops_per_s,
            host_bytes_per_s=gpu.host_bytes_per_s,
            link_bytes_per_s=gpu.interconnect_bytes_per_s,
            num_sms=num_sms,
            l2_bytes=l2_bytes,
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DeviceFacts:
        """Return the facts that `to_json` wrote; other keys are ignored."""
        known = {}
        for key in cls.__slots__:
            if key not in content:
                raise UserError(
                    f"provenance.device.{key} is missing: a fit is bounded by it; "
                    "import or measure the profile again"
                )
            known[key] = content[key]
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def chip_facts(name: str) -> tuple[int, int]:
    """Return streaming multiprocessors and bytes of L2 of the chip in `name`.

    A chip that is not known is taken for an H100: the numbers only shape features of
    a fit (waves of tiles) and the line below which decode points count as warm.
    """
    for prefix in sorted(_CHIPS, key=len, reverse=True):
        if name.startswith(prefix):
            return _CHIPS[prefix]
    return _UNKNOWN_CHIP
