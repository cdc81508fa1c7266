"""Preempt the request that came last."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import RunningRequest


class LatestArrival:
    """The request that arrived last is preempted: first come, first served.

    Notes
    -----
    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving
    with PagedAttention", SOSP 2023, section 4.5. It is what vLLM does under FCFS, where
    the last of the running queue arrived last.
    """

    always_spares_one: ClassVar[bool] = True
    reason: ClassVar[str] = "no free block for a running request"

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return the latest arrival; see `VictimPolicy`."""
        del needs
        return max(running, key=lambda each: (each.arrival_s, each.request_id))
