"""Room for the expected peak, not for all ends at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        size, factor, running = engine.block_size, self.conservativeness, engine.columns
        most = running.max_num_tokens - running.num_prompt_tokens
        rests = self.lengths.expected_rests(running.num_output_tokens, most)
        num_tokens = running.num_prompt_tokens + running.num_output_tokens
        num_running = len(rests)
        grown = np.empty(num_running + 1)
        np.multiply(rests, factor, out=grown[:-1])
        grown[-1] = factor * self.lengths.expected_rest(head)
        held = np.empty(num_running + 1, np.int64)
        held[:-1] = running.num_blocks
        held[-1] = head.num_full_blocks
        lacking = np.zeros(num_running + 1, np.int64)
        np.maximum(-(-num_tokens // size) - held[:-1], 0, out=lacking[:-1])
        peak = _peak(grown, held, lacking, size)
        return bool(peak + head.num_full_blocks <= available)


def _peak(rests: Any, held: Any, lacking: Any, block_size: int) -> float:
    """Return the most blocks that are ever taken beside those held now.

    Of each request: tokens to come, blocks held, and blocks that its known tokens lack.
    """
    import numpy as np  # noqa: PLC0415 - see above

    order = np.lexsort((lacking, held, rests))
    rests, held, lacking = rests[order], held[order], lacking[order]
    # At the end of each, all that are left have grown by its rest.
    num_left = np.arange(len(rests), 0, -1)
    growth = num_left * np.ceil(rests / block_size)
    num_lacking = lacking[::-1].cumsum()[::-1]
    num_given_back = held.cumsum() - held
    return float(max((growth + num_lacking - num_given_back).max(), 0))
