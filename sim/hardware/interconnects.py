"""Links between GPUs, as data: what one can send at best, and how they are wired."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    source: str


_NVLINK = "NVIDIA datasheet, half of what both directions have together"
_PCIE = "PCI-SIG, 16 lanes"
_IB = "InfiniBand Trade Association, four lanes, one port a GPU"
_RTX = "hops: aiconfigurator, all-reduce of the RTX PRO 6000"

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
    ("infiniband_hdr", 25, False, 5.0, 65_536, f"{_IB}: 200 Gb/s"),
    ("infiniband_ndr", 50, False, 5.0, 65_536, f"{_IB}: 400 Gb/s"),
    ("infiniband_xdr", 100, False, 5.0, 65_536, f"{_IB}: 800 Gb/s"),
)

INTERCONNECTS: Mapping[str, Interconnect] = MappingProxyType(
    {
        name: Interconnect(name, rate * 1e9, switched, hop * 1e-6, gpus, source)
        for name, rate, switched, hop, gpus, source in _TABLE
    }
)
"""Built-in links by name."""


def load_interconnect(name: str) -> Interconnect:
    """Return a built-in link.

    Raises
    ------
    ConfigError
        When the name is unknown; the nearest names are given.
    """
    key = name.lower().replace("-", "_").replace(" ", "_")
    if key not in INTERCONNECTS:
        near = difflib.get_close_matches(key[:80], INTERCONNECTS, n=3, cutoff=0.4)
        known = ", ".join(sorted(INTERCONNECTS))
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {known}"
        raise ConfigError(f"unknown interconnect: {name[:80]!r}; {hint}")
    return INTERCONNECTS[key]
