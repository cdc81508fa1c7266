"""How many blocks each kind of KV cache group holds, as it changes."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results import schema
from sim.results.table import ResultTable, arrow_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


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
        self._seen: list[int] = []
        self._last = [0] * len(self._spans)
        self._times_s = array("d")
        self._kinds = array("q")
        self._num_blocks = array("q")

    def note(self, now_s: float, num_used_blocks: list[int]) -> None:
        """Take note of what each group holds right after a scheduler call."""
        if num_used_blocks == self._seen:
            return
        self._seen = num_used_blocks
        for kind, (first, stop) in enumerate(self._spans):
            num_blocks = sum(num_used_blocks[first:stop])
            if num_blocks != self._last[kind]:
                self._last[kind] = num_blocks
                self._times_s.append(now_s)
                self._kinds.append(kind)
                self._num_blocks.append(num_blocks)

    def note_all(
        self, times_s: Iterable[float], num_used_blocks: Iterable[list[int]]
    ) -> None:
        """Do as `note` for several times."""
        for now_s, numbers in zip(times_s, num_used_blocks, strict=True):
            self.note(now_s, numbers)

    def table(self) -> ResultTable:
        """Return the rows, in order of time."""
        columns = {
            "time_s": np.frombuffer(self._times_s, np.float64),
            "kind": np.frombuffer(self._kinds, np.int64),
            "num_blocks": np.frombuffer(self._num_blocks, np.int64),
        }
        table = arrow_table(columns, schema.KV_CACHE_GROUPS)
        return ResultTable(table, schema.KV_CACHE_GROUPS)


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
