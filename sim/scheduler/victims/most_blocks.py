"""Preempt the request that holds most."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import RunningRequest


class MostBlocks:
    """The request that holds most blocks is preempted, of equals the latest arrival.

    One victim frees enough for long, and is the dearest to compute again.

    Notes
    -----
    Source: the idea is that of Linux's out-of-memory killer (``mm/oom_kill.c``), which
    frees most memory with one victim; no serving engine at hand does so.
    """

    reason: ClassVar[str] = (
        "no free block for a running request; the one with most blocks goes"
    )

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return the largest holder; see `VictimPolicy`."""
        del needs
        return max(
            running, key=lambda each: (each.num_blocks, each.arrival_s, each.request_id)
        )
