"""Chunks with a past, and decodes beside chunks: factors on what each costs alone.

A step knows sums over its chunks. They are taken for equal chunks: a *mean chunk* has
the mean context and the mean query-key pairs. A chunk of ``q`` tokens that ends at
context ``L`` has ``pairs = q (L + 1/2) - q^2 / 2``, so that ``q`` follows from the
other two by a square root, which Python and numpy round alike. More pairs than such a
chunk can have (chunks of different length) make a fresh chunk with as many.
"""

from __future__ import annotations

from bisect import bisect_right
from math import sqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sim.costs.parts import Memo
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]
    Flags = NDArray[np.bool_]

_FACTORS: Final = (0.05, 20.0)
"""Bounds of a factor; a table beyond them is of something else."""


def mean_chunk(count: int, context: int, pairs: int, share: int) -> tuple[float, float]:
    """Return query and past of the chunk that `count` chunks are taken for.

    Parameters
    ----------
    count, context, pairs
        Chunks of a step, their contexts and query-key pairs, summed.
    share
        Chunks that the pairs are divided among: `count` for the mean chunk, 1 for one
        that does the work of all.
    """
    length = context / count
    edge = length + 0.5
    twice = 2.0 * (pairs / share)
    rest = edge * edge - twice
    if rest > 0.25:
        query = edge - sqrt(rest)
        return query, length - query
    return sqrt(twice + 0.25) - 0.5, 0.0


def mean_chunks(
    count: Counts, context: Counts, pairs: Counts, share: Counts | int
) -> tuple[Seconds, Seconds]:
    """Return `mean_chunk` of each row; counts are above zero."""
    length = context / count
    edge = length + 0.5
    twice = 2.0 * (pairs / share)
    rest = edge * edge - twice
    has_past = rest > 0.25
    query = edge - np.sqrt(np.where(has_past, rest, 1.0))
    fresh = np.sqrt(twice + 0.25) - 0.5
    return np.where(has_past, query, fresh), np.where(has_past, length - query, 0.0)


class PastFactor:
    """What a past does: a chunk's time over that of a fresh one with as many pairs.

    Parameters
    ----------
    queries, pasts
        Nodes, ascending.
    factors
        (queries, pasts) at the nodes.
    beyond
        (queries, pasts), whether a node was extrapolated.
    """

    __slots__ = ("_beyond", "_factors", "_pasts", "_queries")

    def __init__(
        self,
        queries: Sequence[int],
        pasts: Sequence[int],
        factors: Seconds,
        beyond: Flags,
    ) -> None:
        self._queries = tuple(map(float, queries))
        self._pasts = tuple(map(float, pasts))
        self._factors: list[list[float]] = np.clip(factors, *_FACTORS).tolist()
        self._beyond: list[list[bool]] = _touched(beyond).tolist()

    def at(self, query: float, past: float) -> tuple[float, bool]:
        """Return the factor, level outside the nodes, and whether it is beyond them."""
        i, u = _place(self._queries, query)
        j, v = _place(self._pasts, past)
        low, high = self._factors[i], self._factors[i + 1]
        left = low[j] + (low[j + 1] - low[j]) * v
        right = high[j] + (high[j + 1] - high[j]) * v
        outside = (
            self._beyond[i][j] or query > self._queries[-1] or past > self._pasts[-1]
        )
        return left + (right - left) * u, outside

    def column(self, query: Seconds, past: Seconds) -> tuple[Seconds, Flags]:
        """Return `at` of each row."""
        i, u = _places(self._queries, query)
        j, v = _places(self._pasts, past)
        table = np.array(self._factors)
        left = table[i, j] + (table[i, j + 1] - table[i, j]) * v
        right = table[i + 1, j] + (table[i + 1, j + 1] - table[i + 1, j]) * v
        outside = np.array(self._beyond)[i, j]
        outside |= (query > self._queries[-1]) | (past > self._pasts[-1])
        return left + (right - left) * u, outside


class _Cube(NamedTuple):
    """Factors of so many decodes, over query, past and mean context, in one row."""

    factors: list[float]
    beyond: list[bool]


class BesideFactor:
    """What chunks and decodes do to each other: their time over the sum of both alone.

    One kernel serves both where an engine has one for mixed batches: small work fills
    gaps of the other (below 1), long contexts are walked without being split (above 1).

    Parameters
    ----------
    queries, pasts, num_decodes, contexts
        Nodes, ascending; contexts are means over the decodes.
    factors, beyond
        (queries, pasts, num_decodes, contexts) at the nodes.
    """

    __slots__ = ("_beyond", "_contexts", "_counts", "_cubes", "_factors", "_pasts",
                 "_queries", "_strides")  # fmt: skip

    def __init__(
        self,
        axes: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
        factors: Seconds,
        beyond: Flags,
    ) -> None:
        queries, pasts, counts, contexts = (tuple(map(float, axis)) for axis in axes)
        self._queries, self._pasts = queries, pasts
        self._counts, self._contexts = counts, contexts
        self._factors = np.clip(factors, *_FACTORS).transpose(2, 0, 1, 3)
        self._beyond = beyond.transpose(2, 0, 1, 3)
        self._strides = len(pasts) * len(contexts), len(contexts)
        self._cubes: Memo[_Cube] = Memo()

    def _cube(self, count: int) -> _Cube:
        return self._cubes.get(count) or self._cubes.keep(count, self._cut(count))

    def _cut(self, count: int) -> _Cube:
        i, u = _place(self._counts, float(count))
        low, high = self._factors[i], self._factors[i + 1]
        outside = self._beyond[i] | self._beyond[i + 1]
        outside = outside | (not self._counts[0] <= count <= self._counts[-1])
        factors = low + (high - low) * u
        # a cell touches the eight nodes around it
        return _Cube(factors.ravel().tolist(), _touched(outside).ravel().tolist())

    def at(
        self, query: float, past: float, num_decodes: int, context: int
    ) -> tuple[float, bool]:
        """Return the factor of a chunk beside decodes of so many keys in all."""
        mean = context / num_decodes
        factors, beyond = self._cubes.get(num_decodes) or self._cube(num_decodes)
        i, u = _place(self._queries, query)
        j, v = _place(self._pasts, past)
        k, w = _place(self._contexts, mean)
        far, near = self._strides
        a = i * far + j * near + k
        b = a + near
        low = _between(factors, a, b, v, w)
        high = _between(factors, a + far, b + far, v, w)
        outside = (
            beyond[a]
            or not self._queries[0] <= query <= self._queries[-1]
            or past > self._pasts[-1]
            or not self._contexts[0] <= mean <= self._contexts[-1]
        )
        return low + (high - low) * u, outside

    def column(
        self, query: Seconds, past: Seconds, num_decodes: Counts, context: Counts
    ) -> tuple[Seconds, Flags]:
        """Return `at` of each row; there are decodes in all of them."""
        mean = context / num_decodes
        distinct, rows = np.unique(num_decodes, return_inverse=True)
        cubes = [self._cube(count) for count in distinct.tolist()]
        factors = np.array([cube.factors for cube in cubes])
        beyond = np.array([cube.beyond for cube in cubes])
        i, u = _places(self._queries, query)
        j, v = _places(self._pasts, past)
        k, w = _places(self._contexts, mean)
        far, near = self._strides
        a = i * far + j * near + k
        b = a + near

        def between(first: Counts, second: Counts) -> Seconds:
            one, other = factors[rows, first], factors[rows, second]
            left = one + (factors[rows, first + 1] - one) * w
            right = other + (factors[rows, second + 1] - other) * w
            found: Seconds = left + (right - left) * v
            return found

        low, high = between(a, b), between(a + far, b + far)
        outside = beyond[rows, a] | (past > self._pasts[-1])
        outside |= (query < self._queries[0]) | (query > self._queries[-1])
        outside |= (mean < self._contexts[0]) | (mean > self._contexts[-1])
        return low + (high - low) * u, outside


def _between(
    factors: list[float], first: int, second: int, v: float, w: float
) -> float:
    one, other = factors[first], factors[second]
    left = one + (factors[first + 1] - one) * w
    right = other + (factors[second + 1] - other) * w
    return left + (right - left) * v


def _place(nodes: tuple[float, ...], value: float) -> tuple[int, float]:
    """Return the segment that `value` lies in and how far along it is, 0 to 1."""
    i = min(max(bisect_right(nodes, value) - 1, 0), len(nodes) - 2)
    along = (value - nodes[i]) / (nodes[i + 1] - nodes[i])
    return i, min(max(along, 0.0), 1.0)


def _places(nodes: tuple[float, ...], values: Seconds) -> tuple[Counts, Seconds]:
    """Return `_place` of each value."""
    axis = np.array(nodes)
    i = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(nodes) - 2)
    along = (values - axis[i]) / (axis[i + 1] - axis[i])
    return i, np.minimum(np.maximum(along, 0.0), 1.0)


def _touched(beyond: Flags) -> Flags:
    """Return whether a cell, named by its first corner, touches what is beyond."""
    found = beyond.copy()
    for axis in range(found.ndim):
        found |= np.roll(found, -1, axis=axis)
    return found


# -- reading ------------------------------------------------------------------------


def read_past(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    fresh: Callable[[int], float],
) -> PastFactor:
    """Return the factors that the tables of an entry say.

    Parameters
    ----------
    tables
        Window to table of one layer.
    layers
        Window to the number of layers that have it.
    fresh
        Seconds of a fresh chunk with so many pairs, all layers.

    Raises
    ------
    ConfigError
        When a table is missing or misshapen.
    """
    axes = ("queries", "pasts")
    (queries, pasts), seconds, beyond = _read(tables, layers, axes, "prefill_past")
    alone = np.array([[fresh(pairs_of(q, p)) for p in pasts] for q in queries])
    return PastFactor(queries, pasts, seconds / alone, beyond)


def read_beside(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    chunk: Callable[[int, int], float],
    decodes: Callable[[int, int], float],
    key_s: float,
) -> BesideFactor:
    """Return the factors of chunks beside decodes; as `read_past`.

    Parameters
    ----------
    tables, layers
        As in `read_past`.
    chunk
        Seconds of one chunk of (query, past) alone, all layers.
    decodes
        Seconds of so many decodes of so many keys each alone, all layers.
    key_s
        Seconds to read a key in all layers: no time is below it for all keys.
    """
    names = ("queries", "pasts", "num_decodes", "contexts")
    axes, seconds, beyond = _read(tables, layers, names, "mixed")
    queries, pasts, counts, contexts = axes
    q, p, n, k = np.ix_(*map(np.array, axes))
    seconds = np.maximum(seconds, key_s * (q + p + n * k))
    chunks = np.array([[chunk(q, p) for p in pasts] for q in queries])
    rows = np.array([[decodes(n, k) for k in contexts] for n in counts])
    alone = chunks[:, :, None, None] + rows[None, None, :, :]
    return BesideFactor((queries, pasts, counts, contexts), seconds / alone, beyond)


def pairs_of(query: int, past: int) -> int:
    """Return the causal query-key pairs of a chunk."""
    return query * past + query * (query + 1) // 2


def _read(
    tables: Mapping[str, Any],
    layers: Mapping[int, int],
    names: tuple[str, ...],
    where: str,
) -> tuple[list[list[int]], Seconds, Flags]:
    """Return nodes, and seconds and flags of all layers."""
    total: Any = 0.0
    outside: Any = False
    axes: list[list[int]] = []
    for window, count in layers.items():
        try:
            table = tables[str(window)]
            axes = [[int(value) for value in table[name]] for name in names]
            seconds = np.array(table["time_s"], dtype=np.float64)
            beyond = np.array(table["beyond"], dtype=np.bool_)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"profile: {where} of window {window} is no table ({error}); fit the "
                "profile again"
            ) from error
        _check(axes, seconds, beyond, where)
        total = total + count * seconds
        outside = outside | (beyond if count else np.zeros_like(beyond))
    return axes, total, outside


def _check(axes: list[list[int]], seconds: Seconds, beyond: Flags, where: str) -> None:
    shape = tuple(map(len, axes))
    if min(shape) < 2 or seconds.shape != shape or beyond.shape != shape:
        raise ConfigError(
            f"profile: {where} must be at least 2 along each axis, one value a node; "
            f"got {seconds.shape}: fit the profile again"
        )
    if any(min(np.diff(axis)) < 1 or axis[0] < 0 for axis in axes):
        raise ConfigError(f"profile: {where}: nodes must be >= 0 and ascend")
    if not (np.isfinite(seconds).all() and (seconds > 0.0).all()):
        raise ConfigError(f"profile: {where} must hold finite seconds > 0")
