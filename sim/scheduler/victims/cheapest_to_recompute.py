"""Preempt the request that loses least."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.views import RunningRequest


class CheapestToRecompute:
    """The request with the fewest tokens to compute again is preempted.

    Tokens in blocks that others hold as well stay cached, and do not count; of equals
    the latest arrival goes.

    Notes
    -----
    Source: the waste of discarding a context as InferCept counts it (Abhyankar et al.,
    "InferCept", ICML 2024): what a recomputation takes grows with the context. They
    choose between discarding, keeping and swapping one request by it; here it chooses
    between requests, all of which are discarded.
    """

    reason: ClassVar[str] = (
        "no free block for a running request; the cheapest to recompute goes"
    )

    def choose(
        self, running: Sequence[RunningRequest], needs: RunningRequest
    ) -> RunningRequest:
        """Return the request with least to compute again; see `VictimPolicy`."""
        del needs
        counts = [each.num_recompute_tokens for each in running]
        least = min(counts)
        cheapest = [
            each for each, count in zip(running, counts, strict=True) if count == least
        ]
        return max(cheapest, key=lambda each: (each.arrival_s, each.request_id))
