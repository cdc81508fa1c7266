"""Blocks that are still being stored, and may be taken for new content meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.v1.connectors.base import TransferJob


class WatchedBlocks:
    """Blocks of stores in flight whose requests have ended, and what a call hands out.

    A store of a block that is handed out must end before the step runs.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, set[int]] = {}  # by block
        self._handed_out: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, store: TransferJob) -> None:
        """Watch the blocks of a store; its request holds them no more."""
        for block_id in store.block_ids:
            self._jobs.setdefault(block_id, set()).add(store.job_id)

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

    def taken_from(self) -> set[int]:
        """Return the stores of which blocks were handed out in this call."""
        jobs = self._jobs
        taken = [jobs.keys() & block_ids for block_ids in self._handed_out]
        return {each for blocks in taken for block in blocks for each in jobs[block]}

    def was_taken_from(self, store: TransferJob) -> bool:
        """Whether a block of a store was handed out in this call."""
        stored = set(store.block_ids)
        return not all(map(stored.isdisjoint, self._handed_out))

    def end_call(self) -> None:
        self._handed_out.clear()

    def check(self, stores: Iterable[TransferJob]) -> None:
        """Prove that the blocks are those of these stores.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        blocks: dict[int, set[int]] = {}
        for store in stores:
            for block_id in store.block_ids:
                blocks.setdefault(block_id, set()).add(store.job_id)
        require(
            blocks == self._jobs,
            "offloading: the watched blocks are not those of ended requests' stores",
        )
