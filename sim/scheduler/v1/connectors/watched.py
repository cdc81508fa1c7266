"""Blocks that are still being stored, and may be taken for new content meanwhile."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sim.scheduler.v1.connectors.base import TransferJob


class WatchedBlocks:
    """Blocks of stores in flight that may be taken, and what a call hands out.

    A store of a block that is handed out must end before the step runs. Those that a
    window reads may be left behind at once; others are held until their request ends.

    Parameters
    ----------
    windows
        Numbers of the groups with windows.
    """

    def __init__(self, windows: Collection[int] = ()) -> None:
        self._windows = windows
        self._jobs: dict[int, set[int]] = {}  # by block
        self._handed_out: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def begin(self, store: TransferJob) -> None:
        """Watch the blocks of a store that is asked for, in groups with windows."""
        if self._windows:
            self._watch(store, self._in_windows(store))

    def add(self, store: TransferJob) -> None:
        """Watch the others, too: its request holds them no more."""
        self._watch(store, self._held(store))

    def _watch(self, store: TransferJob, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._jobs.setdefault(block_id, set()).add(store.job_id)

    def _in_windows(self, store: TransferJob) -> list[int]:
        return self._of(store, in_windows=True)

    def _held(self, store: TransferJob) -> list[int]:
        return self._of(store, in_windows=False) if self._windows else store.block_ids

    def _of(self, store: TransferJob, *, in_windows: bool) -> list[int]:
        found: list[int] = []
        first = 0
        for group, number in enumerate(store.num_by_group):
            if (group in self._windows) is in_windows:
                found += store.block_ids[first : first + number]
            first += number
        return found

    def remove(self, store: TransferJob) -> None:
        """Let go of those of a store that has ended."""
        for block_id in store.block_ids:
            jobs = self._jobs.get(block_id)
            if jobs is not None:
                jobs.discard(store.job_id)
                if not jobs:
                    del self._jobs[block_id]

    def hand_out(self, block_ids: list[int]) -> None:
        """Note blocks that a request takes in this call."""
        self._handed_out.append(block_ids)

    @property
    def handed_out(self) -> set[int]:
        """The blocks that requests take in this call."""
        return set(chain.from_iterable(self._handed_out)) - {0}

    def taken_from(self) -> set[int]:
        """Return the stores of which blocks were handed out in this call."""
        jobs = self._jobs
        taken = [jobs.keys() & block_ids for block_ids in self._handed_out]
        return {each for blocks in taken for block in blocks for each in jobs[block]}

    def was_taken_from(self, store: TransferJob) -> bool:
        """Whether a block of a store outside of windows was handed out in this call."""
        stored = set(self._held(store))
        return not all(map(stored.isdisjoint, self._handed_out))

    def end_call(self) -> None:
        self._handed_out.clear()

    def check(self, stores: Iterable[TransferJob], ended: Collection[Any]) -> None:
        """Prove that the blocks are those of these stores.

        Parameters
        ----------
        stores, ended
            All in flight, and the requests that have ended.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        blocks: dict[int, set[int]] = {}
        for store in stores:
            watched = self._in_windows(store)
            if store.request in ended:
                watched += self._held(store)
            for block_id in watched:
                blocks.setdefault(block_id, set()).add(store.job_id)
        require(
            blocks == self._jobs,
            "offloading: the watched blocks are not those of stores that may be taken",
        )
