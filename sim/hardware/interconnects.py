"""Links between GPUs, as data: what one can send at best, and how they are wired."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from sim.errors import ConfigError
from workloads.errors import PlainDataError
from workloads.plain import parse_file

if TYPE_CHECKING:
    from sim.hardware.gpus import GpuSpec


All2AllBackend = Literal[
    "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"
]
GATHERING: Final = "allgather_reducescatter"
"""The release's default."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """A link between GPUs."""

    name: str
    bytes_per_s: float
    """Of one GPU in one direction."""
    is_switched: bool
    """Whether any two GPUs have a path of their own, so that each may read the memory
    of all others at once."""
    hop_s: float
    """Seconds from one GPU to the next, where messages go around."""
    max_gpus: int
    """GPUs that it connects; beyond them a network does."""
    source: str = "user"
    has_peer_access: bool = True
    """Whether GPUs read each other's memory; without, all goes through the host's, and
    `bytes_per_s` is what is left with both directions busy."""


_NVLINK = "NVIDIA datasheet, half of what both directions have together"
_PCIE = "PCI-SIG, 16 lanes"
_IB = "InfiniBand Trade Association, four lanes, one port a GPU"
_RTX = "hops: aiconfigurator, all-reduce of the RTX PRO 6000"

_NO_PEER_SHARES = (0.28, 0.42, 0.53)
"""Least, median and most of the lanes' rate: see `_NO_PEER`."""
_LANES_SHARE: Final = 27 / 64
"""Of the lanes' rate that a class has, as the table rounds it: at most."""
_NO_PEER = (
    "0.42 of 16 lanes (0.28 to 0.48): copies both ways at once without peer access, "
    "published for 8 machines of PCIe 3 to 5; NCCL's rings on three of PCIe 3 to 5 "
    "reach 0.40 to 0.43, on a fourth of PCIe 5 0.28"
)
_X8_NO_PEER = (
    "0.42 of 8 lanes, as of 16 by copies published for 8 machines; those of two pairs "
    "at 8 lanes of PCIe 4 and 5, which had no part in it, reach 0.53 and 0.47"
)
_SHARED_NO_PEER = (
    "0.25 of 16 lanes: NCCL's ring between two GPUs behind one PCIe switch without "
    "peer access, which share its 16 lanes to the host; one machine of PCIe 3"
)
HOST_HOP_S: Final = 0.65e-6
"""From one GPU to the next through the memory of the host."""
_HOST_HOP = 1e6 * HOST_HOP_S

# name, bytes a second (GB/s) one way, switched, hop (us), GPUs, source
_TABLE: tuple[tuple[str, float, bool, float, int, str], ...] = (
    ("nvlink3", 300, True, 1.0, 8, f"{_NVLINK}: A100 SXM"),
    ("nvlink4", 450, True, 1.0, 8, f"{_NVLINK}: H100, H200 SXM"),
    ("nvlink5", 900, True, 1.0, 8, f"{_NVLINK}: B200"),
    ("nvlink5_nvl72", 900, True, 1.0, 72, f"{_NVLINK}: GB200 NVL72"),
    ("pcie3", 16, False, 2.0, 8, f"{_PCIE} of 3.0; {_RTX}"),
    ("pcie4", 32, False, 2.0, 8, f"{_PCIE} of 4.0; {_RTX}"),
    ("pcie5", 64, False, 2.0, 8, f"{_PCIE} of 5.0; {_RTX}"),
    ("pcie6", 128, False, 2.0, 8, f"{_PCIE} of 6.0; {_RTX}"),
    ("pcie3_no_peer", 6.7, False, _HOST_HOP, 8, _NO_PEER),
    ("pcie4_no_peer", 13.4, False, _HOST_HOP, 8, _NO_PEER),
    ("pcie5_no_peer", 27, False, _HOST_HOP, 8, _NO_PEER),
    ("pcie3_x8_no_peer", 3.35, False, _HOST_HOP, 8, _X8_NO_PEER),
    ("pcie4_x8_no_peer", 6.7, False, _HOST_HOP, 8, _X8_NO_PEER),
    ("pcie5_x8_no_peer", 13.4, False, _HOST_HOP, 8, _X8_NO_PEER),
    ("pcie3_shared_no_peer", 4, False, _HOST_HOP, 2, _SHARED_NO_PEER),
    ("pcie4_shared_no_peer", 8, False, _HOST_HOP, 2, _SHARED_NO_PEER),
    ("pcie5_shared_no_peer", 16, False, _HOST_HOP, 2, _SHARED_NO_PEER),
    ("nvlink3_bridge", 56, False, 1.0, 2, f"{_NVLINK}: A40, RTX A6000"),
    ("nvlink4_bridge", 300, True, 1.0, 2, f"{_NVLINK}: H100 NVL"),
    ("xgmi3", 448, True, 1.5, 8, "AMD datasheet, seven links: MI300X, MI325X"),
    ("xgmi4", 538, True, 1.5, 8, "AMD datasheet, seven links: MI355X"),
    ("infiniband_hdr", 25, False, 5.0, 65_536, f"{_IB}: 200 Gb/s"),
    ("infiniband_ndr", 50, False, 5.0, 65_536, f"{_IB}: 400 Gb/s"),
    ("infiniband_xdr", 100, False, 5.0, 65_536, f"{_IB}: 800 Gb/s"),
)

INTERCONNECTS: Mapping[str, Interconnect] = MappingProxyType(
    {
        name: Interconnect(
            name,
            rate * 1e9,
            switched,
            hop * 1e-6,
            gpus,
            source,
            not name.endswith("_no_peer"),
        )
        for name, rate, switched, hop, gpus, source in _TABLE
    }
)
"""Built-in links by name."""


DEFAULT_NETWORK = "infiniband_ndr"
"""The default network between nodes: a port a GPU, as in a DGX H100 or H200."""

_PCIE_BYTES_PER_S: Final = {3: 16e9, 4: 32e9, 5: 64e9}
"""Of 16 lanes, by generation."""
_PAIR: Final = 2
_SWITCHED_FROM_BYTES_PER_S = 200e9
"""GPUs whose datasheet gives as much reach each other over NVLink switches."""


def load_interconnect(given: str | Mapping[str, Any]) -> Interconnect:
    """Return a built-in link by name, or one of the user's own.

    Parameters
    ----------
    given
        A key of `INTERCONNECTS`, the path of a YAML or JSON file, or a mapping; the
        last two hold the fields of `Interconnect`.

    Raises
    ------
    ConfigError
        When the name is unknown (the nearest names are given), or a field is missing,
        unknown or wrong.
    """
    if isinstance(given, Mapping):
        return _from_fields(given, "the interconnect")
    path = Path(given)
    if path.suffix in {".yaml", ".yml", ".json"}:
        return _read(path)
    key = given.lower().replace("-", "_").replace(" ", "_")
    if key not in INTERCONNECTS:
        near = difflib.get_close_matches(key[:80], INTERCONNECTS, n=3, cutoff=0.4)
        known = ", ".join(sorted(INTERCONNECTS))
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {known}"
        raise ConfigError(f"unknown interconnect: {given[:80]!r}; {hint}")
    return INTERCONNECTS[key]


def link_of(gpu: GpuSpec, num_gpus: int = 1) -> Interconnect:
    """Return the link between GPUs of a node that a datasheet speaks of.

    GPUs on PCIe are taken to send each other everything through the host. GeForce
    drivers give no peer access; of other cards NCCL does not use it across host
    bridges, but in AMD hosts of two GPUs (``src/graph/paths.cc``), and hosts that
    translate addresses and virtual machines have none. Pairs of desktop cards have
    eight lanes each, as the sockets of desktops have 16 for graphics to divide and
    published pairs say; the README of ``sim/costs`` counts them.

    Parameters
    ----------
    gpu
        The datasheet.
    num_gpus
        How many are joined.
    """
    rate = gpu.interconnect_bytes_per_s
    if gpu.consumer or rate in _PCIE_BYTES_PER_S.values():
        is_desktop_pair = gpu.is_desktop_card and num_gpus == _PAIR
        lanes = "_x8" if is_desktop_pair else ""
        return INTERCONNECTS[f"pcie{_generation(gpu)}{lanes}_no_peer"]
    switched = rate >= _SWITCHED_FROM_BYTES_PER_S
    hop_s = INTERCONNECTS["nvlink4" if switched else "pcie5"].hop_s
    return Interconnect(f"{gpu.name}'s own", rate, switched, hop_s, 8, gpu.source)


def pcie_choices(gpu: GpuSpec) -> tuple[Interconnect, ...]:
    """Return links of GPUs that `link_of` has no peer access for, fastest first.

    With peer access, through the host by 16 lanes, behind one switch, and by eight.
    """
    kinds = "", "_no_peer", "_shared_no_peer", "_x8_no_peer"
    return tuple(INTERCONNECTS[f"pcie{_generation(gpu)}{kind}"] for kind in kinds)


def _generation(gpu: GpuSpec) -> int:
    rates = _PCIE_BYTES_PER_S.items()
    enough = (number for number, rate in rates if rate >= gpu.interconnect_bytes_per_s)
    return next(enough, max(_PCIE_BYTES_PER_S))


def with_peer_access(link: Interconnect) -> Interconnect | None:
    """Return the lanes of a class without peer access as if GPUs had it.

    None for rates of one's own, which are what was seen.
    """
    if link.source not in {_NO_PEER, _X8_NO_PEER}:
        return None
    lanes_bytes_per_s = link.bytes_per_s / _LANES_SHARE
    return replace(INTERCONNECTS["pcie5"], bytes_per_s=lanes_bytes_per_s)


def described(link: Interconnect) -> dict[str, Any]:
    """Return the rate of a link with its source, JSON-ready, for the provenance."""
    told: dict[str, Any] = {
        "name": link.name,
        "value": link.bytes_per_s,
        "unit": "B/s",
        "source": link.source,
    }
    if link.source in {_NO_PEER, _X8_NO_PEER}:
        least, median, most = _NO_PEER_SHARES
        rate = link.bytes_per_s / median
        told["interval"] = [least * rate, most * rate]
    return told | {"hop_s": link.hop_s, "has_peer_access": link.has_peer_access}


def _read(path: Path) -> Interconnect:
    try:
        text = path.read_text(encoding="utf-8")
        content = parse_file(text, path)
    except OSError as error:
        raise ConfigError(
            f"no readable interconnect file at {str(path)[-200:]}: {error.strerror}; "
            f"give the path of one, or a built-in name"
        ) from error
    except PlainDataError as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:  # no UTF-8, or a null byte in the path
        raise ConfigError(f"{path} must hold YAML or JSON; {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{path} must hold a mapping of the fields of an interconnect"
        )
    return _from_fields({"name": path.stem, **content}, str(path))


_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"bytes_per_s": (1e6, 1e15), "hop_s": (0.0, 1.0), "max_gpus": (2, 2**20)}
)


def _from_fields(given: Mapping[str, Any], where: str) -> Interconnect:
    known = [field.name for field in fields(Interconnect)]
    content = {"name": "user", **given}
    optional = {"source", "has_peer_access"}
    if missing := [key for key in known if key not in {*content, *optional}]:
        raise ConfigError(f"{missing[0]} is missing in {where}; add it")
    if unknown := sorted(map(str, content.keys() - set(known))):
        raise ConfigError(
            f"{unknown[0][:40]} is no field of an interconnect in {where}; use "
            f"{', '.join(known)}"
        )
    for key in ("name", "source"):
        if not isinstance(content.get(key, ""), str):
            raise ConfigError(f"{key} must be a string in {where}")
    for key in ("is_switched", "has_peer_access"):
        if not isinstance(content.get(key, True), bool):
            raise ConfigError(f"{key} must be true or false in {where}")
    for key, (low, high) in _BOUNDS.items():
        content[key] = _quantity(key, content[key], low, high, where)
    return Interconnect(**content)


def _quantity(
    key: str, value: object, low: float, high: float, where: str
) -> float | int:
    number = value
    if isinstance(value, str):  # YAML reads 4e11, without a point or sign, as text
        try:
            number = float(value)
        except ValueError:
            number = None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    is_whole = key != "max_gpus" or isinstance(number, int)
    if not (is_number and is_whole and low <= number <= high):  # type: ignore[operator]
        kind = "whole number" if key == "max_gpus" else "number"
        raise ConfigError(
            f"{key} must be a {kind} from {low:g} to {high:g} in {where}; got "
            f"{str(value)[:40]!r}"
        )
    assert isinstance(number, int | float)
    return number
