"""Blocks of groups and tokens of prefix trees over time: a row for each change."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import schema
from sim.results.tables.memory import ResultTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


_MOST_NOTED = 8192
"""Times whose numbers are kept before they are looked through."""


class GroupUsage:
    """Blocks that tables hold, by kind of group: a row for each change.

    Parameters
    ----------
    num_groups
        Groups of each kind; those of a kind follow one another in the engine.
    """

    def __init__(self, num_groups: Sequence[int]) -> None:
        ends = [*accumulate(num_groups)]
        self._spans = list(zip([0, *ends], ends, strict=False))
        self._noted_s = array("d")  # not looked through yet
        self._noted = array("q")
        self._last = np.zeros(len(self._spans), np.int64)
        self._times_s = array("d")
        self._kinds = array("q")
        self._num_blocks = array("q")

    def note(self, now_s: float, num_used_blocks: list[int]) -> None:
        """Take note of the blocks of each group right after a scheduler call."""
        self._noted_s.append(now_s)
        self._noted.extend(num_used_blocks)
        if len(self._noted_s) >= _MOST_NOTED:
            self._look_through()

    def note_all(self, times_s: Iterable[float], num_used_blocks: list[int]) -> None:
        """Do as `note` for several times, one after the other."""
        self._noted_s.extend(times_s)
        self._noted.extend(num_used_blocks)
        if len(self._noted_s) >= _MOST_NOTED:
            self._look_through()

    def _look_through(self) -> None:
        """Keep the rows noted that differ from those before."""
        if not self._noted_s:
            return
        noted = np.frombuffer(self._noted, np.int64).reshape(len(self._noted_s), -1)
        by_kind = np.stack([noted[:, a:b].sum(axis=1) for a, b in self._spans], axis=1)
        changes = np.diff(by_kind, axis=0, prepend=self._last[np.newaxis])
        rows, kinds = np.nonzero(changes)
        self._last = by_kind[-1]
        self._times_s.frombytes(np.frombuffer(self._noted_s)[rows].tobytes())
        self._kinds.frombytes(kinds.astype(np.int64).tobytes())
        self._num_blocks.frombytes(by_kind[rows, kinds].tobytes())
        self._noted_s, self._noted = array("d"), array("q")

    def table(self) -> ResultTable:
        """Return the rows, in order of time."""
        self._look_through()
        columns = {
            "time_s": np.frombuffer(self._times_s, np.float64),
            "kind": np.frombuffer(self._kinds, np.int64),
            "num_blocks": np.frombuffer(self._num_blocks, np.int64),
        }
        return ResultTable(columns, schema.KV_CACHE_GROUPS)


class PrefixTreeUsage:
    """Tokens and nodes of the tree, and the ratio: a row for each change of the tree.

    The ratio falls a little with each decode, and rises where requests are retracted
    or none is left: a row has its value at a change of the tree.
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


def mean_between(
    rows: Any, name: str, edges_s: Floats, *, kind: int | None = None
) -> Floats:
    """Return the mean of a column between edges, each value until the next row.

    Parameters
    ----------
    rows
        Columns of `sim.results.schema.KV_CACHE_GROUPS` or `PREFIX_TREE`.
    name
        Of the column; it is 0 before the first row.
    edges_s
        From 0 on, ascending.
    kind
        Place in ``capacity.kv_cache_groups`` of the summary: rows of others do not
        count.
    """
    own = slice(None) if kind is None else np.asarray(rows["kind"]) == kind
    times_s = np.concatenate([[0.0], np.asarray(rows["time_s"])[own]])
    values = np.concatenate([[0], np.asarray(rows[name])[own]])
    times_s = np.append(times_s, max(edges_s[-1], times_s[-1]))
    integral = np.append(0.0, np.cumsum(np.diff(times_s) * values))
    mean: Floats = np.diff(np.interp(edges_s, times_s, integral)) / np.diff(edges_s)
    return mean
