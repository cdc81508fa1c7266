"""Admission rules: whether the head of the queue may join the running requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from sim.scheduler.views import EngineView, WaitingRequest


@runtime_checkable
class AdmissionRule(Protocol):
    """May keep the head of the waiting queue out for now, and so those behind it.

    It is asked in addition to the engine's own rules, whenever these would let the
    head in and something runs: an idle engine admits without asking, so that every
    queue moves at last (invariant 7).

    A method ``finished(request: RequestView)``, if there is one, is told of every
    request that has ended; its `RequestView.num_output_tokens` is no secret by then.
    """

    def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
        """Return whether `head` may be admitted now."""
        ...
