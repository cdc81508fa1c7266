"""The batch of a V1 step while it is formed."""

from __future__ import annotations

from sim.scheduler.batch import Batch


class V1Batch(Batch):
    """The batch being formed, and the rules that hold for this call."""

    __slots__ = ("carries_prefill", "holds_prefill", "threshold")

    def __init__(self, budget: int, threshold: int, *, holds_prefill: bool) -> None:
        super().__init__(budget)
        self.threshold = threshold
        """Most tokens of one request; 0 for no such limit."""
        self.holds_prefill = holds_prefill
        """Whether prefill is left alone in this call."""
        self.carries_prefill = False

    def limited(self, num_missing_tokens: int) -> int:
        """Cut missing tokens to the threshold."""
        if 0 < self.threshold < num_missing_tokens:
            return self.threshold
        return num_missing_tokens
