"""From one formula of a step's parts to all prices that a run asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np
from numpy import ndarray

from sim.costs.base import ReadsPrefixesOnce, StepCost
from sim.scheduler.batch import BatchShape, SharingShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from sim.costs.base import CostModel

    Columns = NDArray[np.float64]

_MAX_KEPT: Final = 65_536
"""Prices that a model keeps; a longer-lived one computes the rest again."""
_SPAN_PER_ROW: Final = 8
"""A table of counts may be so many times as long as the rows that are looked up."""

V = TypeVar("V")

FLAG: Final = StepCost._fields.index("extrapolated")
LO: Final = StepCost._fields.index("lo_s")
HI: Final = StepCost._fields.index("hi_s")
"""Places in a `StepCost`, and columns of many."""

_new = tuple.__new__


# -- numbers or columns --------------------------------------------------------------

Count = Any
"""An integer, or a column of them, one a step."""
Seconds = Any
"""Seconds, or a column of them; the same operations give both the same bits."""


class Memo(dict[int, V]):
    """Prices by count, each computed once; copies and pickles start empty."""

    __slots__ = ()

    def keep(self, count: int, value: V) -> V:
        """Return `value`, kept for `count` while there is room."""
        if len(self) < _MAX_KEPT:
            self[count] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()


def looked_up(
    kept: Memo[Any], price: Callable[[int], tuple[float, ...]], counts: Count
) -> Columns:
    """Return the prices of each count, (prices, n): asked for where none is kept.

    Python does the arithmetic: numpy's powers may differ in the last bit.
    """
    distinct, places = distinct_counts(counts)
    prices = [kept.get(count) or price(count) for count in distinct]
    # `take` is five times as quick as an index
    found: Columns = np.array(prices).T.take(places, axis=1)
    return found


def distinct_counts(counts: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the distinct ones, ascending, and the place of each among them."""
    if not len(counts) or (span := int(counts.max()) + 1) > _SPAN_PER_ROW * len(counts):
        distinct, places = np.unique(counts, return_inverse=True)
        return distinct.tolist(), places
    # marked in a table: several times quicker than sorted
    is_there = np.zeros(span, dtype=np.bool_)
    is_there[counts] = True
    return np.flatnonzero(is_there).tolist(), (np.cumsum(is_there) - 1)[counts]


def larger(one: Any, other: Any) -> Any:
    if one.__class__ is ndarray:
        return np.maximum(one, other)
    return one if one > other else other


def smaller(one: Any, other: Any) -> Any:
    if one.__class__ is ndarray:
        return np.minimum(one, other)
    return one if one < other else other


def where(count: Count, seconds: Seconds, otherwise: Seconds = 0.0) -> Seconds:
    """Return `seconds` where `count` is not zero."""
    if count.__class__ is ndarray:
        return np.where(count != 0, seconds, otherwise)
    return seconds if count else otherwise


# -- the sum of parts ----------------------------------------------------------------


def step_cost(  # noqa: PLR0917 - as `StepCost` itself; keywords would cost 0.2 us
    gemm_s: float = 0.0,
    prefill_attention_s: float = 0.0,
    decode_attention_s: float = 0.0,
    head_s: float = 0.0,
    allreduce_s: float = 0.0,
    swap_s: float = 0.0,
    copy_s: float = 0.0,
    host_s: float = 0.0,
    extrapolated: bool = False,
    squares: tuple[float, float] = (0.0, 0.0),
) -> StepCost:
    """Return the cost whose `total_s` is the sum of these parts, in seconds.

    The parts are added from left to right in the order of the parameters, which is
    the order of the fields of `StepCost`: floating-point addition is not associative,
    and the same sum taken over recorded columns must give the same bits.

    `squares` are those of the distances from `total_s` to `lo_s` and to `hi_s`, as
    `sim.costs.rates.widths` adds them up; without them both are `total_s`.
    """
    total_s = (
        gemm_s
        + prefill_attention_s
        + decode_attention_s
        + head_s
        + allreduce_s
        + swap_s
        + copy_s
        + host_s
    )
    down, up = squares
    # as StepCost(...), without the function that a NamedTuple puts before it
    return _new(
        StepCost,
        (
            total_s,
            gemm_s,
            prefill_attention_s,
            decode_attention_s,
            head_s,
            allreduce_s,
            swap_s,
            copy_s,
            host_s,
            extrapolated,
            total_s - sqrt(down) if down else total_s,
            total_s + sqrt(up) if up else total_s,
        ),
    )


def cost_columns(
    num_rows: int,
    *parts: Columns | float,
    squares: Columns | None = None,
) -> Columns:
    """Return `step_cost` of every row, (n, 12) with contiguous columns.

    `parts` are in the order of `step_cost`, each a column or a number for all rows;
    `squares` are two rows, (2, n). The flag is left at 0.
    """
    columns = np.zeros((len(StepCost._fields), num_rows))
    total_s = columns[0]
    for place, part in enumerate(parts, start=1):
        if isinstance(part, float) and not part:
            continue  # x + 0.0 is x, as no part is negative
        columns[place] = part
        total_s += columns[place]
    lo_s, hi_s = columns[LO], columns[HI]
    lo_s[:] = hi_s[:] = total_s
    if squares is not None:
        lo_s -= np.sqrt(squares[0])
        hi_s += np.sqrt(squares[1])
    return columns.T


# -- one formula ---------------------------------------------------------------------

Parts = tuple[float, float, float, float, float, float, Any]
"""Seconds of products, prefill attention, decode attention, head, collectives and host
of a step that moves no blocks, and what its model tells `PartsCost.rest`."""
Rest = tuple[float, float, bool, float, float]
"""Seconds of swaps and of copies, whether the shape was extrapolated, and the squares
of the distances to `lo_s` and to `hi_s`."""
_NO_REST: Final[Rest] = (0.0, 0.0, False, 0.0, 0.0)


class Line(NamedTuple):
    """Decode attention over a stretch of contexts, for one number of decodes."""

    first: int
    """The context where the stretch begins, in tokens of all decodes; the first is 0.
    It ends where the next one begins."""
    value_s: float
    slope_s: float
    start: int = 0
    """It takes ``value_s + slope_s * (context - start)`` seconds."""
    extrapolated: bool = False
    down: float = 0.0
    up: float = 0.0
    """Shares of it by which it may be shorter and longer."""


class SteadyDecodes(NamedTuple):
    """Steps of the same decodes: attention alone changes from one to the next."""

    gemm_s: float
    head_s: float
    allreduce_s: float
    host_s: float
    lines: Sequence[Line]
    extrapolated: bool = False
    """Whether something besides attention was."""
    down: float = 0.0
    up: float = 0.0
    """Squares of the distances to both bounds that all but attention adds, in s²."""
    kernels_s: float = 0.0
    """Seconds of `host_s` that the GPU works."""
    launching_s: float = 0.0
    """If above 0, a step waits for its launches; see `late_s`."""


def read_once(model: CostModel, shape: SharingShape) -> StepCost:
    """Return the price of a step whose requests share a prefix."""
    own = BatchShape(*shape)
    if isinstance(model, ReadsPrefixesOnce):  # only such a one is told
        num_once = model.num_read_once(shape.num_common_tokens, shape[0], shape[2])
        if num_once:
            return model.reading_once(num_once).step(own)
    return model.step(own)


class PartsCost(ABC):
    """A cost model that states the parts of a step: its price is their sum."""

    __slots__ = ()

    has_bounds: ClassVar[bool] = False
    """Whether `rest` is asked about each step, not of those alone that move blocks."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return its parameters, JSON-ready."""

    @abstractmethod
    def parts(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_tokens: int,
        prefill_context: int,
        num_pairs: int,
    ) -> Parts:
        """Return the parts of a step that moves no blocks."""

    @abstractmethod
    def columns(self, shapes: NDArray[np.int64]) -> Columns:
        """Return `step` of each row; as `StepPricer.columns`."""

    def rest(self, shape: BatchShape, parts: Parts) -> Rest:
        """Return the seconds that moving blocks adds, and the bounds of the step."""
        del shape, parts
        return _NO_REST

    def steady_decodes(self, num_decodes: int) -> SteadyDecodes | None:
        """Return steps of so many decodes, None where attention is no lines.

        Steps of the same decodes in a row are priced by it several times quicker.
        """
        del num_decodes
        return None

    def step(self, shape: BatchShape) -> StepCost:
        if shape.__class__ is SharingShape:
            return read_once(self, shape)
        decodes, context, chunks, tokens, past, pairs, loaded, stored, copied = shape
        parts = self.parts(decodes, context, chunks, tokens, past, pairs)
        gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s, _ = parts
        rest = _NO_REST
        if self.has_bounds or loaded or stored or copied:
            rest = self.rest(shape, parts)
        swap_s, copy_s, extrapolated, down, up = rest
        return step_cost(
            gemm_s,
            prefill_s,
            decode_s,
            head_s,
            allreduce_s,
            swap_s,
            copy_s,
            host_s,
            extrapolated,
            (down, up),
        )


class FormulaCost(PartsCost):
    """A cost model that states what makes a step long, each term once.

    `counted`, `prefill_attention_s` and `decode_attention_s` are the formula. They get
    integers or columns of them, and use operations that give both the same bits: ``+``,
    ``-``, ``*``, ``/`` and the functions above. All prices follow from them: of one
    step, of many as columns, of the steps that a loop asks for (`batch_total_of`,
    `decode_ends_of` of `sim.costs.pricing`).

    A model whose terms depend on each other is a `PartsCost` that states `parts`, for
    numbers alone, and takes `lines_and_steps` for its columns.
    """

    __slots__ = ()

    @abstractmethod
    def counted(
        self, num_decodes: Count, num_prefills: Count, num_prefill_tokens: Count
    ) -> tuple[Seconds, Seconds, Seconds, Seconds, Any]:
        """Return seconds of products, head, collectives and host, whatever is attended.

        Last comes what `rest` wants to know.
        """

    def prefill_attention_s(
        self,
        num_prefills: Count,
        num_tokens: Count,
        num_context_tokens: Count,
        num_pairs: Count,
    ) -> Seconds:
        """Return seconds of at least one chunk."""
        del num_prefills, num_tokens, num_context_tokens, num_pairs
        return 0.0

    def decode_attention_s(
        self, num_decodes: Count, num_context_tokens: Count, num_prefills: Count
    ) -> Seconds:
        """Return seconds of at least one decode."""
        del num_decodes, num_context_tokens, num_prefills
        return 0.0

    def along(self, num_decodes: int, lines: Sequence[Line]) -> SteadyDecodes:
        """Return them for attention along these lines."""
        return SteadyDecodes(*self.counted(num_decodes, 0, 0)[:4], lines)

    def parts(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_tokens: int,
        prefill_context: int,
        num_pairs: int,
    ) -> Parts:
        gemm_s, head_s, allreduce_s, host_s, told = self.counted(
            num_decodes, num_prefills, num_tokens
        )
        if not (num_decodes or num_tokens):  # nothing is computed
            return gemm_s, 0.0, 0.0, 0.0, allreduce_s, host_s, told
        prefill_s = decode_s = 0.0
        if num_prefills:
            prefill_s = self.prefill_attention_s(
                num_prefills, num_tokens, prefill_context, num_pairs
            )
        if num_decodes:
            decode_s = self.decode_attention_s(
                num_decodes, decode_context, num_prefills
            )
        return gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s, told

    def columns(self, shapes: NDArray[np.int64]) -> Columns:
        if not len(shapes):
            return np.empty((0, len(StepCost._fields)))
        decodes, context, chunks, tokens, past, pairs = shapes[:, :6].T
        gemm_s, head_s, allreduce_s, host_s, _ = self.counted(decodes, chunks, tokens)
        num_tokens = decodes + tokens
        prefill_s: Seconds = 0.0
        if chunks.any():
            prefill_s = self.prefill_attention_s(chunks, tokens, past, pairs)
            prefill_s = where(chunks * num_tokens, prefill_s)
        decode_s = where(decodes, self.decode_attention_s(decodes, context, chunks))
        head_s = where(num_tokens, head_s)
        costs = cost_columns(
            len(shapes),
            *(gemm_s, prefill_s, decode_s, head_s, allreduce_s, 0.0, 0.0, host_s),
        )
        moved = [column != 0 for column in shapes.T[6:] if column.any()]
        if moved:
            fill_by_steps(self, costs, shapes, np.logical_or.reduce(moved))
        return costs


def fill_by_steps(
    model: CostModel, costs: Columns, shapes: NDArray[np.int64], rows: NDArray[np.bool_]
) -> None:
    steps = [model.step(BatchShape(*shape)) for shape in shapes[rows].tolist()]
    if steps:
        costs[rows] = steps


def late_s(launching_s: Seconds, gpu_s: Seconds) -> Seconds:
    """Return by how much launching kernels one by one outlasts running them."""
    return larger(launching_s - gpu_s, 0.0)


def launched(down: float, up: float, rest_s: float) -> tuple[float, float]:
    """Return the squares of the width where launching kernels bounds a step.

    The GPU's operations outlast the launches by `rest_s`, below 0 if they do not.
    """
    if rest_s <= 0.0:
        late_s = sqrt(up) + rest_s
        return 0.0, late_s * late_s if late_s > 0.0 else 0.0
    return min(down, rest_s * rest_s), up
