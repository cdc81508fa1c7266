"""GPU datasheets: what a device can hold and how fast it can be at best."""

from __future__ import annotations

import difflib
import json
import re
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
    fp4_flops_per_s: float | None = None
    """None where the device has no FP4 tensor cores."""
    consumer: bool = False
    """Whether it also drives displays, which take memory that no log shows."""

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB


_RATES = (1e6, 1e20)
_SIZES = (2.0**20, 2.0**50)
"""Bounds of what a GPU file may say, far beyond any device."""
_EXPONENT = re.compile(r"[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]{1,3}")

_PCIE4 = 32
_PCIE5 = 64

# name, memory as CUDA reports it (GiB), memory bandwidth (GB/s), dense bf16 and fp8
# (TFLOP/s), GPU-to-GPU and host bandwidth in one direction (GB/s), datasheet.
# GeForce rates are those with FP32 accumulation. Memory of h100, a100 40 GB and the
# two GeForce cards was printed by engines; of the others, by CUDA's own messages. The
# server edition of the RTX PRO 6000 has slower memory; NVIDIA gives both the same
# rounded tensor rates (1 PFLOP/s bf16 with sparsity), so it has the workstation's.
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
    ("rtx_pro_6000_workstation", 94.97, 1792, 503.8, 1007.6, _PCIE5, _PCIE5,
     "NVIDIA RTX Blackwell PRO architecture whitepaper"),
    ("rtx_pro_6000_server", 94.97, 1597, 503.8, 1007.6, _PCIE5, _PCIE5,
     "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ("rtx_4090", 23.516, 1008, 165.2, 330.3, _PCIE4, _PCIE4,
     "NVIDIA Ada architecture whitepaper"),
    ("rtx_3090", 23.58, 936.2, 71, None, _PCIE4, _PCIE4,
     "NVIDIA Ampere GA102 architecture whitepaper"),
)
# fmt: on


_FP4: Mapping[str, float] = MappingProxyType(
    {
        "b200_sxm": 9000,
        "rtx_pro_6000_workstation": 2015.2,
        "rtx_pro_6000_server": 2015.2,
    }
)
"""Dense FP4 rates (TFLOP/s) of the same datasheets: half of those with sparsity."""


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
        family=_family(name),
        fp4_flops_per_s=_FP4[name] * 1e12 if name in _FP4 else None,
        consumer=consumer,
    )


def _family(name: str) -> str:
    if not name.startswith("rtx_"):
        return name.split("_", maxsplit=1)[0]
    return name.removesuffix("_workstation").removesuffix("_server")


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
        "rtx_pro_6000": "rtx_pro_6000_workstation",
        "rtxpro6000": "rtx_pro_6000_workstation",
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
        near = difflib.get_close_matches(key[:80], GPUS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {_known()}"
        raise ConfigError(f"unknown gpu: {str(name)[:80]!r}; {hint}")
    return GPUS[key]


_FORMS = ("_sxm_40gb", "_sxm", "_pcie", "_workstation", "_server")
"""Ends of our names that drivers do not print."""
_NEAR = 0.1
"""Share by which a device's memory may differ from its datasheet's."""


def datasheet_of(name: str, memory_bytes: int) -> GpuSpec | None:
    """Return the built-in datasheet of a device by the name its driver gives it.

    Forms of one chip are told apart by words in the name, then by memory.
    """
    words = name.lower().replace("-", " ").split()
    fitting = [
        sheet
        for sheet in GPUS.values()
        if _chip(sheet.name) in "_".join(words)
        and ("pcie" in words) == ("pcie" in sheet.name)
    ]
    # both editions of a chip may have the same memory; drivers name one of them
    named = [sheet for sheet in fitting if sheet.name.rpartition("_")[2] in words]
    fitting = named or fitting
    if not fitting:
        return None
    nearest = min(fitting, key=lambda sheet: abs(sheet.memory_bytes - memory_bytes))
    off = abs(nearest.memory_bytes - memory_bytes) / memory_bytes
    return nearest if off < _NEAR else None


def _chip(sheet_name: str) -> str:
    """Return the part of a datasheet's key that drivers print: ``h200``."""
    for form in _FORMS:
        sheet_name = sheet_name.removesuffix(form)
    return sheet_name


def _known() -> str:
    return ", ".join(sorted(GPUS))


def _read_gpu(path: Path) -> GpuSpec:
    try:
        text = path.read_text(encoding="utf-8")
        parse = json.loads if path.suffix == ".json" else yaml.safe_load
        content = parse(text)
    except OSError as error:
        reason = error.strerror or "not readable"
        raise ConfigError(
            f"no readable GPU file at {str(path)[-200:]}: {reason}; give the path of"
            " one, or a built-in name"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} must hold YAML or JSON; {line}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of the fields of a GPU")
    return _gpu_from_fields({"name": path.stem, **content}, path)


def _gpu_from_fields(content: dict[Any, Any], path: Path) -> GpuSpec:
    known = {field.name for field in fields(GpuSpec)}
    texts = {"name", "source", "family"}
    optional = {"source", "family", "consumer", "fp4_flops_per_s"}
    if missing := sorted(known - optional - content.keys()):
        raise ConfigError(f"{missing[0]} is missing in {path}; add it")
    if unknown := sorted(map(str, content.keys() - known)):
        allowed = ", ".join(sorted(known))
        shown = unknown[0][:40]
        raise ConfigError(f"{shown} is no field of a GPU in {path}; use {allowed}")
    checked = dict(content)
    for key in texts & content.keys():
        if not isinstance(content[key], str):
            raise ConfigError(f"{key} must be a string in {path}; {_got(content[key])}")
    if not isinstance(content.get("consumer", False), bool):
        raise ConfigError(
            f"consumer must be true or false in {path}; {_got(content['consumer'])}"
        )
    for key in sorted((known - texts - {"consumer"}) & content.keys()):
        checked[key] = _quantity(key, content[key], path)
    return GpuSpec(**checked | {"memory_bytes": int(checked["memory_bytes"])})


def _quantity(key: str, value: object, path: Path) -> float | None:
    """Return a rate or a size; YAML reads 3e14, without a point or sign, as text."""
    if key in {"fp8_flops_per_s", "fp4_flops_per_s"} and value is None:
        return None
    number = value
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        number = float(value)
    low, high = _SIZES if key == "memory_bytes" else _RATES
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not low <= number <= high
    ):
        unit = key.partition("_")[2].replace("_per_s", "/s").rpartition("_")[2]
        raise ConfigError(
            f"{key} must be a positive number of {unit} from {low:.0e} to {high:.0e}"
            f" in {path}; {_got(value)}"
        )
    return float(number)


def _got(value: object) -> str:
    try:
        return f"got {str(value)[:40]!r}" if isinstance(value, str) else _plain(value)
    except ValueError:  # more digits than Python prints
        return "got a number of thousands of digits"


def _plain(value: object) -> str:
    return f"got {repr(value)[:40]}"
