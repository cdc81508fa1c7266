"""Tables of a profile as a cost model looks them up: straight lines between nodes."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sim.costs.parts import Memo
from sim.errors import ConfigError
from sim.quantization import quantization_scheme
from sim.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from sim.architecture import ModelArchitecture

    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]

BOOST: Final = 1.1
"""Over the datasheet's peak by so much is still believed: clocks boost."""


def weight_bits_of(model: ModelArchitecture) -> int:
    """Return the bits of a weight of the linear layers: 16, 8 or 4."""
    scheme = quantization_scheme(model.quantization)
    if scheme is None or scheme.only_experts:
        return 16
    return 8 if scheme.weight_bits > 4.5 else 4


def geometry_of(
    model: ModelArchitecture, tensor_parallel_size: int, kv_itemsize_bytes: int
) -> dict[str, int]:
    """Return what a table depends on; two models that agree on it share tables."""
    tp = tensor_parallel_size
    return {
        "tensor_parallel_size": tp,
        "kv_itemsize_bytes": kv_itemsize_bytes,
        "weight_bits": weight_bits_of(model),
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_attention_heads // tp,
        "num_kv_heads": model.kv_heads_per_rank(tp),
        "head_dim": model.head_dim,
        "window": model.sliding_window or 0,
        "linear_elements": linear_elements(model, tp),
    }


def linear_elements(model: ModelArchitecture, tensor_parallel_size: int) -> int:
    """Return elements of the dense linear layers of one rank."""
    return sum(
        tensor.num_elements * tensor.count
        for tensor in weight_tensors(model, tensor_parallel_size)
        if tensor.role is TensorRole.LINEAR and tensor.columns > 1
    )


class Row(NamedTuple):
    """Seconds of so many sequences over the amount of each."""

    values: tuple[float, ...]
    slopes: tuple[float, ...]
    """Seconds a unit of the *total* amount, from each node on."""
    beyond: tuple[bool, ...]
    """Whether a segment touches what was extrapolated; the last one always does."""


class Surface:
    """Seconds over (number of sequences, mean amount a sequence).

    Between nodes lie straight lines, first over the number of sequences, then over the
    total amount, so that a step needs one search, one product and one sum. Beyond the
    last node the last line goes on. More of an amount never costs less: where a table
    says so (noise, or another kernel taking over), the dearer value holds.

    Parameters
    ----------
    counts, amounts
        Nodes, ascending.
    seconds
        (counts, amounts) at the nodes.
    beyond
        (counts, amounts), whether a node was extrapolated.
    """

    __slots__ = ("_beyond", "_counts", "_rows", "_seconds", "amounts")

    def __init__(
        self,
        counts: Sequence[int],
        amounts: Sequence[int],
        seconds: Seconds,
        beyond: NDArray[np.bool_],
    ) -> None:
        self.amounts = tuple(amounts)
        self._counts = tuple(counts)
        raised = np.maximum.accumulate(seconds, axis=1)
        self._seconds: list[list[float]] = raised.tolist()
        self._beyond: list[list[bool]] = beyond.tolist()
        self._rows: Memo[Row] = Memo()

    def row(self, count: int) -> Row:
        """Return the row of `count` sequences, computed once."""
        return self._rows.get(count) or self._rows.keep(count, self._row(count))

    def _row(self, count: int) -> Row:
        counts = self._counts
        place = min(max(bisect_right(counts, count) - 1, 0), len(counts) - 2)
        low, high = counts[place], counts[place + 1]
        past_end = count > counts[-1]
        step = count - low
        values = []
        for before_s, after_s in zip(
            self._seconds[place], self._seconds[place + 1], strict=True
        ):
            slope = (after_s - before_s) / (high - low)
            if past_end and slope < 0.0:
                slope = 0.0
            values.append(before_s + slope * step)
        # interpolation of two rising rows rises, but for the last bit
        for j in range(1, len(values)):
            values[j] = max(values[j], values[j - 1])
        amounts = self.amounts
        slopes = [
            (values[j + 1] - values[j]) / (count * (amounts[j + 1] - amounts[j]))
            for j in range(len(values) - 1)
        ]
        outside = [
            past_end or x or (y and step > 0)
            for x, y in zip(self._beyond[place], self._beyond[place + 1], strict=True)
        ]
        beyond = [x or y for x, y in pairwise(outside)]
        return Row(tuple(values), (*slopes, slopes[-1]), (*beyond, True))

    def at(self, count: int, total: int) -> tuple[float, bool]:
        """Return seconds of `count` sequences of `total` amount, and the flag."""
        values, slopes, beyond = self._rows.get(count) or self.row(count)
        j = bisect_right(self.amounts, total // count) - 1
        if j < 0:
            return values[0], beyond[0]
        return values[j] + slopes[j] * (total - count * self.amounts[j]), beyond[j]

    def column(self, counts: Counts, totals: Counts) -> tuple[Seconds, Seconds]:
        """Return `at` of each pair, flags as 0.0 and 1.0; counts of 0 cost nothing."""
        seconds, flags = np.zeros(len(counts)), np.zeros(len(counts))
        own = np.flatnonzero(counts)
        if not len(own):
            return seconds, flags
        distinct, rows = np.unique(counts[own], return_inverse=True)
        table = [self.row(count) for count in distinct.tolist()]
        values, slopes, beyond = (
            np.array([row[part] for row in table], dtype=np.float64)
            for part in range(3)
        )
        nodes = np.array(self.amounts, dtype=np.int64)
        count, total = counts[own], totals[own]
        j = np.searchsorted(nodes, total // count, side="right") - 1
        first = np.maximum(j, 0)
        rest = np.where(j < 0, 0, total - count * nodes[first])
        seconds[own] = values[rows, first] + slopes[rows, first] * rest
        flags[own] = beyond[rows, first]
        return seconds, flags


class Curve:
    """Seconds over tokens: straight lines between nodes, level below the first."""

    __slots__ = ("_beyond", "_nodes", "_values")

    def __init__(
        self, nodes: Sequence[int], values: Sequence[float], beyond: Sequence[int]
    ) -> None:
        self._nodes = tuple(nodes)
        self._values: list[float] = np.maximum.accumulate(np.asarray(values)).tolist()
        self._beyond = tuple(map(bool, beyond))

    def at(self, amount: int) -> tuple[float, bool]:
        """Return seconds of `amount`, and whether they were extrapolated."""
        nodes, values = self._nodes, self._values
        j = min(max(bisect_right(nodes, amount) - 1, 0), len(nodes) - 2)
        slope = (values[j + 1] - values[j]) / (nodes[j + 1] - nodes[j])
        outside = amount > nodes[-1] or self._beyond[j + (amount > nodes[j])]
        return values[j] + slope * max(amount - nodes[j], 0), outside


def read_surface(table: Mapping[str, Any], where: str) -> tuple[Any, Any, Any, Any]:
    """Return counts, amounts, seconds and flags of a tabulated surface.

    Raises
    ------
    ConfigError
        When it is not rectangular, its nodes do not ascend, or a time is not positive.
    """
    try:
        counts = [int(value) for value in table["counts"]]
        amounts = [int(value) for value in table["amounts"]]
        seconds = np.array(table["time_s"], dtype=np.float64)
        beyond = np.array(table["beyond"], dtype=np.bool_)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} is no table ({error}); fit the profile again"
        ) from (error)
    shape = len(counts), len(amounts)
    if min(shape) < 2 or seconds.shape != shape or beyond.shape != shape:
        raise ConfigError(f"{where} must be at least 2 x 2; got {seconds.shape}")
    if min(*np.diff(counts), *np.diff(amounts), counts[0], amounts[0]) < 1:
        raise ConfigError(f"{where}: nodes must be above zero and ascend")
    if not (np.isfinite(seconds).all() and (seconds > 0.0).all()):
        raise ConfigError(f"{where} must hold finite seconds > 0")
    return counts, amounts, seconds, beyond
