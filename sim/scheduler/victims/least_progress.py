"""Preempt the request that has generated least."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import RunningRequest


class LeastProgress:
    """The request with the fewest tokens generated is preempted.

    Of equals the one with the longest prompt goes, then the latest arrival.

    Notes
    -----
    Source: SGLang, ``python/sglang/srt/managers/schedule_batch.py``
    (`ScheduleBatch.retract_decode`), which retracts by fewest output tokens, then
    longest input. It is the opposite of serving the least attained first, as FastServe
    does (Wu et al., "FastServe", NSDI 2026): there the request with most service goes.
    """

    reason: ClassVar[str] = (
        "no free block for a running request; the one with least output goes"
    )

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return the request with the shortest output; see `VictimPolicy`."""
        del needs
        return min(
            running,
            key=lambda each: (
                each.num_output_tokens,
                -each.num_prompt_tokens,
                -each.arrival_s,
                -each.request_id,
            ),
        )
