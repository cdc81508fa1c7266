"""Room for the expected peak, not for all ends at once."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from sim.scheduler.admission.conservative import Conservative

if TYPE_CHECKING:
    from sim.scheduler.views import (
        EngineView,
        RunningColumns,
        RunningRequest,
        WaitingRequest,
    )


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
        self._look_through(engine)
        num_full_blocks = head.num_full_blocks
        self._put(self._growth(head), engine.block_size, num_full_blocks)
        peak = (
            _peak(*self._table[:, : self._num_counted + 1]) + self._num_lacking_blocks
        )
        return bool(peak + num_full_blocks <= available)

    def _begin(self, running: RunningColumns, size: int) -> None:
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        num_running = self._num_counted = len(running.num_tokens)
        table = self._table = np.empty((2, num_running + 8))
        np.divide(self._growths(running), size, out=table[0, :num_running])
        known = np.maximum(-(-running.num_tokens // size), running.num_blocks)
        table[1, :num_running] = known
        self._num_lacking_blocks = int((known - running.num_blocks).sum())

    def _add(self, request: RunningRequest, size: int) -> None:
        num_blocks = request.num_blocks
        num_known_blocks = max(ceil(request.num_tokens / size), num_blocks)
        self._put(self._growth(request), size, num_known_blocks)
        self._num_lacking_blocks += num_known_blocks - num_blocks
        self._num_counted += 1

    def _put(self, growth: float, size: int, num_known_blocks: int) -> None:
        """Write down one more, which is not counted yet."""
        row = self._num_counted
        if row == self._table.shape[1]:
            import numpy as np  # noqa: PLC0415 - see above

            self._table = np.hstack([self._table, np.empty_like(self._table)])
        self._table[0, row] = growth / size
        self._table[1, row] = num_known_blocks


def _peak(growths: Any, known: Any) -> float:
    """Return the most blocks that are ever taken beside those of known tokens.

    Of each request: growth in blocks, rounded up here, and blocks of known tokens.
    """
    import numpy as np  # noqa: PLC0415 - see above

    order = growths.argsort()
    # At the end of each, all that are left have grown by as much. Where several end
    # together the first has the most left, whichever it is.
    peaks = np.ceil(growths[order]) * np.arange(len(order), 0, -1)
    peaks[1:] -= known[order].cumsum()[:-1]
    return float(peaks.max())
