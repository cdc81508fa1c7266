"""Room for the expected peak, not for all ends at once."""

from __future__ import annotations

from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any

from sim.scheduler.admission.conservative import Conservative

if TYPE_CHECKING:
    from sim.scheduler.views import (
        EngineView,
        RunningColumns,
        RunningRequest,
        WaitingRequest,
    )

_MARGIN_STEPS = 1e-6
"""More than what growths that are computed later are off."""


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
        available, size = engine.num_available_blocks, engine.block_size
        self._num_standing_steps: float = inf
        if not self.lengths.is_known or head.num_full_blocks > available:
            return head.num_full_blocks <= available
        self._look_through(engine)
        num_full_blocks = head.num_full_blocks
        self._put(self._growth(head), size, num_full_blocks)
        most = available - num_full_blocks - self._num_lacking_blocks
        growths, known = self._table[:, : self._num_counted + 1]
        num_to_fall = _excess(growths, known, most)
        steps = num_to_fall * size / self.conservativeness - _MARGIN_STEPS
        self._num_standing_steps = floor(max(steps, 0))
        return num_to_fall <= 0

    @property
    def num_standing_steps(self) -> float:
        # In a step a growth falls by a token, times the factor, at most; what is known
        # grows, and with it what is taken of the pool.
        return self._num_standing_steps

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


def _excess(growths: Any, known: Any, most: int) -> float:
    """Return by how much all growths may fall before the peak is at most `most`.

    Below 0 if it is. The peak is the most blocks that are ever taken beside those of
    known tokens.

    Parameters
    ----------
    growths
        Of each request, in blocks, to be rounded up.
    known
        Blocks of its known tokens.
    most
        Blocks.

    Notes
    -----
    A peak is that of the requests that are left at the end of one of them; if others
    fall behind it, or less, the peak of these is at least what is left of it.
    """
    import numpy as np  # noqa: PLC0415 - see above

    order = growths.argsort()
    num_left = len(order)
    # At the end of each, all that are left have grown by as much. Where several end
    # together the first has the most left, whichever it is.
    room = np.empty(num_left)
    room[0] = 0.0
    known.take(order[:-1]).cumsum(out=room[1:])
    room += most
    room //= np.arange(num_left, 0, -1)
    return float((growths.take(order) - room).max())
