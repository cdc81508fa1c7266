"""The batch of a V1 step while it is formed."""

from __future__ import annotations

from sim.scheduler.batch import Batch


class V1Batch(Batch):
    """The batch being formed, and the rules that hold for this call.

    Attributes
    ----------
    threshold
        Most tokens of one request; 0 for no such limit.
    holds_prefill
        Whether prefill is left alone in this call.
    carries_prefill
        Whether some was scheduled all the same.
    """

    __slots__ = ("carries_prefill", "holds_prefill", "threshold")

    threshold: int
    holds_prefill: bool
    carries_prefill: bool

    def limited(self, num_missing_tokens: int) -> int:
        """Cut missing tokens to the threshold."""
        if 0 < self.threshold < num_missing_tokens:
            return self.threshold
        return num_missing_tokens
