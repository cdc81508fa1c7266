"""GPU datasheets: what a device can hold and how fast it can be at best."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30


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
    source: str = "user"
    """Where the figures come from."""
    family: str = ""
    """Chip behind the name, such as ``h100``; forms of one chip share it."""
    consumer: bool = False
    """Whether it also drives displays, which take memory that no log shows."""

    @property
    def memory_gib(self) -> float:
        """Physical memory in GiB."""
        return self.memory_bytes / GIB


_PCIE4 = 32
_PCIE5 = 64

# name, memory as CUDA reports it (GiB), memory bandwidth (GB/s), dense bf16 and fp8
# (TFLOP/s), GPU-to-GPU and host bandwidth in one direction (GB/s), datasheet.
# GeForce rates are those with FP32 accumulation. Memory of h100, a100 40 GB and the
# two GeForce cards was printed by engines; of the others, by CUDA's own messages.
# fmt: off
_TABLE: tuple[tuple[str, float, float, float, float | None, int, int, str], ...] = (
    ("h100_sxm", 79.19, 3350, 989.4, 1978.9, 450, _PCIE5, "NVIDIA H100 SXM5"),
    ("h100_pcie", 79.19, 2000, 756, 1513, _PCIE5, _PCIE5, "NVIDIA H100 PCIe"),
    ("h200_sxm", 139.81, 4800, 989.4, 1978.9, 450, _PCIE5, "NVIDIA H200 SXM"),
    ("b200_sxm", 178.35, 7700, 2250, 4500, 900, _PCIE5, "NVIDIA Blackwell B200"),
    ("a100_sxm", 79.25, 2039, 312, None, 300, _PCIE4, "NVIDIA A100 80GB SXM4"),
    ("a100_pcie", 79.25, 1935, 312, None, _PCIE4, _PCIE4, "NVIDIA A100 80GB PCIe"),
    ("a100_sxm_40gb", 39.49, 1555, 312, None, 300, _PCIE4, "NVIDIA A100 40GB SXM4"),
    ("l40s", 44.40, 864, 362.05, 733, _PCIE4, _PCIE4, "NVIDIA L40S"),
    ("l4", 22.03, 300, 121, 242.5, _PCIE4, _PCIE4, "NVIDIA L4"),
    ("rtx_pro_6000", 94.97, 1792, 503.8, 1007.6, _PCIE5, _PCIE5,
     "NVIDIA RTX Blackwell PRO architecture whitepaper"),
    ("rtx_4090", 23.516, 1008, 165.2, 330.3, _PCIE4, _PCIE4,
     "NVIDIA Ada architecture whitepaper"),
    ("rtx_3090", 23.58, 936.2, 71, None, _PCIE4, _PCIE4,
     "NVIDIA Ampere GA102 architecture whitepaper"),
)
# fmt: on


def _gpu(
    row: tuple[str, float, float, float, float | None, int, int, str],
) -> GpuSpec:
    name, memory_gib, bandwidth, bf16, fp8, interconnect, host, source = row
    consumer = name.startswith("rtx_") and "pro" not in name
    return GpuSpec(
        name=name,
        memory_bytes=round(memory_gib * GIB),
        memory_bandwidth_bytes_per_s=bandwidth * 1e9,
        bf16_flops_per_s=bf16 * 1e12,
        fp8_flops_per_s=None if fp8 is None else fp8 * 1e12,
        interconnect_bytes_per_s=interconnect * 1e9,
        host_bytes_per_s=host * 1e9,
        source=source,
        family=name if name.startswith("rtx_") else name.split("_")[0],
        consumer=consumer,
    )


GPUS: Mapping[str, GpuSpec] = MappingProxyType({row[0]: _gpu(row) for row in _TABLE})
"""Built-in datasheets by name."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "h100": "h100_sxm",
        "h100_80gb": "h100_sxm",
        "h200": "h200_sxm",
        "b200": "b200_sxm",
        "a100": "a100_sxm",
        "a100_sxm_80gb": "a100_sxm",
        "a100_80gb": "a100_sxm",
        "a100_40gb": "a100_sxm_40gb",
        "rtxpro6000": "rtx_pro_6000",
    }
)


def load_gpu(name: str | Path) -> GpuSpec:
    """Return a built-in datasheet by name, or the one of a YAML or JSON file by path.

    Parameters
    ----------
    name
        A key of `GPUS` (``H100-SXM`` is read as ``h100_sxm``), or the path of a file
        whose keys are the fields of `GpuSpec`.

    Raises
    ------
    ConfigError
        When the name is unknown (the nearest names are given), or the file lacks a
        field or has a wrong one.
    """
    path = Path(name)
    if path.suffix in {".yaml", ".yml", ".json"}:
        return _read_gpu(path)
    key = str(name).lower().replace("-", "_").replace(" ", "_")
    key = _ALIASES.get(key, key)
    if key not in GPUS:
        near = difflib.get_close_matches(key, GPUS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {_known()}"
        raise ConfigError(f"unknown gpu: {str(name)!r}; {hint}")
    return GPUS[key]


def _known() -> str:
    return ", ".join(sorted(GPUS))


def _read_gpu(path: Path) -> GpuSpec:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "not readable"
        raise ConfigError(f"no readable GPU file at {path}: {reason}") from error
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path} must hold YAML or JSON; {line}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of the fields of a GPU")
    return _gpu_from_fields({"name": path.stem, **content}, path)


def _gpu_from_fields(content: dict[str, Any], path: Path) -> GpuSpec:
    known = {field.name for field in fields(GpuSpec)}
    optional = {"source", "family", "consumer"}
    if missing := sorted(known - optional - content.keys()):
        raise ConfigError(f"{missing[0]} is missing in {path}; add it")
    if unknown := sorted(content.keys() - known):
        allowed = ", ".join(sorted(known))
        raise ConfigError(f"{unknown[0]} is no field of a GPU in {path}; use {allowed}")
    for key in sorted(known - optional - {"name"}):
        _check_quantity(key, content[key], path)
    return GpuSpec(**{**content, "memory_bytes": int(content["memory_bytes"])})


def _check_quantity(key: str, value: object, path: Path) -> None:
    if key == "fp8_flops_per_s" and value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(float(str(value))) or float(str(value)) <= 0:
        raise ConfigError(f"{key} must be a positive number in {path}; got {value!r}")
