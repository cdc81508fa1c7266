"""Provenance of a GPU, its host and the software, and the GPU's peak rates."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from calibrate.harness.device import Physics
from calibrate.kernels.cuda_compile import find_nvcc, nvcc_version
from sim.hardware.gpus import datasheet_of

SALT = b"kvsim profile"
FLOPS_PER_CLOCK = {8: 2048, 9: 4096, 10: 8192}
"""Dense 16-bit operations a clock and multiprocessor, by compute capability."""
_RATES = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Why clocks are low, by the driver's present and former name."""


def physics_of(device: torch.device) -> Physics:
    """Return the device's peak rates: of its datasheet, else from its clocks."""
    properties = torch.cuda.get_device_properties(device)
    sheet = datasheet_of(properties.name, properties.total_memory)
    if sheet is not None:
        return Physics.of_sheet(sheet)
    # torch names clocks in kHz, from 2.6 on; both edges of the memory clock count
    width_bytes = getattr(properties, "memory_bus_width", 5120) / 8
    memory = 2e3 * getattr(properties, "memory_clock_rate", 3_200_000) * width_bytes
    per_clock = FLOPS_PER_CLOCK.get(properties.major, 1024)
    clock = 1e3 * getattr(properties, "clock_rate", 1_980_000)
    flops = per_clock * properties.multi_processor_count * clock
    return Physics(memory, flops, 2 * flops, 64e9, 64e9)


def facts_of(device: torch.device) -> dict[str, Any]:
    """Return provenance of device, host and software; no host names, no paths."""
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "")) or None
    identity = (uuid or "unknown").encode()
    found = versions(uuid)
    return {
        "kind": "measured",
        "device": {
            "name": properties.name,
            "num_sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "uuid": hashlib.sha256(SALT + identity).hexdigest()[:16],
            "virtualised": _virtualised(),
            "driver": found["driver"],
            "cuda": found["cuda"],
        },
        "host": {"cpu": _processor(), "system": platform.system()},
        "versions": found,
    }


def versions(uuid: str | None = None) -> dict[str, str | None]:
    """Return the versions that matter to a kernel's time; None for missing ones."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": _smi("driver_version", uuid) or _loaded_driver(),
    }
    packages = ("torch", "triton", "vllm", "flashinfer-python")
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    nvcc = find_nvcc()
    found["nvcc"] = nvcc_version(nvcc) if nvcc else None
    return found


def clock_rates(device: torch.device) -> dict[str, Any]:
    """Return clocks, temperature, power and reasons to throttle; empty if unknown."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    for reasons in _REASONS:
        answer = _smi(",".join((*_RATES, reasons)), str(uuid) if uuid else None)
        if answer is not None:
            break
    else:
        return {}
    rates: dict[str, Any] = {}
    values = [value.strip() for value in answer.split(",")]
    for name, value in zip((*_RATES, "throttle_reasons"), values, strict=False):
        try:
            rates[name] = float(value)
        except ValueError:
            rates[name] = value
    return rates


def _smi(query: str, uuid: str | None) -> str | None:
    """Ask nvidia-smi, which reads and sets nothing, about one device.

    By its UUID: the tool counts all devices of the machine, and torch those it may use.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    if uuid is not None:
        command.append(f"--id=GPU-{uuid.removeprefix('GPU-')}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def _loaded_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def _processor() -> str:
    lines = _cpuinfo()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def _virtualised() -> bool:
    flags = [line for line in _cpuinfo() if line.startswith("flags")]
    return bool(flags) and "hypervisor" in flags[0].split()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
