"""Tokens and nodes of a prefix tree, and the new-token ratio, over time."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import schema
from sim.results.table import ResultTable

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


class PrefixTreeUsage:
    """Tokens and nodes of the tree, and the ratio: a row for each change of the tree.

    The ratio falls a little with each decode, and rises where requests are retracted
    or nothing is left to do: a row says what it was when the tree changed.
    """

    def __init__(self) -> None:
        self._last = (-1, -1, -1)
        self._times_s = array("d")
        self._counts = array("q")
        self._ratios = array("d")

    def note(self, now_s: float, counts: tuple[int, int, int], ratio: float) -> None:
        """Take note of evictable tokens, protected ones and nodes after a call."""
        if counts == self._last:
            return
        self._last = counts
        self._times_s.append(now_s)
        self._counts.extend(counts)
        self._ratios.append(ratio)

    def table(self) -> ResultTable:
        """Return the rows, in order of time."""
        counts = np.frombuffer(self._counts, np.int64).reshape(-1, 3)
        names = ("num_evictable_tokens", "num_protected_tokens", "num_tree_nodes")
        columns = {
            "time_s": np.frombuffer(self._times_s, np.float64),
            **{name: counts[:, at] for at, name in enumerate(names)},
            "new_token_ratio": np.frombuffer(self._ratios, np.float64),
        }
        return ResultTable(columns, schema.PREFIX_TREE)


def mean_between(rows: Any, name: str, edges_s: Floats) -> Floats:
    """Return the mean of a column between edges, each value until the next row.

    Parameters
    ----------
    rows
        Columns of `sim.results.schema.PREFIX_TREE`.
    name
        Of the column; it is 0 before the first row.
    edges_s
        From 0 on, ascending.
    """
    times_s = np.concatenate([[0.0], np.asarray(rows["time_s"])])
    values = np.concatenate([[0.0], np.asarray(rows[name])])
    times_s = np.append(times_s, max(edges_s[-1], times_s[-1]))
    integral = np.append(0.0, np.cumsum(np.diff(times_s) * values))
    mean: Floats = np.diff(np.interp(edges_s, times_s, integral)) / np.diff(edges_s)
    return mean
