"""Packed rows: what an engine writes down of a step, or of a stretch of quiet ones."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from sim.results import schema
from sim.scheduler.base import CacheUsage
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

FACTS = (
    "step",
    "start_s",
    "num_running",
    "num_waiting",
    "num_swapped",
    *BatchShape._fields,
    *CacheUsage._fields,
    "num_preempted",
    "num_recomputed_tokens",
    "num_quiet_steps",
)
"""The words of a packed row: columns of `sim.results.schema.STEPS`, the counts of its
shape, and how many steps it stands for if it is a stretch, else 0. Costs and sums
follow from them."""


_CODES = {"int64": "q", "float64": "d"}
_CODES_OF_FACTS = [_CODES[schema.STEPS.get(name, "int64")] for name in FACTS]

pack_facts = Struct("=" + "".join(_CODES_OF_FACTS)).pack
"""From `FACTS` to a packed row of `StepLog.packed`."""

_OF_STRETCH = (
    "step",
    "start_s",
    "num_waiting",
    "num_decodes",
    "num_decode_context_tokens",
    "num_physical_blocks",
    "num_logical_blocks",
    "num_logical_tokens",
    "num_quiet_steps",
)
_OF_FORMED_STEP = (
    "step",
    "start_s",
    "num_running",
    "num_waiting",
    *BatchShape._fields[:6],
    "num_physical_blocks",
    "num_logical_blocks",
    "num_logical_tokens",
    "num_preempted",
    "num_recomputed_tokens",
)


def _packer_of(names: Collection[str]) -> Callable[..., bytes]:
    """Return a packer of these of `FACTS`, in their order; the others are 0."""
    pairs = zip(FACTS, _CODES_OF_FACTS, strict=True)
    codes = "".join(code if name in names else "8x" for name, code in pairs)
    return Struct("=" + codes).pack


pack_stretch = _packer_of(_OF_STRETCH)
"""From `_OF_STRETCH` to a packed row: a stretch in which all that run are decodes.

Its logical tokens are those of requests that do not run.
"""

pack_formed = _packer_of(_OF_FORMED_STEP)
"""From `_OF_FORMED_STEP` to the row of a step without an object, which moves no blocks.

Usage and stored tokens follow in both; see `StepLog.describe_pool`.
"""
