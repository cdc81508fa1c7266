"""How much longer an output will get, as far as a server can know."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import deque
from typing import TYPE_CHECKING, Any

from sim.errors import SchedulerError

if TYPE_CHECKING:
    from sim.scheduler.views import RequestView
    from workloads.lengths import LengthDistribution

NUM_QUANTILES = 1000
"""Values that stand for a configured distribution, equally likely."""


class OutputLengths:
    """Lengths of outputs that have ended, or those of a distribution that was given.

    Parameters
    ----------
    distribution
        What outputs are like; None to learn it from those that end.
    window
        How many of the latest outputs are remembered.
    min_known
        Nothing is expected before so many have ended. The first to end are short ones,
        so a few say little.

    Raises
    ------
    SchedulerError
        If `window` or `min_known` are impossible.
    """

    def __init__(
        self, distribution: LengthDistribution | None, window: int, min_known: int
    ) -> None:
        if not 1 <= min_known <= window:
            raise SchedulerError(
                f"min_known must be from 1 to window, which is {window}, got "
                f"{min_known}; leave both out for 100 of 1000"
            )
        self._is_learning = distribution is None
        self._min_known = min_known
        self._latest: deque[int] = deque(maxlen=window)
        self._sorted = array(
            "q", [] if distribution is None else _quantiles(distribution)
        )
        self._columns: tuple[Any, Any] | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough outputs have ended for `expected_rest` to mean something."""
        return not self._is_learning or len(self._latest) >= self._min_known

    def finished(self, request: RequestView) -> None:
        """Remember the output of a request that has ended."""
        if not self._is_learning:
            return
        latest, lengths = self._latest, self._sorted
        if len(latest) == latest.maxlen:
            del lengths[bisect_right(lengths, latest[0]) - 1]
        latest.append(request.num_output_tokens)
        insort(lengths, request.num_output_tokens)
        self._columns = None

    def expected_rest(self, request: RequestView) -> float:
        """Return the mean rest of outputs that got as far as this one's, in tokens.

        At least 1, for it has not ended; at most what the engine lets it have.
        """
        num_output_tokens = request.num_output_tokens
        lengths, sums = self._lengths_and_sums()
        num_longer = len(lengths) - bisect_right(self._sorted, num_output_tokens)
        rest = 1.0
        if num_longer:
            rest = int(sums[num_longer]) / num_longer - num_output_tokens
        most = request.max_num_tokens - request.num_prompt_tokens - num_output_tokens
        return rest if rest < most else max(1.0, most)

    def _lengths_and_sums(self) -> tuple[Any, Any]:
        """Return known lengths, sorted, and the sum of the longest by their number."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        if self._columns is None:
            lengths = np.array(self._sorted)
            sums = np.zeros(len(lengths) + 1, np.int64)
            lengths[::-1].cumsum(out=sums[1:])
            self._columns = lengths, sums
        return self._columns

    def expected_rests(self, num_output_tokens: Any, most_output_tokens: Any) -> Any:
        """Return `expected_rest` of requests in columns."""
        import numpy as np  # noqa: PLC0415 - see above

        lengths, sums = self._lengths_and_sums()
        num_longer = len(lengths) - lengths.searchsorted(num_output_tokens, "right")
        rest = sums[num_longer] / np.maximum(num_longer, 1) - num_output_tokens
        # The mean of longer outputs is longer by 1 at least; where there are none, the
        # rest is 1, too.
        np.maximum(rest, 1.0, out=rest)
        most = np.maximum(most_output_tokens - num_output_tokens, 1.0)
        return np.minimum(rest, most, out=rest)


def _quantiles(distribution: LengthDistribution) -> list[int]:
    """Return lengths that stand for a distribution: no draw, so no seed."""
    import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

    u = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return [int(length) for length in distribution.quantile(u)]
