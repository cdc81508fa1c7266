"""How many blocks each kind of KV cache group holds, as it changes."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import schema
from sim.results.table import ResultTable

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
        """Take note of what each group holds right after a scheduler call."""
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


def mean_blocks(rows: Any, kind: int, edges_s: Floats) -> Floats:
    """Return how many blocks a kind held between edges, on average over time.

    Parameters
    ----------
    rows
        Columns of `sim.results.schema.KV_CACHE_GROUPS`.
    kind
        Place in ``capacity.kv_cache_groups`` of the summary.
    edges_s
        From 0 on, ascending.
    """
    is_own = np.asarray(rows["kind"]) == kind
    times_s = np.concatenate([[0.0], np.asarray(rows["time_s"])[is_own]])
    blocks = np.concatenate([[0], np.asarray(rows["num_blocks"])[is_own]])
    times_s = np.append(times_s, max(edges_s[-1], times_s[-1]))
    integral = np.append(0.0, np.cumsum(np.diff(times_s) * blocks))
    held: Floats = np.diff(np.interp(edges_s, times_s, integral)) / np.diff(edges_s)
    return held
