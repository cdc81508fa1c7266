"""Preempt the least urgent request."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import RunningRequest


class LowestPriority:
    """The least urgent request is preempted, of equals the latest arrival.

    Notes
    -----
    Source: vLLM 0.11.2, ``vllm/v1/core/sched/scheduler.py``, priority policy. Here it
    needs no such queue: waiting requests may be ordered by arrival all the same.
    """

    always_spares_one: ClassVar[bool] = True
    reason: ClassVar[str] = (
        "no free block for a running request; the least urgent one goes"
    )

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return the request of the largest priority value; see `VictimPolicy`."""
        del needs
        return max(
            running, key=lambda each: (each.priority, each.arrival_s, each.request_id)
        )
