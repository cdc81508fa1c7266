"""Room for the expected peak, not for all ends at once."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from sim.scheduler.admission.conservative import Conservative

if TYPE_CHECKING:
    from sim.scheduler.views import EngineView, WaitingRequest


class PastFuture(Conservative):
    """Admit a request if all that run, and it, would fit at their expected peak.

    A request that ends gives its blocks back, so less is needed than all the ends
    together: at the end of each, those with more to come have grown by as many tokens,
    and those with less have left.

    Parameters
    ----------
    conservativeness, output_tokens, window, min_known
        See `Conservative`.

    Notes
    -----
    Source: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees",
    ASPLOS 2025, which LightLLM implements. There rests are drawn from the lengths of
    outputs that have ended; here they are expectations, so that no draw decides.
    """

    def admits(self, head: WaitingRequest, engine: EngineView) -> bool:
        available = engine.num_available_blocks
        if not self.lengths.is_known or head.num_full_blocks > available:
            return head.num_full_blocks <= available
        # (rest in tokens, blocks held, blocks that known tokens still lack)
        size, factor = engine.block_size, self.conservativeness
        rest_of = self.lengths.expected_rest
        futures = [(factor * rest_of(head), head.num_full_blocks, 0)]
        for request in engine.running:
            held = request.num_blocks
            lacking = max(ceil(request.num_tokens / size) - held, 0)
            futures.append((factor * rest_of(request), held, lacking))
        return _peak(futures, size, head.num_full_blocks) <= available


def _peak(
    futures: list[tuple[float, int, int]], block_size: int, num_taken_now: int
) -> float:
    """Return the most blocks that are ever taken beside those held now."""
    futures.sort()
    num_lacking = sum(lacking for *_, lacking in futures)
    peak = num_given_back = 0.0
    for index, (rest, held, lacking) in enumerate(futures):
        # At the end of this one all that are left have grown by its rest.
        num_left = len(futures) - index
        growth = num_left * ceil(rest / block_size)
        peak = max(peak, growth + num_lacking - num_given_back)
        num_given_back += held
        num_lacking -= lacking
    return peak + num_taken_now
