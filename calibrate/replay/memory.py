"""Whether a stack, a pool and its host counterpart fit, before any is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.errors import UserError

if TYPE_CHECKING:
    from calibrate.harness.geometry import Geometry
    from calibrate.replay.log import Facts

GIB: Final = 1 << 30
SPARE_BYTES: Final = 4 * GIB
"""For activations, graphs and the libraries of the device."""
HOST_SHARE: Final = 0.5
"""Of the host's free memory that may be pinned."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a replay takes."""

    weights: int
    pool: int
    host_pool: int

    @property
    def device(self) -> int:
        return self.weights + self.pool


def needs(geometry: Geometry, facts: Facts, itemsize: int) -> Needs:
    """Return the memory of a replay, with one block more than the schedule's."""
    from calibrate.replay.stack import weight_bytes  # noqa: PLC0415 - torch

    token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * itemsize
    block_bytes = geometry.num_layers * facts.block_size * token_bytes
    return Needs(
        weight_bytes(geometry, itemsize),
        (facts.num_gpu_blocks + 1) * block_bytes,
        facts.num_cpu_blocks * block_bytes,
    )


def check_memory(
    wanted: Needs, num_layers: int, free_bytes: int, free_host_bytes: int
) -> None:
    """Refuse a replay that does not fit."""
    spare = max(0, free_bytes - SPARE_BYTES)
    pinned = int(HOST_SHARE * free_host_bytes)
    if wanted.device <= spare and wanted.host_pool <= pinned:
        return
    share = min(spare / max(1, wanted.device), pinned / max(1, wanted.host_pool), 1.0)
    fitting = int(num_layers * share)
    remedy = f"take --num-layers {fitting}" if fitting else "take another machine"
    raise UserError(
        f"{num_layers} layers need {wanted.device / GIB:.1f} GiB of weights and KV "
        f"pool on the GPU ({spare / GIB:.1f} are free) and "
        f"{wanted.host_pool / GIB:.1f} GiB of pinned memory "
        f"({pinned / GIB:.1f} may be taken); {remedy}"
    )


def free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
