"""Swap or recompute: which takes longer, for every length of a preempted sequence."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from sim.costs.measured import MeasuredCost
from sim.costs.measured.profile import DRY_RUN, read_profile
from sim.costs.parts import FLAG, HI, LO
from sim.costs.roofline import RooflineCost
from sim.costs.transfers import VARIANTS
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model, resolved_model
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    from numpy.typing import NDArray

    from sim.costs.transfers import Transfer
    from sim.scheduler.generation import KvLayout, SwapVariant

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

    def columns(self, shapes: NDArray[np.int64]) -> Seconds: ...

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer: ...

    def describe(self) -> dict[str, Any]:
        """Return parameters and sources; `bounds` says whether it knows any."""
        ...


class Range(NamedTuple):
    """Lengths at which swapping is cheaper, in tokens, both included."""

    first: int
    last: int


class Band(NamedTuple):
    """Seconds for each length, and where nine of ten should lie."""

    seconds: Seconds
    lo_s: Seconds
    hi_s: Seconds


@dataclass(frozen=True, slots=True)
class Swap:
    """Out and in again, by one variant."""

    band: Band
    extrapolated: bool
    """Whether a length is priced by an estimate instead of a measurement."""
    cheaper: tuple[Range, ...]
    """Lengths at which it beats computing again."""
    surely: tuple[Range, ...]
    """The same if swaps are at the slow bound and computing at the fast one."""
    possibly: tuple[Range, ...]
    """The same the other way round."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Seconds to bring a preempted sequence back, by its length."""

    num_tokens: NDArray[np.int64]
    """Multiples of the block size, ascending."""
    recompute: Band
    extrapolated: bool
    """Whether some length is outside of what the recomputation was measured on."""
    swaps: Mapping[SwapVariant, Swap]
    has_bounds: bool
    """Whether the cost model knows bounds; if not, they are the seconds."""

    def sentences(self) -> dict[str, str]:
        """Return, for each variant, where swapping is cheaper."""
        return {name: self._sentence(swap) for name, swap in self.swaps.items()}

    def _sentence(self, swap: Swap) -> str:
        where = self.where(swap.cheaper)
        words = f"swapping is cheaper {where}"
        if not swap.cheaper:
            words = "recomputing is cheaper at every length"
        if not self.has_bounds:
            return words
        surely, possibly = self.where(swap.surely), self.where(swap.possibly)
        if surely == where == possibly:
            return f"{words}, also within the bounds"
        return f"{words} (within the bounds: surely {surely}; possibly {possibly})"

    def where(self, cheaper: Sequence[Range]) -> str:
        return in_words(cheaper, int(self.num_tokens[0]), int(self.num_tokens[-1]))

    def to_json(self, num_rows: int = 64) -> dict[str, Any]:
        """Return the result as plain data, with some of the lengths."""
        places = shown(self.num_tokens, num_rows)
        return {
            "num_tokens": self.num_tokens[places].tolist(),
            "recompute": _listed(self.recompute, places),
            "has_bounds": self.has_bounds,
            "recompute_extrapolated": self.extrapolated,
            "swap": {
                name: {
                    **_listed(swap.band, places),
                    "extrapolated": swap.extrapolated,
                    "cheaper_tokens": list(map(list, swap.cheaper)),
                    "surely_cheaper_tokens": list(map(list, swap.surely)),
                    "possibly_cheaper_tokens": list(map(list, swap.possibly)),
                    "in_words": self._sentence(swap),
                }
                for name, swap in self.swaps.items()
            },
        }


def _listed(band: Band, places: NDArray[np.int64]) -> dict[str, list[float]]:
    return {key: part[places].tolist() for key, part in band._asdict().items()}


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
    has_bounds = bool(cost.describe().get("bounds"))
    again, outside = recompute(cost, num_tokens, max_num_batched_tokens)
    swaps = {}
    for variant in variants:
        band, extrapolated = _there_and_back(cost, variant, num_blocks, has_bounds)
        swaps[variant] = Swap(
            band,
            extrapolated,
            ranges(band.seconds < again.seconds, num_tokens),
            ranges(band.hi_s < again.lo_s, num_tokens),
            ranges(band.lo_s < again.hi_s, num_tokens),
        )
    return Crossover(num_tokens, again, bool(outside.any()), swaps, has_bounds)


def lengths(most: int) -> NDArray[np.int64]:
    """Return numbers of blocks from 1 to `most`: all, or evenly spaced ones."""
    stride = -(-most // _MAX_LENGTHS)
    found = np.arange(1, most + 1, dtype=np.int64)
    return found if stride == 1 else np.union1d(found[:64], found[stride - 1 :: stride])


def _there_and_back(
    cost: MovingCost,
    variant: SwapVariant,
    num_blocks: NDArray[np.int64],
    has_bounds: bool,
) -> tuple[Band, bool]:
    """Return seconds of both transfers, whose errors go together, and the flag."""
    layout = LAYOUTS[variant]
    moved = [
        transfer.at(count)
        for load in (False, True)
        for transfer in (cost.transfer(variant, load=load, layout=layout),)
        for count in num_blocks.tolist()
    ]
    seconds, down, up = (
        np.array(values).reshape(2, -1)
        for values in (
            [one.total_s for one in moved],
            [one.total_s * one.width.down * has_bounds for one in moved],
            [one.total_s * one.width.up * has_bounds for one in moved],
        )
    )
    band = Band(
        seconds.sum(axis=0), (seconds - down).sum(axis=0), (seconds + up).sum(axis=0)
    )
    return band, any(one.extrapolated for one in moved)


def recompute(
    cost: MovingCost, num_tokens: NDArray[np.int64], budget: int
) -> tuple[Band, Flags]:
    """Return seconds to compute prompts of `num_tokens` alone, and the flags."""
    num_full = (num_tokens - 1) // budget
    past = np.arange(int(num_full.max()), dtype=np.int64) * budget
    full = _chunks(cost, np.full(len(past), budget), past)
    last = _chunks(cost, num_tokens - num_full * budget, num_full * budget)
    before = np.zeros((len(past) + 1, full.shape[1]))
    np.cumsum(full, axis=0, out=before[1:])
    total = (before[num_full] + last).T
    return Band(total[0], total[LO], total[HI]), total[FLAG] > 0.0


def _chunks(
    cost: MovingCost, query: NDArray[np.int64], past: NDArray[np.int64]
) -> Seconds:
    shapes = np.zeros((len(query), len(BatchShape._fields)), dtype=np.int64)
    is_decode = query == 1  # a query of one token is one
    pairs = query * past + query * (query + 1) // 2
    context = past + query
    for place, values in enumerate((is_decode, is_decode * context)):
        shapes[:, place] = values
    chunk = (np.ones_like(query), query, context, pairs)
    for place, values in enumerate(chunk, start=2):
        shapes[:, place] = np.where(is_decode, 0, values)
    return cost.columns(shapes)


def ranges(cheaper: Flags, num_tokens: NDArray[np.int64]) -> tuple[Range, ...]:
    """Return the stretches of lengths where `cheaper` holds."""
    padded = np.concatenate([[False], cheaper, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return tuple(
        Range(int(num_tokens[first]), int(num_tokens[end - 1]))
        for first, end in edges.reshape(-1, 2).tolist()
    )


def in_words(cheaper: Sequence[Range], first: int, last: int) -> str:
    """Return stretches of the lengths from `first` to `last` in words."""
    if not cheaper:
        return "nowhere"
    if tuple(cheaper) == (Range(first, last),):
        return f"at every length from {first:,} to {last:,} tokens"
    *others, end = (_stretch(part, first, last) for part in cheaper)
    return f"{', '.join(others)}{' and ' if others else ''}{end}"


def _stretch(part: Range, first: int, last: int) -> str:
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


# -- asked of a model on a GPU: by a profile, or by a datasheet -----------------------

_MOST = {"block_size": 2**16, "max_num_batched_tokens": 2**24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The model, the GPU and the engine arguments of a comparison.

    Parameters
    ----------
    model
        Bundled name, or path to a config.json.
    file
        A profile with tables of the model; None for the datasheet of `gpu`.
    gpu
        GPU name, or the path of a datasheet; None for the one that the profile names.
    tensor_parallel_size, block_size, max_num_batched_tokens, kv_cache_dtype
        As of the engine.
    """

    model: str
    file: Path | None = None
    gpu: str | None = None
    tensor_parallel_size: int = 1
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    kv_cache_dtype: str = "auto"

    def answer(self) -> CrossoverReport:
        self._check()
        cost = self._cost_model()
        found = crossover(
            cost,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        return CrossoverReport(self._title(cost), found)

    def _check(self) -> None:
        if self.file is None and self.gpu is None:
            raise UserError(
                "swapping is priced by a profile or by a GPU's datasheet; give one of "
                "them"
            )
        for key, most in _MOST.items():
            value = getattr(self, key)
            if not 1 <= value <= most:
                raise UserError(f"{key} must be 1 to {most:,}; got {value:,}")

    def _cost_model(self) -> MeasuredCost | RooflineCost:
        engine: dict[str, Any] = {
            "model": resolved_model(load_model(self.model)),
            "tensor_parallel_size": self.tensor_parallel_size,
            "block_size": self.block_size,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        if self.file is None:
            return RooflineCost(gpu=load_gpu(str(self.gpu)), **engine)
        profile = read_profile(self.file)
        if profile.kind == DRY_RUN:
            raise UserError(
                f"'{self.file}' is of a dry run, whose times are made up; measure a "
                "GPU, or ask the datasheet of one instead of the profile"
            )
        device = profile.fit.get("gpu") or profile.device.get("name")
        gpu = load_gpu(self.gpu or str(device))
        return MeasuredCost(str(self.file), gpu=gpu, **engine)

    def _title(self, cost: MeasuredCost | RooflineCost) -> str:
        told = cost.describe()
        source = "datasheet" if self.file is None else f"profile {self.file.name}"
        return (
            f"{told['model']} on {told['gpu']} ({source}), TP "
            f"{self.tensor_parallel_size}, blocks of {self.block_size}, prompts in "
            f"chunks of {self.max_num_batched_tokens:,}"
        )


@dataclass(frozen=True, slots=True)
class CrossoverReport:
    """The answer, and what was asked, in a line."""

    title: str
    found: Crossover

    @property
    def sentences(self) -> dict[str, str]:
        """For each way to swap, where it is cheaper."""
        return self.found.sentences()

    @property
    def table(self) -> pd.DataFrame:
        """Milliseconds for every length: computed again, and swapped each way."""
        import pandas as pd  # noqa: PLC0415 - slow to import

        columns = {"recompute": self.found.recompute}
        columns |= {f"swap_{name}": s.band for name, s in self.found.swaps.items()}
        return pd.DataFrame(
            {f"{name}_ms": 1e3 * band.seconds for name, band in columns.items()},
            index=pd.Index(self.found.num_tokens, name="num_tokens"),
        )
