"""The clairvoyant bound: no policy, however clever, finds more blocks.

Between two requests that touch a block, a cache may keep it or not; keeping it is
worth one block found, if the second request may read it at all. To keep the blocks
read soonest, and to let go first those read last, is optimal for pages of equal size
(Belady 1966; with bypass, as a new block need not be kept either). Of blocks with the
same next reader the deepest go first, so that the blocks kept of a path are always its
beginning and each of them counts: the bound is reached by a prefix cache.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from workloads.analysis.paths import NEVER, Marks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workloads.analysis.paths import BlockPaths


@dataclass(frozen=True, slots=True)
class NextReads:
    """The next reader of the blocks that each request leaves behind.

    Parameters
    ----------
    readers, num_blocks
        The next reader of some blocks, and how many; request by request, blocks that
        are never read again left out. int64 of shape ``(m,)``.
    ends
        Of each request, the entry behind its last; int64 of shape ``(n,)``.
    """

    readers: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    ends: NDArray[np.int64]


def next_reads(paths: BlockPaths) -> NextReads:
    """Find for all blocks the next request that reads them. O(visits)."""
    if paths.shares_nothing:
        nothing = np.zeros(0, dtype=np.int64)
        return NextReads(nothing, nothing, np.zeros(paths.num_requests, np.int64))
    marks = Marks(paths.num_runs)
    readers, lengths, counts = array("q"), array("q"), array("q")
    number = paths.num_requests
    for visits in paths.condensed().backwards():
        number -= 1
        before = len(readers)
        for run, used, readable in visits:
            for length, reader in marks.replace(run, used, readable, number):
                if reader == NEVER:
                    continue
                if len(readers) > before and readers[-1] == reader:
                    lengths[-1] += length
                else:
                    readers.append(reader)
                    lengths.append(length)
        counts.append(len(readers) - before)
    # Entries stand last request first, and so do the counts.
    backwards = (np.array(c, dtype=np.int64)[::-1] for c in (readers, lengths, counts))
    first, second, third = backwards
    return NextReads(first, second, np.cumsum(third))


def belady_hits(reads: NextReads, num_blocks: int) -> int:
    """Return the blocks that a clairvoyant cache of `num_blocks` blocks finds."""
    kept = [0] * len(reads.ends)  # blocks in the cache, by their next reader
    farthest: list[int] = []  # the negated readers of some, a heap
    entries = list(zip(reads.readers.tolist(), reads.num_blocks.tolist(), strict=True))
    num_hits = num_kept = begin = 0
    for request, end in enumerate(reads.ends.tolist()):
        num_hits += kept[request]
        num_kept -= kept[request]
        kept[request] = 0
        for reader, length in entries[begin:end]:
            if not kept[reader]:
                heappush(farthest, -reader)
            kept[reader] += length
            num_kept += length
        begin = end
        while num_kept > num_blocks:
            reader = -farthest[0]
            evicted = min(kept[reader], num_kept - num_blocks)
            kept[reader] -= evicted
            num_kept -= evicted
            if not kept[reader]:
                heappop(farthest)
    return num_hits


def belady_blocks_for(reads: NextReads, num_hits: int, most_blocks: int) -> int:
    """Return the smallest clairvoyant cache that finds `num_hits` blocks."""
    low, high = -1, most_blocks  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if belady_hits(reads, middle) >= num_hits:
            high = middle
        else:
            low = middle
    return high
