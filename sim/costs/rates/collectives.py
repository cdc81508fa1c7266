"""Seconds of a collective by its size, ranks and link.

vLLM reduces small messages with a kernel of its own, in which every rank reads all
others (one step), or reduces a share and gathers the others (two steps), where GPUs can
read each other; large ones, and all where they cannot, by NCCL's ring. Without peer
access the ring goes through the memory of the host, and half of what small messages
send are flags.

Source: vLLM ``csrc/custom_all_reduce.cuh``, ``custom_all_reduce.py``. Shares and
seconds are fitted to aiconfigurator's tables in CUDA graphs: of a100, h100 and h200
half of the sizes up to 64 MiB are within 5 to 12 %, nine of ten within 13 to 30 %; of
two to eight RTX PRO 6000 on PCIe within 6 to 9 %, and 9 to 23 %. Rings without peer
access are fitted to published sweeps of four RTX 4090, two V100 and two RTX 2080 Ti
(within 14 % at each size, 3 to 4 % in the median); four RTX 5090, which had no part in
it, are within 14 % from 256 KiB on, and up to twice as slow below, where NCCL takes no
flags on their host. No published sweep has more than four: there the class is as slow
at least as the same lanes with peer access, which tables of eight ranks say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sim.hardware.interconnects import HOST_HOP_S, with_peer_access

if TYPE_CHECKING:
    from sim.hardware.interconnects import Interconnect

_MIB: Final = 1 << 20
CUSTOM_BYTES: Final = 8 * _MIB
"""Messages from this size on are NCCL's."""
_ONE_STEP_BYTES: Final = ((2, CUSTOM_BYTES), (4, _MIB // 2), (8, _MIB // 4))
"""Ranks up to which, and bytes below which, every rank reads all others."""
_ONE_STEP_S: Final = 4.7e-6
_TWO_STEPS_S: Final = 9e-6
_SWITCHED_RING_S: Final = 20e-6
_ONE_STEP_SHARE: Final = 0.6
_TWO_STEPS_SHARE: Final = 0.65
_SWITCHED_RING_SHARE: Final = 0.77
_RING_SHARE: Final = 0.68
_NCCL_S: Final = 8.9e-6
_FLAG_SHARE: Final = 0.5
_WHOLE_S: Final = 15e-6
"""Starts of NCCL, what is left beside flags, and what starts without them take more."""
_SHARED_ROOTS: Final = 1.0 / 3.0
"""Power of the ranks by which they slow each other where they share a path."""


def reaching(link: Interconnect, bytes_per_s: float) -> Interconnect:
    """Return a link over which collectives of long messages reach so much."""
    if not link.is_switched:
        return replace(
            link,
            bytes_per_s=bytes_per_s,
            hop_s=HOST_HOP_S,
            source="given",
            has_peer_access=False,
        )
    return replace(link, bytes_per_s=bytes_per_s / _SWITCHED_RING_SHARE)


def all_reduce_s(link: Interconnect, num_ranks: int, num_bytes: float) -> float:
    """Return seconds to add up a message of all ranks on each of them."""
    if num_ranks == 1 or not num_bytes:
        return 0.0
    rate = link.bytes_per_s
    if not link.has_peer_access:
        return _through_host_s(link, num_ranks, num_bytes)
    custom = link.is_switched or num_ranks == 2
    if custom and num_bytes < CUSTOM_BYTES and num_ranks <= 8:
        limit = next(most for n, most in _ONE_STEP_BYTES if num_ranks <= n)
        read = (num_ranks - 1) * min(num_bytes, limit)
        one_step_s = _ONE_STEP_S + read / (_ONE_STEP_SHARE * rate)
        if num_bytes < limit:
            return one_step_s
        sent = _around(num_ranks, num_bytes)
        # more bytes take no less
        return max(_TWO_STEPS_S + sent / (_TWO_STEPS_SHARE * rate), one_step_s)
    sent = _around(num_ranks, num_bytes)
    if link.is_switched:
        return _SWITCHED_RING_S + sent / (_SWITCHED_RING_SHARE * rate)
    share = _RING_SHARE / float(num_ranks**_SHARED_ROOTS)
    return 2 * (num_ranks - 1) * link.hop_s + sent / (share * rate)


def _through_host_s(link: Interconnect, num_ranks: int, num_bytes: float) -> float:
    """Return seconds of NCCL's ring: with flags or without, whichever is quicker."""
    hops_s = 2 * (num_ranks - 1) * link.hop_s
    sent_s = _around(num_ranks, num_bytes) / link.bytes_per_s
    whole_s = sent_s + _WHOLE_S + hops_s
    ring_s = _NCCL_S + hops_s + min(sent_s / _FLAG_SHARE, whole_s)
    lanes = with_peer_access(link)
    if lanes is None:
        return ring_s
    # sweeps end at four ranks; more share the lanes no better than with access
    return max(ring_s, all_reduce_s(lanes, num_ranks, num_bytes))


def _around(num_ranks: int, num_bytes: float) -> float:
    """Return the bytes that a rank sends: its share of the message, to all, twice."""
    return 2.0 * (num_ranks - 1) / num_ranks * num_bytes
