"""Swap or recompute: which takes longer, for every length of a preempted sequence."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from sim.cost import BatchShape, StepCost
from sim.costs.transfers import VARIANTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from sim.costs.transfers import Transfer
    from sim.generations import KvLayout, SwapVariant

    Flags = NDArray[np.bool_]
    Seconds = NDArray[np.float64]

MAX_TOKENS: Final = 131_072
LAYOUTS: Final[Mapping[SwapVariant, KvLayout]] = MappingProxyType(
    {"loop": "separate", "batch": "joined", "kernel": "joined"}
)
"""How a block lies in memory in the engines that have the variant."""
_MAX_LENGTHS: Final = 1 << 14
"""Lengths that are priced: all multiples of the block size, or every so many."""


class MovingCost(Protocol):
    """A cost model that knows every way to swap."""

    def columns(self, shapes: NDArray[np.int64]) -> Seconds:
        """Return the costs of many steps; see `StepPricer`."""
        ...

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        """Return the price of moving blocks one way."""
        ...


class Range(NamedTuple):
    """Lengths at which swapping is cheaper, in tokens, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Out and in again, by one variant, for each length."""

    seconds: Seconds
    extrapolated: bool
    """Whether a length is priced by an estimate instead of a measurement."""
    cheaper: tuple[Range, ...]
    """Lengths at which it beats computing again."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Seconds to bring a preempted sequence back, by its length."""

    num_tokens: NDArray[np.int64]
    """Multiples of the block size, ascending."""
    recompute_s: Seconds
    extrapolated: bool
    """Whether some length is outside of what the recomputation was measured on."""
    swaps: Mapping[SwapVariant, Swap]

    def sentences(self) -> dict[str, str]:
        """Return, for each variant, where swapping is cheaper."""
        return {
            name: sentence(swap.cheaper, self.num_tokens)
            for name, swap in self.swaps.items()
        }

    def to_json(self, num_rows: int = 64) -> dict[str, Any]:
        """Return the result as plain data, with some of the lengths."""
        places = shown(self.num_tokens, num_rows)
        return {
            "num_tokens": self.num_tokens[places].tolist(),
            "recompute_s": self.recompute_s[places].tolist(),
            "recompute_extrapolated": self.extrapolated,
            "swap": {
                name: {
                    "seconds": swap.seconds[places].tolist(),
                    "extrapolated": swap.extrapolated,
                    "cheaper": [list(part) for part in swap.cheaper],
                    "in_words": sentence(swap.cheaper, self.num_tokens),
                }
                for name, swap in self.swaps.items()
            },
        }


def crossover(
    cost: MovingCost,
    *,
    block_size: int,
    max_num_batched_tokens: int,
    max_tokens: int = MAX_TOKENS,
    variants: Sequence[SwapVariant] = VARIANTS,
) -> Crossover:
    """Compare swapping a sequence out and in with computing it again.

    A recomputation is one prompt, alone, in chunks of the token budget: what the steps
    take in full. A swap is both transfers, alone on an idle GPU: what a step grows by
    where nothing hides them.

    Parameters
    ----------
    cost
        Prices both.
    block_size
        Tokens of a block.
    max_num_batched_tokens
        Tokens of a chunk at most.
    max_tokens
        The longest sequence.
    variants
        Ways to swap.
    """
    num_blocks = lengths(max(1, max_tokens // block_size))
    num_tokens = num_blocks * block_size
    recompute_s, outside = recompute(cost, num_tokens, max_num_batched_tokens)
    swaps = {}
    for variant in variants:
        seconds, extrapolated = _there_and_back(cost, variant, num_blocks)
        cheaper = ranges(seconds < recompute_s, num_tokens)
        swaps[variant] = Swap(seconds, extrapolated, cheaper)
    return Crossover(num_tokens, recompute_s, bool(outside.any()), swaps)


def lengths(most: int) -> NDArray[np.int64]:
    """Return numbers of blocks from 1 to `most`: all, or evenly spaced ones."""
    stride = -(-most // _MAX_LENGTHS)
    found = np.arange(1, most + 1, dtype=np.int64)
    return found if stride == 1 else np.union1d(found[:64], found[stride - 1 :: stride])


def _there_and_back(
    cost: MovingCost, variant: SwapVariant, num_blocks: NDArray[np.int64]
) -> tuple[Seconds, bool]:
    layout = LAYOUTS[variant]
    store = cost.transfer(variant, load=False, layout=layout)
    load = cost.transfer(variant, load=True, layout=layout)
    moved = [(store.at(count), load.at(count)) for count in num_blocks.tolist()]
    seconds = np.array([out.total_s + back.total_s for out, back in moved])
    return seconds, any(out.extrapolated or back.extrapolated for out, back in moved)


def recompute(
    cost: MovingCost, num_tokens: NDArray[np.int64], budget: int
) -> tuple[Seconds, Flags]:
    """Return seconds to compute prompts of `num_tokens` alone, and the flags.

    Parameters
    ----------
    cost
        Prices the steps.
    num_tokens
        Lengths, ascending.
    budget
        Tokens of a chunk at most.
    """
    num_full = (num_tokens - 1) // budget
    past = np.arange(int(num_full.max()), dtype=np.int64) * budget
    seconds, outside = _chunks(cost, np.full(len(past), budget), past)
    before_s = np.concatenate([[0.0], np.cumsum(seconds)])
    was_outside = np.concatenate([[False], np.logical_or.accumulate(outside)])
    last_s, last = _chunks(cost, num_tokens - num_full * budget, num_full * budget)
    return before_s[num_full] + last_s, was_outside[num_full] | last


def _chunks(
    cost: MovingCost, query: NDArray[np.int64], past: NDArray[np.int64]
) -> tuple[Seconds, Flags]:
    """Return seconds of steps of one chunk each, and the flags."""
    shapes = np.zeros((len(query), len(BatchShape._fields)), dtype=np.int64)
    is_decode = query == 1  # a query of one token is one
    pairs = query * past + query * (query + 1) // 2
    context = past + query
    for place, values in enumerate((is_decode, is_decode * context)):
        shapes[:, place] = values
    chunk = (np.ones_like(query), query, context, pairs)
    for place, values in enumerate(chunk, start=2):
        shapes[:, place] = np.where(is_decode, 0, values)
    found = cost.columns(shapes)
    flags = found[:, StepCost._fields.index("extrapolated")] != 0.0
    return found[:, 0], flags


def ranges(cheaper: Flags, num_tokens: NDArray[np.int64]) -> tuple[Range, ...]:
    """Return the stretches of lengths where `cheaper` holds."""
    padded = np.concatenate([[False], cheaper, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return tuple(
        Range(int(num_tokens[first]), int(num_tokens[end - 1]))
        for first, end in edges.reshape(-1, 2).tolist()
    )


def sentence(cheaper: Sequence[Range], num_tokens: NDArray[np.int64]) -> str:
    """Return in words where swapping is cheaper."""
    first, last = int(num_tokens[0]), int(num_tokens[-1])
    if not cheaper:
        return f"recomputing is cheaper at every length from {first:,} to {last:,}"
    if cheaper == (Range(first, last),):
        return f"swapping is cheaper at every length from {first:,} to {last:,}"
    *others, end = (_in_words(part, first, last) for part in cheaper)
    return f"swapping is cheaper {', '.join(others)}{' and ' if others else ''}{end}"


def _in_words(part: Range, first: int, last: int) -> str:
    if part.first == first:
        return f"up to {part.last:,} tokens"
    if part.last == last:
        return f"from {part.first:,} tokens on"
    return f"from {part.first:,} to {part.last:,} tokens"


def shown(num_tokens: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Return places of about `num_rows` lengths, evenly spaced in octaves."""
    wanted = np.geomspace(num_tokens[0], num_tokens[-1], num_rows)
    places = np.searchsorted(num_tokens, wanted.round())
    found: NDArray[np.int64] = np.unique(np.minimum(places, len(num_tokens) - 1))
    return found
