"""When prefill is held back, so that decodes run undisturbed meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.request import Request


def is_prefilling(request: Request) -> bool:
    """Whether the latest chunk of a running request left tokens to compute.

    `V1Scheduler` leaves 0 quiet tokens behind such a chunk, and the cache manager at
    least 1 behind any other.
    """
    return not request.num_quiet_tokens


class PrefillInterval:
    """At most one step in `interval` computes prompts, unless a backlog waits.

    Parameters
    ----------
    interval
        ``prefill_schedule_interval``: steps from one with prefill to the next, at
        least 2.

    Notes
    -----
    Source: conformance/README.md beside the decision logs, section 9, for vLLM
    0.33.0 (``vllm/v1/core/sched/scheduler.py``).
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._num_steps = 0  # that scheduled at least one token
        self._last_prefill = -interval
        self._has_backlog = False

    def holds(self, running: Iterable[Request]) -> bool:
        """Whether the call that begins must leave prefill alone. O(running).

        Without a decode there is nobody to protect, and the prefill goes on.
        """
        return (
            not self._has_backlog
            and self._num_steps + 1 - self._last_prefill < self.interval
            and not all(is_prefilling(request) for request in running)
        )

    def saw_queue(self, num_waiting: int) -> None:
        """Note what a scan of the waiting queue, not held, left behind."""
        self._has_backlog = num_waiting > 0

    def stepped(self, num_tokens: int, *, carries_prefill: bool) -> None:
        """Note the end of a call and what it scheduled."""
        if num_tokens:
            self._num_steps += 1
        if carries_prefill:
            self._last_prefill = self._num_steps
