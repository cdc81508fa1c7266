"""LRU at every size at once: reuse distances of a prefix cache in one pass.

The cache is V1's block pool with one request at a time, as of vLLM 0.24: before that,
partly filled blocks that were freed took room in the queue as well. A request reads
its longest cached prefix of full blocks, and then all its full blocks are the most
recently used ones, each more recent than those behind it, since V1 frees a table from
its tail. So no block is evicted before its descendants, and the blocks can be thought
of as one stack, of which a cache of C blocks holds the top C (the inclusion property
of Mattson et al., Evaluation techniques for storage hierarchies, 1970): the whole
curve is the histogram of the depths at which blocks are found.

Of a request's path, the blocks that the same earlier request ``t`` was the last to
touch are neighbours on the path and neighbours in the stack, below all blocks touched
after ``t``. They are found at depths ``above + 1, above + 2, ...``, a ramp: a request
costs as many look-ups in a Fenwick tree as there are earlier requests that it shares a
last touch with, and not as many as it has blocks.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from workloads.analysis.hit_curve import HitCurve
from workloads.analysis.paths import NEVER, Marks

if TYPE_CHECKING:
    from workloads.analysis.paths import BlockPaths, Visit

Group = tuple[int, int, int]
"""``(mark, num_blocks, num_readable)`` of neighbours on a path, top first."""


def lru_curve(paths: BlockPaths) -> HitCurve:
    """Return the blocks that LRU finds in caches of every size. O(n log n)."""
    marks = Marks(paths.num_runs)
    touched = TouchCounts(paths.num_requests)
    starts, stops = array("q"), array("q")
    all_visits = () if paths.shares_nothing else paths.condensed().visits()
    for number, visits in enumerate(all_visits):
        groups = path_groups(visits, marks, number)
        for mark, _, num_readable in groups:
            if num_readable and mark != NEVER:
                above = touched.num_after(mark)
                starts.append(above)
                stops.append(above + num_readable)
        for mark, num_blocks, _ in groups:
            touched.move(mark, num_blocks)
        touched.append()
    return HitCurve.of_ramps(*(np.array(c, dtype=np.int64) for c in (starts, stops)))


def path_groups(visits: list[Visit], marks: Marks, mark: int) -> list[Group]:
    """Mark a path; return its marks before, equal neighbours in one group."""
    groups: list[Group] = []
    last, num_blocks, num_readable = NEVER, 0, 0
    for run, used, readable in visits:
        left = readable
        for length, found in marks.replace(run, used, used, mark):
            if found != last:
                groups.append((last, num_blocks, num_readable))
                last, num_blocks, num_readable = found, 0, 0
            num_blocks += length
            read = left if left < length else length
            num_readable += read
            left -= read
    groups.append((last, num_blocks, num_readable))
    return groups


class TouchCounts:
    """How many blocks each request was the last to touch: a Fenwick tree.

    Requests are appended one by one; counts move to the one that is being appended.
    """

    __slots__ = ("_current", "_num_appended", "_tree", "num_blocks")

    def __init__(self, num_requests: int) -> None:
        self._tree = [0] * (num_requests + 1)
        self._num_appended = 0
        self._current = 0
        self.num_blocks = 0
        """Blocks touched by those that were appended."""

    def num_after(self, request: int) -> int:
        """Return the blocks last touched after `request`. O(log n)."""
        tree, total = self._tree, 0
        position = request + 1
        while position:
            total += tree[position]
            position &= position - 1
        return self.num_blocks - total

    def move(self, request: int, num_blocks: int) -> None:
        """Let the request in hand be the last to touch blocks of `request`. O(log n).

        Where they are touched for the first time, `request` is `NEVER`.
        """
        self._current += num_blocks
        if request == NEVER or not num_blocks:
            return
        self.num_blocks -= num_blocks
        tree, end = self._tree, self._num_appended
        position = request + 1
        while position <= end:
            tree[position] -= num_blocks
            position += position & -position

    def append(self) -> None:
        """End the request in hand, and begin the next. O(1) on average."""
        tree = self._tree
        self._num_appended += 1
        position = self._num_appended
        total = self._current
        child, stop = position - 1, position & (position - 1)
        while child != stop:  # the node sums all since `stop`
            total += tree[child]
            child &= child - 1
        tree[position] = total
        self.num_blocks += self._current
        self._current = 0
