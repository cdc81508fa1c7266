"""``blocks.json``: how long blocks hold content, are held, and wait to be hit again."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


BLOCKS_FILE = "blocks.json"
BLOCKS_FORMAT = "kvsim-blocks"
FORMAT_VERSION = 1

_FEW = 24
"""Blocks up to which a loop is faster than numpy."""

_NEVER = -1


Nanoseconds = npt.NDArray[np.int64]

NS_PER_S = 1_000_000_000

_FIRST_DECADE, _LAST_DECADE, _BINS_PER_DECADE = -4, 6, 10

BIN_EDGES_S = tuple(
    float(f"{10 ** (_FIRST_DECADE + index / _BINS_PER_DECADE):.6g}")
    for index in range((_LAST_DECADE - _FIRST_DECADE) * _BINS_PER_DECADE + 1)
)
"""Ten bins a decade from 0.1 ms to 1,000,000 s; one bin below and one above."""

NUM_BINS = len(BIN_EDGES_S) + 1

_EDGES_NS = np.array([round(edge_s * NS_PER_S) for edge_s in BIN_EDGES_S], np.int64)

_MOST_WAITING = 4096


class DurationHistogram:
    """Counts of durations by bin; their number, sum, minimum and maximum exactly.

    Durations are whole nanoseconds, so that a sum does not depend on the order of its
    parts: the paths of a run tell of the same blocks in different orders.

    Durations wait in a buffer of bounded length to be counted many at a time.
    """

    def __init__(self) -> None:
        self._count = 0
        self._total_ns = 0
        self._min_ns = 0
        self._max_ns = 0
        self._counts = np.zeros(NUM_BINS, np.int64)
        self._single: list[int] = []
        self._arrays: list[Nanoseconds] = []
        self._num_in_arrays = 0

    @property
    def count(self) -> int:
        return self._count + len(self._single) + self._num_in_arrays

    def add(self, duration_ns: int) -> None:
        self._single.append(duration_ns)
        if len(self._single) >= _MOST_WAITING:
            self._flush()

    def add_all(self, durations_ns: Nanoseconds) -> None:
        """Count several durations of at least 0; the array must not change any more."""
        if not len(durations_ns):
            return
        self._arrays.append(durations_ns)
        self._num_in_arrays += len(durations_ns)
        if self._num_in_arrays >= _MOST_WAITING:
            self._flush()

    def _flush(self) -> None:
        if not self._single and not self._arrays:
            return
        single = np.array(self._single, np.int64)
        durations_ns = np.concatenate([single, *self._arrays])
        lowest = int(durations_ns.min())
        self._min_ns = min(self._min_ns, lowest) if self._count else lowest
        self._max_ns = max(self._max_ns, int(durations_ns.max()))
        self._count += len(durations_ns)
        # In halves, neither of whose sums leaves 64 bits.
        self._total_ns += int((durations_ns >> 32).sum()) << 32
        self._total_ns += int((durations_ns & 0xFFFFFFFF).sum())
        bins = np.searchsorted(_EDGES_NS, durations_ns, side="right")
        self._counts += np.bincount(bins, minlength=NUM_BINS)
        self._single, self._arrays, self._num_in_arrays = [], [], 0

    def counts(self) -> list[int]:
        """Return the counts: below the first edge, between edges, above the last."""
        self._flush()
        counts: list[int] = self._counts.tolist()
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready, in seconds; no mean, minimum and maximum of nothing."""
        self._flush()
        count = self._count
        return {
            "count": count,
            "mean_s": self._total_ns / (count * NS_PER_S) if count else None,
            "min_s": self._min_ns / NS_PER_S if count else None,
            "max_s": self._max_ns / NS_PER_S if count else None,
            "counts": self.counts(),
        }


class Clock(Protocol):
    """A clock of the simulated time."""

    @property
    def now(self) -> float:
        """Seconds."""
        ...


class Lifetimes:
    """Durations of one kind, and those that the end of the run cut.

    Attributes
    ----------
    ended
        Durations that came to their end.
    censored
        Ages, at the end of the run, of those that did not.
    """

    def __init__(self) -> None:
        self.ended = DurationHistogram()
        self.censored = DurationHistogram()

    def to_dict(self) -> dict[str, Any]:
        """Return both, JSON-ready."""
        return self.ended.to_dict() | {"censored": self.censored.to_dict()}


class BlockTimes:
    """A `cache.stats.BlockObserver` that times the blocks of a tier.

    ::

        taken ........ released ....... revived ... released ....... evicted, taken
        |-- time held --|-- reuse gap --|-- held --|-- idle before eviction --|
        |---------------------- residency of the content ---------------------|

    Content that no look-up can find ends with its release instead.

    Parameters
    ----------
    clock
        Read at every call: within a scheduler call it shows the start of the step, at
        the release of finished requests its end.
    num_ids
        Block ids are below this number.

    Attributes
    ----------
    num_taken, num_released, num_revived, num_evicted
        Blocks, each as often as it happened to it.
    residency, time_held, reuse_gap, idle_before_eviction
        Durations that were timed, in nanoseconds.
    """

    def __init__(self, clock: Clock, num_ids: int) -> None:
        self.num_taken = 0
        self.num_released = 0
        self.num_revived = 0
        self.num_evicted = 0
        self.residency = Lifetimes()
        self.time_held = Lifetimes()
        self.reuse_gap = Lifetimes()
        self.idle_before_eviction = DurationHistogram()
        self._clock = clock
        # By block id: since when it holds its content, since when it is held, and
        # since when it is free; -1 for it does not.
        self._taken, self._taken_ns = _times(num_ids)
        self._held, self._held_ns = _times(num_ids)
        self._freed, self._freed_ns = _times(num_ids)

    def _now_ns(self) -> int:
        return round(self._clock.now * NS_PER_S)

    def taken(self, block_ids: Sequence[int]) -> None:
        now = self._now_ns()
        self.num_taken += len(block_ids)
        if len(block_ids) > _FEW:
            ids = np.array(block_ids)
            before = ids[self._taken_ns[ids] != _NEVER]
            residency = self._freed_ns[before] - self._taken_ns[before]
            self.residency.ended.add_all(residency)
            self._taken_ns[ids] = self._held_ns[ids] = now
            return
        taken, held = self._taken, self._held
        for block_id in block_ids:
            if taken[block_id] != _NEVER:  # not evicted: no look-up could find it
                self.residency.ended.add(self._freed[block_id] - taken[block_id])
            taken[block_id] = held[block_id] = now

    def released(self, block_ids: Sequence[int]) -> None:
        now = self._now_ns()
        self.num_released += len(block_ids)
        if len(block_ids) > _FEW:
            ids = np.array(block_ids)
            self.time_held.ended.add_all(now - self._held_ns[ids])
            self._held_ns[ids] = _NEVER
            self._freed_ns[ids] = now
            return
        held, freed = self._held, self._freed
        for block_id in block_ids:
            self.time_held.ended.add(now - held[block_id])
            held[block_id] = _NEVER
            freed[block_id] = now

    def revived(self, block_ids: Sequence[int]) -> None:
        now = self._now_ns()
        self.num_revived += len(block_ids)
        if len(block_ids) > _FEW:
            ids = np.array(block_ids)
            self.reuse_gap.ended.add_all(now - self._freed_ns[ids])
            self._held_ns[ids] = now
            return
        held, freed = self._held, self._freed
        for block_id in block_ids:
            self.reuse_gap.ended.add(now - freed[block_id])
            held[block_id] = now

    def evicted(self, block_ids: Sequence[int]) -> None:
        now = self._now_ns()
        self.num_evicted += len(block_ids)
        if len(block_ids) > _FEW:
            ids = np.array(block_ids)
            self.residency.ended.add_all(now - self._taken_ns[ids])
            self.idle_before_eviction.add_all(now - self._freed_ns[ids])
            self._taken_ns[ids] = _NEVER
            return
        taken, freed = self._taken, self._freed
        for block_id in block_ids:
            self.residency.ended.add(now - taken[block_id])
            self.idle_before_eviction.add(now - freed[block_id])
            taken[block_id] = _NEVER

    def close(self, cached_ids: Iterable[int]) -> None:
        """Count durations that the end of the run cuts; no call may follow.

        Parameters
        ----------
        cached_ids
            Blocks that a look-up could find, held or free.
        """
        now = self._now_ns()
        filled = self._taken_ns != _NEVER
        held = filled & (self._held_ns != _NEVER)
        cached = np.zeros_like(filled)
        cached[list(cached_ids)] = True
        waiting = filled & ~held & cached
        gone = filled & ~held & ~cached
        self.residency.ended.add_all(self._freed_ns[gone] - self._taken_ns[gone])
        self.residency.censored.add_all(now - self._taken_ns[held | waiting])
        self.time_held.censored.add_all(now - self._held_ns[held])
        self.reuse_gap.censored.add_all(now - self._freed_ns[waiting])

    def to_dict(self) -> dict[str, Any]:
        """Return all counts and histograms, JSON-ready; after `close`."""
        return {
            "taken": self.num_taken,
            "released": self.num_released,
            "revived": self.num_revived,
            "evicted": self.num_evicted,
            "held_at_end": self.time_held.censored.count,
            "cached_at_end": self.reuse_gap.censored.count,
            "residency": self.residency.to_dict(),
            "time_held": self.time_held.to_dict(),
            "reuse_gap": self.reuse_gap.to_dict(),
            "idle_before_eviction": self.idle_before_eviction.to_dict(),
        }


def _times(num_ids: int) -> tuple[array[int], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return times by block id, none yet, and a view: quick by one, and by many."""
    times = array("q", [_NEVER]) * num_ids
    return times, np.frombuffer(times, np.int64)


def blocks_to_dict(
    tiers: Mapping[str, Any], end_s: float, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the contents of the file.

    Parameters
    ----------
    tiers
        Durations and counts by name of the tier.
    end_s
        When the run ended.
    facts
        Facts with which the times are to be read.
    """
    header = {"format": BLOCKS_FORMAT, "version": FORMAT_VERSION, **facts}
    times = {"end_s": end_s, "bin_edges_s": list(BIN_EDGES_S)}
    return header | times | {"tiers": dict(tiers)}
