"""GPU datasheets: what a device can hold and how fast it can be at best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Datasheet of a GPU (dense rates, no sparsity)."""

    name: str
    memory_bytes: int
    """Physical memory as the driver reports it, not the catalogue's."""
    memory_bandwidth_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    """None where the device has no FP8 tensor cores."""
    interconnect_bytes_per_s: float
    """GPU-to-GPU bandwidth in one direction (NVLink, or PCIe where there is none)."""
    host_bytes_per_s: float
    """Host-to-device bandwidth in one direction."""
