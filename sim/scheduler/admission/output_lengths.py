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
        _, means = self._lengths_and_means()
        mean = float(means[bisect_right(self._sorted, num_output_tokens)])
        most = request.max_num_tokens - request.num_prompt_tokens
        return max(min(mean, most) - num_output_tokens, 1.0)

    def expected_rests(self, num_output_tokens: Any, most_output_tokens: Any) -> Any:
        """Return `expected_rest` of requests in columns."""
        import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

        lengths, means = self._lengths_and_means()
        rests = means[lengths.searchsorted(num_output_tokens, "right")]
        np.minimum(rests, most_output_tokens, out=rests)
        rests -= num_output_tokens
        return np.maximum(rests, 1.0, out=rests)

    def _lengths_and_means(self) -> tuple[Any, Any]:
        """Return known lengths, sorted, and the means of each and all longer ones.

        Behind the longest stands a 0: where no output got as far, 1 token is expected.
        """
        import numpy as np  # noqa: PLC0415 - see above

        if self._columns is None:
            lengths = np.array(self._sorted)
            num_lengths = len(lengths)
            means = np.zeros(num_lengths + 1)
            sums = lengths[::-1].cumsum()[::-1]
            np.divide(sums, np.arange(num_lengths, 0, -1), out=means[:-1])
            self._columns = lengths, means
        return self._columns


def _quantiles(distribution: LengthDistribution) -> list[int]:
    """Return lengths that stand for a distribution: no draw, so no seed."""
    import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

    u = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return [int(length) for length in distribution.quantile(u)]
