"""Tables of a profile as a cost model looks them up: straight lines between nodes.

Factors say what a past does to a chunk, and what chunks and decodes do to each other.
A step knows sums over its chunks. They are taken for equal chunks: a *mean chunk* has
the mean context and the mean query-key pairs. A chunk of ``q`` tokens that ends at
context ``L`` has ``pairs = q (L + 1/2) - q^2 / 2``, so that ``q`` follows from the
other two by a square root. More pairs than such a chunk can have (chunks of different
length) make a fresh chunk with as many.

Between its corners a factor is linear along each axis. Each cell holds the
coefficients of that product, over the distances from its first corner: fewer operations
than to interpolate axis by axis.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sim.costs.parts import Memo
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sim.costs.roofline.mixture import LayerGroup, Mixture, StateLayers

    Seconds = NDArray[np.float64]
    Counts = NDArray[np.int64]
    Flags = NDArray[np.bool_]


Segment = tuple[float, float, int, bool]
"""Seconds where a segment begins and seconds a unit of the *total* amount on it, the
total where it begins, and whether it touches what was extrapolated."""
Row = tuple[Segment, ...]
"""Segments of so many sequences: one below the first node, one from each node on."""


class Surface:
    """Seconds over (number of sequences, mean amount a sequence).

    Between nodes lie straight lines, first over the number of sequences, then over the
    total amount, so that a step needs one search, one product and one sum. Beyond the
    last node the last line goes on; below the first, what it says holds. Both say that
    they are extrapolated. More of an amount never costs less: where a table says so
    (noise, or another kernel taking over), the dearer value holds.
    """

    __slots__ = ("_beyond", "_counts", "_seconds", "amounts", "rows")

    def __init__(
        self,
        counts: Sequence[int],
        amounts: Sequence[int],
        seconds: Seconds,
        beyond: NDArray[np.bool_],
    ) -> None:
        self.amounts = tuple(amounts)
        self.rows: Memo[Row] = Memo()
        self._counts = tuple(counts)
        raised = np.maximum.accumulate(seconds, axis=1)
        self._seconds: list[list[float]] = raised.tolist()
        self._beyond: list[list[bool]] = beyond.tolist()

    def row(self, count: int) -> Row:
        """Return the row of `count` sequences, at least 1, computed once."""
        return self.rows.get(count) or self.rows.keep(count, self._row(count))

    def _row(self, count: int) -> Row:
        values, beyond = self._nodes(count)
        starts = [count * amount for amount in self.amounts]
        slopes = [
            (after_s - before_s) / (end - start)
            for (before_s, after_s), (start, end) in zip(
                pairwise(values), pairwise(starts), strict=True
            )
        ]
        touched = [left or right for left, right in pairwise(beyond)]
        below: Segment = values[0], 0.0, starts[0], True
        segments = zip(
            values, (*slopes, slopes[-1]), starts, (*touched, True), strict=True
        )
        return below, *segments

    def _nodes(self, count: int) -> tuple[list[float], list[bool]]:
        """Return seconds at each amount, and whether they were extrapolated."""
        counts = self._counts
        place = min(max(bisect_right(counts, count) - 1, 0), len(counts) - 2)
        low, high = counts[place], counts[place + 1]
        outside = not counts[0] <= count <= counts[-1]
        step = max(count - low, 0)
        values: list[float] = []
        for before_s, after_s in zip(
            self._seconds[place], self._seconds[place + 1], strict=True
        ):
            slope = (after_s - before_s) / (high - low)
            if outside and slope < 0.0:
                slope = 0.0
            value = before_s + slope * step
            # interpolation of two rising rows rises, but for the last bit
            values.append(max(value, values[-1]) if values else value)
        flags = zip(self._beyond[place], self._beyond[place + 1], strict=True)
        return values, [outside or x or (y and step > 0) for x, y in flags]

    def at(self, count: int, total: float) -> tuple[float, bool]:
        row = self.row(count)
        value, slope, start, beyond = row[bisect_right(self.amounts, total // count)]
        return value + slope * (total - start), beyond


class UnlikeLayers(NamedTuple):
    """Layers that see a window or a chunk, or hold a state, beside those that see all.

    Chunks are taken for equal ones (`sim.costs.roofline.mixture`).
    """

    surfaces: Sequence[tuple[LayerGroup, Surface]]
    """Over the query-key pairs that the layers of a group see."""
    states: StateLayers | Surface
    """The datasheet's, or a table over the tokens of chunks."""

    def at(
        self, count: int, num_tokens: int, context: int, pairs: int
    ) -> tuple[float, bool]:
        """Return seconds of chunks, and whether they were extrapolated."""
        seconds, outside = self._states(count, num_tokens)
        for group, surface in self.surfaces:
            _, seen = group.seen(count, num_tokens, context, pairs)
            own_s, beyond = surface.at(count, seen)
            seconds += own_s
            outside = outside or beyond
        return seconds, outside

    def _states(self, count: int, num_tokens: int) -> tuple[float, bool]:
        if isinstance(self.states, Surface):
            return self.states.at(count, num_tokens)
        seconds = float(self.states.prefill_s(count, num_tokens))
        return seconds, seconds > 0.0


class ChosenLayers(NamedTuple):
    """Layers that choose what they read: no table of latent attention tells of them."""

    mixture: Mixture
    """The datasheet's."""

    def at(
        self, count: int, num_tokens: int, context: int, pairs: int
    ) -> tuple[float, bool]:
        """Return seconds of chunks, which are extrapolated."""
        return float(self.mixture.prefill_s(count, num_tokens, context, pairs)), True


class Curve:
    """Seconds over one amount: straight lines between nodes, level below the first.

    Below the first node and beyond the last they were extrapolated.
    """

    __slots__ = ("_beyond", "_nodes", "_values")

    def __init__(
        self, nodes: Sequence[int], values: Sequence[float], beyond: Sequence[int]
    ) -> None:
        self._nodes = tuple(nodes)
        self._values: list[float] = np.maximum.accumulate(np.asarray(values)).tolist()
        self._beyond = tuple(map(bool, beyond))

    def at(self, amount: int) -> tuple[float, bool]:
        nodes, values = self._nodes, self._values
        j = min(max(bisect_right(nodes, amount) - 1, 0), len(nodes) - 2)
        slope = (values[j + 1] - values[j]) / (nodes[j + 1] - nodes[j])
        outside = not nodes[0] <= amount <= nodes[-1]
        # a segment touches both its nodes, what lies on its first that one alone
        touches = self._beyond[j] or (self._beyond[j + 1] and amount > nodes[j])
        return values[j] + slope * max(amount - nodes[j], 0), outside or touches


_FACTORS: Final = (0.05, 20.0)
"""Bounds of a factor; a table beyond them is of something else."""
_HALF_A_TOKEN: Final = 0.5
"""A mean chunk comes from a root: so much beside a node it is still the node's."""


def mean_chunk(count: int, context: int, pairs: int, share: int) -> tuple[float, float]:
    """Return query and past of the chunk that `count` chunks are taken for.

    `share` chunks divide the pairs: `count` for the mean chunk, 1 for one that does
    the work of all.
    """
    length = context / count
    edge = length + 0.5
    twice = 2.0 * (pairs / share)
    rest = edge * edge - twice
    if rest > 0.25:
        query = edge - sqrt(rest)
        return query, length - query
    return sqrt(twice + 0.25) - 0.5, 0.0


class _Axis:
    """Ascending nodes, and the segments between them."""

    __slots__ = ("first", "from_", "inner", "last", "nodes", "to")

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = tuple(map(float, nodes))
        self.first, self.last = self.nodes[0], self.nodes[-1]
        self.inner = self.nodes[1:-1]
        """Where one segment ends and the next begins."""
        self.from_ = self.first - _HALF_A_TOKEN
        self.to = self.last + _HALF_A_TOKEN
        """Values outside these were extrapolated."""

    def search(self) -> tuple[float, float, tuple[float, ...]]:
        """Return `from_`, `to` and `inner`: unpacking is faster than attributes."""
        return self.from_, self.to, self.inner

    def clipped(self, value: float) -> float:
        """Return the value, or the node that is nearest to it outside."""
        if self.from_ <= value <= self.to:
            return value
        return min(max(value, self.first), self.last)


def _coefficients(values: Seconds, axes: Sequence[_Axis]) -> Seconds:
    """Return (cells along each axis..., 2 ** axes) coefficients of each cell.

    The place of one is binary: a bit for each axis, the first axis the highest, is set
    where the coefficient is multiplied by the distance along it.
    """
    num_axes = len(axes)
    for place, axis in enumerate(axes):
        shape = [1] * values.ndim
        shape[place] = -1
        slopes = np.diff(values, axis=place) / np.diff(axis.nodes).reshape(shape)
        low = np.delete(values, -1, axis=place)
        values = np.stack([low, slopes], axis=-1)
    return values.reshape(*values.shape[:num_axes], 2**num_axes)


def _touched(beyond: Flags) -> Flags:
    """Return of each cell whether a corner of it is beyond."""
    for axis in range(beyond.ndim):
        last = beyond.shape[axis] - 1
        left, right = (np.delete(beyond, place, axis=axis) for place in (last, 0))
        beyond = left | right
    return beyond


class PastFactor:
    """Factor of a past: a chunk's time over that of a fresh one with as many pairs.

    Parameters
    ----------
    queries, pasts
        Nodes, ascending.
    factors
        (queries, pasts) at the nodes.
    beyond
        (queries, pasts), whether a node was extrapolated.
    """

    __slots__ = ("_cells", "_pasts", "_queries", "_search", "_stride")

    def __init__(
        self,
        queries: Sequence[int],
        pasts: Sequence[int],
        factors: Seconds,
        beyond: Flags,
    ) -> None:
        self._queries, self._pasts = axes = _Axis(queries), _Axis(pasts)
        self._search = *self._queries.search(), *self._pasts.search()
        self._stride = len(pasts) - 1
        found = _coefficients(np.clip(factors, *_FACTORS), axes)
        flags = _touched(beyond)[..., None]
        table = np.concatenate([found, flags], axis=-1).reshape(-1, 5)
        corners = [(q, p) for q in axes[0].nodes[:-1] for p in axes[1].nodes[:-1]]
        self._cells = [
            (*corner, *cell[:4], bool(cell[4]))
            for corner, cell in zip(corners, table.tolist(), strict=True)
        ]

    def at(self, query: float, past: float) -> tuple[float, bool]:
        from_query, to_query, queries, from_past, to_past, pasts = self._search
        outside = not (from_query <= query <= to_query and from_past <= past <= to_past)
        if outside:
            query = self._queries.clipped(query)
            past = self._pasts.clipped(past)
        start, before, a, b, c, d, beyond = self._cells[
            bisect_right(queries, query) * self._stride + bisect_right(pasts, past)
        ]
        past -= before
        return a + b * past + (c + d * past) * (query - start), outside or beyond


_Cell = tuple[
    float, float, float, float, float, float, float, float, float, float, float, bool
]
"""First corner over query, past and mean context, eight coefficients, and the flag."""


class BesideFactor:
    """Factor of chunks and decodes together: their time over the sum of both alone.

    One kernel serves both where an engine has one for mixed batches: small work fills
    gaps of the other (below 1), long contexts are walked without being split (above 1).

    Parameters
    ----------
    axes
        Nodes of queries, pasts, numbers of decodes and contexts, ascending; contexts
        are means over the decodes.
    factors, beyond
        (queries, pasts, decodes, contexts) at the nodes.
    """

    __slots__ = ("_cells", "_contexts", "_counts", "_num_cells", "_pasts", "_queries",
                 "_search", "_strides", "_table")  # fmt: skip

    def __init__(
        self,
        axes: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
        factors: Seconds,
        beyond: Flags,
    ) -> None:
        self._queries, self._pasts, self._counts, self._contexts = map(_Axis, axes)
        # the number of decodes comes first: a step's cells are cut at it
        order = self._counts, self._queries, self._pasts, self._contexts
        clipped = np.clip(factors, *_FACTORS).transpose(2, 0, 1, 3)
        found = _coefficients(clipped, order)
        flags = _touched(beyond.transpose(2, 0, 1, 3))[..., None]
        self._table = np.concatenate([found, flags], axis=-1).reshape(-1, 17)
        _, num_queries, num_pasts, num_contexts = found.shape[:4]
        self._strides = num_pasts * num_contexts, num_contexts
        self._num_cells = num_queries * num_pasts * num_contexts
        self._search = (
            *self._queries.search(),
            *self._pasts.search(),
            *self._contexts.search(),
            *self._strides,
            self._num_cells,
        )
        self._cells: Memo[_Cell] = Memo()

    def _cut(self, count: int, i: int, j: int, k: int) -> _Cell:
        counts = self._counts
        outside = not counts.first <= count <= counts.last
        within = min(max(float(count), counts.first), counts.last)
        place = bisect_right(counts.inner, within)
        along = within - counts.nodes[place]
        far, near = self._strides
        cell = place * self._num_cells + i * far + j * near + k
        *found, beyond = self._table[cell].tolist()
        corner = self._queries.nodes[i], self._pasts.nodes[j], self._contexts.nodes[k]
        a, b, c, d, e, f, g, h = (
            low + slope * along for low, slope in zip(found[:8], found[8:], strict=True)
        )
        return *corner, a, b, c, d, e, f, g, h, bool(outside or beyond)

    def at(
        self, query: float, past: float, num_decodes: int, context: int
    ) -> tuple[float, bool]:
        (
            from_query,
            to_query,
            queries,
            from_past,
            to_past,
            pasts,
            from_mean,
            to_mean,
            contexts,
            far,
            near,
            num_cells,
        ) = self._search
        mean = context / num_decodes
        outside = not (
            from_query <= query <= to_query
            and from_past <= past <= to_past
            and from_mean <= mean <= to_mean
        )
        if outside:
            query, past = self._queries.clipped(query), self._pasts.clipped(past)
            mean = self._contexts.clipped(mean)
        i = bisect_right(queries, query)
        j = bisect_right(pasts, past)
        k = bisect_right(contexts, mean)
        key = num_decodes * num_cells + i * far + j * near + k
        start, before, length, a, b, c, d, e, f, g, h, beyond = self._cells.get(
            key
        ) or self._cells.keep(key, self._cut(num_decodes, i, j, k))
        mean -= length
        past -= before
        low = a + b * mean + (c + d * mean) * past
        slope = e + f * mean + (g + h * mean) * past
        return low + slope * (query - start), outside or beyond


def read_table(
    table: Any, axes: Sequence[str], where: str, key: str = "time_s"
) -> tuple[list[list[int]], Seconds, Flags]:
    """Return the nodes along each axis, and seconds and flags at the nodes."""
    try:
        nodes = [[int(value) for value in table[axis]] for axis in axes]
        seconds = np.array(table[key], dtype=np.float64)
        beyond = np.array(table["beyond"], dtype=np.bool_)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{where} is no table ({error}); fit the profile again"
        ) from error
    if any(abs(value) > 2**53 for axis in nodes for value in axis):
        raise ConfigError(
            f"{where} has a node beyond all shapes; fit the profile again"
        )
    return nodes, seconds, beyond
