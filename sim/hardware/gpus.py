"""GPU datasheets: what a device can hold and how fast it can be at best."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sim.errors import ConfigError
from workloads.errors import PlainDataError
from workloads.plain import parse_file

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
    is_desktop_card: bool = False
    """Whether it is made for desktops and workstations, where a pair of cards has
    eight lanes each as a rule (`sim.hardware.interconnects.link_of`)."""
    num_sms: int | None = None
    """Streaming multiprocessors, where vLLM's attention is FlashAttention, whose rule
    for common prefixes counts them (`sim.costs.roofline.cascade`)."""
    is_judged: bool = True
    """Whether a measured run or table was held against it; bundled ones say so."""

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB


_RATES = (1e6, 1e20)
_SIZES = (2.0**20, 2.0**50)
"""Bounds of what a GPU file may say, far beyond any device."""
_EXPONENT = re.compile(r"[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]{1,3}")

_PCIE3 = 16
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
    ("rtx_pro_6000_workstation", 94.97, 1792, 503.8, 1007.6, _PCIE5, _PCIE5,
     "NVIDIA RTX Blackwell PRO architecture whitepaper"),
    ("rtx_pro_6000_server", 94.97, 1597, 503.8, 1007.6, _PCIE5, _PCIE5,
     "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ("rtx_4090", 23.516, 1008, 165.2, 330.3, _PCIE4, _PCIE4,
     "NVIDIA Ada architecture whitepaper"),
    ("rtx_3090", 23.58, 936.2, 71, None, _PCIE4, _PCIE4,
     "NVIDIA Ampere GA102 architecture whitepaper"),
)
# The same of GPUs that nothing measured was held against. Memory of the RTX 5090, the
# RTX 5080 and its smaller sisters, the GB10, whose memory is its processor's, too, and
# the T4 was printed by CUDA; of the others it is what drivers print, less half a GiB.
# The T4 and the V100s have no bf16: their rates are those of float16. GPUs of an NVL
# pair or with a bridge reach each other over PCIe beyond it. AMD's rates are peaks, as
# NVIDIA's are; a GPU's links to its seven peers are added up.
_UNJUDGED: tuple[tuple[str, float, float, float, float | None, int, int, str], ...] = (
    ("b300_sxm", 268.1, 7700, 2250, 4500, 900, _PCIE5, "NVIDIA HGX B300"),
    ("gb200", 184.5, 8000, 2500, 5000, 900, 225, "NVIDIA GB200 NVL72"),
    ("gb300", 276.9, 8000, 2500, 5000, 900, 225, "NVIDIA GB300 NVL72"),
    ("gb10", 119.63, 273, 125, 250, 25, 273, "NVIDIA DGX Spark"),
    ("h20", 95.1, 4000, 148, 296, 450, _PCIE5, "NVIDIA H20 SXM5"),
    ("h20_3e", 139.8, 4800, 148, 296, 450, _PCIE5, "NVIDIA H20 141GB HBM3e"),
    ("h100_nvl", 93.1, 3938, 835.5, 1671, _PCIE5, _PCIE5, "NVIDIA H100 NVL"),
    ("h200_nvl", 139.8, 4800, 835.5, 1671, _PCIE5, _PCIE5, "NVIDIA H200 NVL"),
    ("h800_sxm", 79.2, 3350, 989.4, 1978.9, 200, _PCIE5, "NVIDIA H800 SXM5"),
    ("gh200", 95.1, 4000, 989.4, 1978.9, 450, 450, "NVIDIA GH200 96GB HBM3"),
    ("a800_sxm", 79.25, 2039, 312, None, 200, _PCIE4, "NVIDIA A800 80GB SXM4"),
    ("a100_pcie_40gb", 39.49, 1555, 312, None, _PCIE4, _PCIE4, "NVIDIA A100 40GB PCIe"),
    ("a30", 23.5, 933, 165, None, 100, _PCIE4, "NVIDIA A30"),
    ("a10", 22.0, 600, 125, None, _PCIE4, _PCIE4, "NVIDIA A10"),
    ("a10g", 22.0, 600, 70, None, _PCIE4, _PCIE4, "NVIDIA A10G (AWS G5)"),
    ("a40", 44.5, 696, 149.7, None, _PCIE4, _PCIE4, "NVIDIA A40"),
    ("l40", 44.4, 864, 181.05, 362.1, _PCIE4, _PCIE4, "NVIDIA L40"),
    ("l20", 44.5, 864, 119.5, 239, _PCIE4, _PCIE4, "NVIDIA L20"),
    ("l4", 22.03, 300, 121, 242.5, _PCIE4, _PCIE4, "NVIDIA L4"),
    ("rtx_a6000", 47.5, 768, 154.8, None, _PCIE4, _PCIE4, "NVIDIA RTX A6000"),
    ("rtx_a5000", 23.5, 768, 111.1, None, _PCIE4, _PCIE4, "NVIDIA RTX A5000"),
    ("rtx_6000_ada", 47.5, 960, 364.2, 728.5, _PCIE4, _PCIE4,
     "NVIDIA RTX 6000 Ada Generation"),
    ("rtx_4000_ada", 19.5, 360, 81.9, 163.8, _PCIE4, _PCIE4,
     "NVIDIA RTX 4000 Ada Generation"),
    ("t4", 14.75, 320, 65, None, _PCIE3, _PCIE3, "NVIDIA T4"),
    ("v100_sxm", 15.77, 900, 125, None, 150, _PCIE3, "NVIDIA V100 SXM2 16GB"),
    ("v100_sxm_32gb", 31.73, 900, 125, None, 150, _PCIE3, "NVIDIA V100 SXM2 32GB"),
    ("v100_pcie_32gb", 31.73, 900, 112, None, _PCIE3, _PCIE3, "NVIDIA V100 PCIe 32GB"),
    ("v100s_pcie", 31.73, 1134, 130, None, _PCIE3, _PCIE3, "NVIDIA V100S PCIe 32GB"),
    ("rtx_4090_d", 23.516, 1008, 147.1, 294.2, _PCIE4, _PCIE4,
     "NVIDIA GeForce RTX 4090 D: the 4090's rates by its 114 of 128 processors"),
    ("rtx_4080", 15.59, 716.8, 97.5, 194.9, _PCIE4, _PCIE4,
     "NVIDIA Ada architecture whitepaper"),
    ("rtx_4080_super", 15.59, 736.3, 104.4, 208.8, _PCIE4, _PCIE4,
     "NVIDIA GeForce RTX 4080 SUPER"),
    ("rtx_5090", 31.36, 1792, 209.5, 419, _PCIE5, _PCIE5,
     "NVIDIA RTX Blackwell architecture whitepaper"),
    ("rtx_5080", 15.47, 960, 112.6, 225.1, _PCIE5, _PCIE5,
     "NVIDIA RTX Blackwell architecture whitepaper"),
    ("rtx_5070_ti", 15.47, 896, 87.9, 175.8, _PCIE5, _PCIE5,
     "NVIDIA GeForce RTX 5070 Ti"),
    ("rtx_5060_ti", 15.47, 448, 47.4, 94.9, _PCIE4, _PCIE4,
     "NVIDIA GeForce RTX 5060 Ti 16GB: eight lanes of PCIe 5"),
    ("mi300x", 191.5, 5300, 1307.4, 2614.9, 448, _PCIE5, "AMD Instinct MI300X"),
    ("mi325x", 255.5, 6000, 1307.4, 2614.9, 448, _PCIE5, "AMD Instinct MI325X"),
    ("mi355x", 287.5, 8000, 2516.6, 5033.2, 538, _PCIE5, "AMD Instinct MI355X"),
)
# fmt: on


_FP4: Mapping[str, float] = MappingProxyType(
    {
        "b200_sxm": 9000,
        "rtx_pro_6000_workstation": 2015.2,
        "rtx_pro_6000_server": 2015.2,
        "b300_sxm": 13500,
        "gb200": 10000,
        "gb300": 15000,
        "gb10": 500,
        "rtx_5090": 1676,
        "rtx_5080": 900.4,
        "rtx_5070_ti": 703,
        "rtx_5060_ti": 379.5,
        "mi355x": 10066,
    }
)
"""Dense FP4 rates (TFLOP/s) of the same datasheets: half of those with sparsity,
where none without is given."""


_NUM_SMS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("h100_sxm", "h200_sxm", "h100_nvl", "h200_nvl"), 132),
        **dict.fromkeys(("h800_sxm", "gh200"), 132),
        "h100_pcie": 114,
        **dict.fromkeys(("h20", "h20_3e"), 78),
        **dict.fromkeys(("a100_sxm", "a100_pcie", "a100_sxm_40gb"), 108),
        **dict.fromkeys(("a100_pcie_40gb", "a800_sxm"), 108),
        "l40s": 142,
        **dict.fromkeys(("rtx_pro_6000_workstation", "rtx_pro_6000_server"), 188),
        "rtx_5090": 170,
        "rtx_5080": 84,
        "rtx_5070_ti": 70,
        "rtx_5060_ti": 36,
        "gb10": 48,
        "rtx_4080": 76,
        "rtx_4080_super": 80,
        "rtx_4090": 128,
        "rtx_4090_d": 114,
        "rtx_3090": 82,
        "rtx_6000_ada": 142,
        "rtx_4000_ada": 48,
        "rtx_a6000": 84,
        "rtx_a5000": 64,
        "a40": 84,
        "a30": 56,
        "l40": 142,
        "a10": 72,
        "a10g": 80,
        "l20": 92,
        "l4": 58,
    }
)
"""Of the same datasheets; of the A10G, what CUDA prints. None of GPUs before Ampere, of
AMD and of Blackwell data centres, whose attention is another."""


_DRIVES_DISPLAYS = frozenset(
    {"rtx_3090", "rtx_4090", "rtx_4090_d", "rtx_4080", "rtx_4080_super"}
    | {"rtx_5090", "rtx_5080", "rtx_5070_ti", "rtx_5060_ti"}
)


def _gpu(
    row: tuple[str, float, float, float, float | None, int, int, str],
    *,
    is_judged: bool,
) -> GpuSpec:
    name, memory_gib, bandwidth, bf16, fp8, interconnect, host, source = row
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
        consumer=name in _DRIVES_DISPLAYS,
        num_sms=_NUM_SMS.get(name),
        is_desktop_card=name.startswith("rtx_") and not name.endswith("_server"),
        is_judged=is_judged,
    )


_SAME_CHIP: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("h800_sxm", "gh200"), "h100"),
        "v100s_pcie": "v100",
        "rtx_4090_d": "rtx_4090",
        "rtx_4080_super": "rtx_4080",
    }
)
"""Not the A800's: releases ask for the name of the A100 (`default_batch`)."""


def _family(name: str) -> str:
    if name in _SAME_CHIP:
        return _SAME_CHIP[name]
    if not name.startswith("rtx_"):
        return name.split("_", maxsplit=1)[0]
    return name.removesuffix("_workstation").removesuffix("_server")


GPUS: Mapping[str, GpuSpec] = MappingProxyType(
    {
        row[0]: _gpu(row, is_judged=rows is _TABLE)
        for rows in (_TABLE, _UNJUDGED)
        for row in rows
    }
)
"""Built-in datasheets by name."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "h100": "h100_sxm",
        "h100_80gb": "h100_sxm",
        "h100_80gb_sxm": "h100_sxm",
        "h800": "h800_sxm",
        "h200": "h200_sxm",
        "b200": "b200_sxm",
        "b300": "b300_sxm",
        "a100": "a100_sxm",
        "a100_80gb": "a100_sxm",
        "a100_sxm_80gb": "a100_sxm",
        "a100_80gb_pcie": "a100_pcie",
        "a100_40gb": "a100_sxm_40gb",
        "a800": "a800_sxm",
        "a800_sxm_80gb": "a800_sxm",
        "gh200_480gb": "gh200",
        "gh200_96gb": "gh200",
        "h20_141gb": "h20_3e",
        "v100": "v100_sxm",
        "v100_sxm_16gb": "v100_sxm",
        "v100_pcie": "v100_pcie_32gb",
        "v100s": "v100s_pcie",
        "v100s_pcie_32gb": "v100s_pcie",
        "a6000": "rtx_a6000",
        "a5000": "rtx_a5000",
        "dgx_spark": "gb10",
        "rtx_5060_ti_16gb": "rtx_5060_ti",
        "rtx_pro_6000": "rtx_pro_6000_workstation",
        "rtx_6000_pro": "rtx_pro_6000_workstation",
    }
)
_TELL_NOTHING = frozenset(
    {"nvidia", "geforce", "tesla", "amd", "instinct"}
    | {"blackwell", "generation", "edition", "hbm3", "oam", "vf", "ac"}
)
"""Words that drivers print around the name of a GPU."""


def _spelling(name: str) -> str:
    """Return a name without case, spaces, socket numbers and such words."""
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(
        re.sub(r"^sxm\d$", "sxm", word) for word in words if word not in _TELL_NOTHING
    )


_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {_spelling(name): name for name in GPUS}
    | {_spelling(alias): name for alias, name in _ALIASES.items()}
)


def price_name(gpu: str | Path) -> str:
    """Return the name that a price goes by: a built-in's own, or that of the file.

    Examples
    --------
    >>> price_name("H100"), price_name("gpus/my_gpu.yaml")
    ('h100_sxm', 'my_gpu.yaml')
    """
    return _SPELLINGS.get(_spelling(str(gpu)), Path(gpu).name)


def priced_by_name(prices: Mapping[str, float]) -> dict[str, float]:
    """Return prices by `price_name`, however GPUs are spelled.

    Raises
    ------
    ConfigError
        If one GPU has several prices.
    """
    by_name: dict[str, float] = {}
    for gpu, price in prices.items():
        name = price_name(gpu)
        if name in by_name:
            raise ConfigError(
                f"per_gpu_hour: {name} has several prices, by several spellings; "
                f"keep one"
            )
        by_name[name] = float(price)
    return by_name


def load_gpu(name: str | Path) -> GpuSpec:
    """Return a built-in datasheet by name, or the one of a YAML or JSON file by path.

    Parameters
    ----------
    name
        A key of `GPUS` (``NVIDIA H100-SXM5`` is read as ``h100_sxm``, ``RTX4090`` as
        ``rtx_4090``), or the path of a file
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
    key = _SPELLINGS.get(_spelling(str(name)))
    if key is None:
        close = difflib.get_close_matches(
            _spelling(str(name))[:80], _SPELLINGS, n=4, cutoff=0.5
        )
        near = list(dict.fromkeys(_SPELLINGS[each] for each in close))[:3]
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"unknown gpu: {str(name)[:80]!r}; {meant}('kvsim gpus' lists all; any "
            f"other is read from the path of its datasheet, such as my_gpu.yaml)"
        )
    return GPUS[key]


_FORMS = ("_sxm_40gb", "_pcie_40gb", "_sxm", "_pcie", "_nvl", "_workstation", "_server")
"""Ends of our names that drivers do not print."""
_NEAR = 0.1
"""Share by which a device's memory may differ from its datasheet's."""


def datasheet_of(name: str, memory_bytes: int) -> GpuSpec | None:
    """Return the built-in datasheet of a device by the name its driver gives it.

    Forms of one chip are told apart by words in the name, then by memory.
    """
    words = name.lower().replace("-", " ").split()
    printed = f"_{'_'.join(words)}_"
    fitting = [
        sheet
        for sheet in GPUS.values()
        if f"_{_chip(sheet.name)}_" in printed
        and ("pcie" in words) == ("pcie" in sheet.name)
        and ("nvl" in words) == ("nvl" in sheet.name)
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


def _read_gpu(path: Path) -> GpuSpec:
    try:
        text = path.read_text(encoding="utf-8")
        content = parse_file(text, path)
    except OSError as error:
        reason = error.strerror or "not readable"
        raise ConfigError(
            f"no readable GPU file at {str(path)[-200:]}: {reason}; give the path of"
            " one, or a built-in name"
        ) from error
    except PlainDataError as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:  # no UTF-8, or a null byte in the path
        raise ConfigError(f"{path} must hold YAML or JSON; {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of the fields of a GPU")
    return _gpu_from_fields({"name": path.stem, **content}, path)


def _gpu_from_fields(content: dict[Any, Any], path: Path) -> GpuSpec:
    known = {field.name for field in fields(GpuSpec)}
    texts = {"name", "source", "family"}
    known.discard("is_judged")
    flags = {"consumer", "is_desktop_card"}
    optional = {"source", "family", "fp4_flops_per_s", "num_sms"} | flags
    if missing := sorted(known - optional - content.keys()):
        raise ConfigError(f"{missing[0]} is missing in {path}; add it")
    if unknown := sorted(map(str, content.keys() - known)):
        allowed = ", ".join(sorted(known))
        shown = unknown[0][:40]
        raise ConfigError(f"{shown} is no field of a GPU in {path}; use {allowed}")
    checked = dict(content)
    num_sms = content.get("num_sms")
    if num_sms is not None and (type(num_sms) is not int or not 1 <= num_sms <= 4096):
        raise ConfigError(f"num_sms must be 1 to 4096 in {path}; {_got(num_sms)}")
    for key in texts & content.keys():
        if not isinstance(content[key], str):
            raise ConfigError(f"{key} must be a string in {path}; {_got(content[key])}")
    for key in sorted(flags & content.keys()):
        if not isinstance(content[key], bool):
            raise ConfigError(
                f"{key} must be true or false in {path}; {_got(content[key])}"
            )
    for key in sorted((known - texts - flags - {"num_sms"}) & content.keys()):
        checked[key] = _quantity(key, content[key], path)
    return GpuSpec(
        **checked | {"memory_bytes": int(checked["memory_bytes"])}, is_judged=False
    )


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
