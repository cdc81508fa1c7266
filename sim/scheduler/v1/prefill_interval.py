"""When prefill is held back, so that decodes run undisturbed meanwhile."""

from __future__ import annotations


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

    def holds(self, *, has_decodes: bool) -> bool:
        """Whether the call that begins must leave prefill alone.

        Without a decode there is none to protect, and the prefill goes on.
        """
        return (
            not self._has_backlog
            and self._num_steps + 1 - self._last_prefill < self.interval
            and has_decodes
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

    def stepped_quietly(self, num_steps: int) -> None:
        """Note steps of decodes only, while no request waits."""
        self._num_steps += num_steps
        self._has_backlog = False
