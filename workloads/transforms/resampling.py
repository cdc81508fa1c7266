"""Another hour like this one: windows of a trace, drawn at random, one after another.

A trace is one sample of its traffic. To say how sure a result is that was found with
it, the trace is resampled: windows of a fixed length that begin anywhere in it, with
replacement. Arrivals and lengths within a window stay as they were recorded, bursts
included; a rush hour that lasts longer than a window is torn apart. This is the
circular block bootstrap (Politis and Romano, 1992): a window that reaches beyond the
end goes on at the start, so that every moment is as likely as any other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads._checks import positive, whole
from workloads._numpy import np
from workloads.arrivals.base import MAX_REQUESTS
from workloads.errors import WorkloadError
from workloads.requests.chains import in_order
from workloads.requests.columns import RequestColumns
from workloads.transforms.superposition import CopyNames, roots_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workloads.draws.streams import Streams
    from workloads.spec import RequestSpec

    Drawn = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Resampling:
    """How a trace is resampled.

    Parameters
    ----------
    window_s
        Length of a window in the trace's own seconds.
    num_windows
        How many are drawn; None for as many as the trace is long.

    Raises
    ------
    WorkloadError
        If a number is out of range.
    """

    window_s: float
    num_windows: int | None = None

    def __post_init__(self) -> None:
        positive("window_s", self.window_s, "give seconds, such as 60")
        if self.num_windows is not None:
            remedy = "give a number of windows, or leave it out for the trace's length"
            whole("num_windows", self.num_windows, 1, MAX_REQUESTS, remedy)

    def apply(
        self, requests: Sequence[RequestSpec], streams: Streams
    ) -> Sequence[RequestSpec]:
        """Return windows of `requests`, drawn at random and put in a row.

        A follow-up comes with the request that began its chain. A request that is drawn
        again is another one: its text is its own from then on, so that a prefix cache
        finds no more in the resampled trace than in the recorded one. Starts come from
        the stream ``"resampled_windows"``.

        Raises
        ------
        WorkloadError
            If the trace is shorter than a window, or the windows hold no request, or
            too many.
        """
        if isinstance(requests, RequestColumns):
            rows, times_s = self._draw(requests.arrival_s, streams)
            return requests.rearranged(rows, times_s)
        return self._of_list(requests, streams)

    def _of_list(
        self, requests: Sequence[RequestSpec], streams: Streams
    ) -> list[RequestSpec]:
        members: dict[int, list[RequestSpec]] = {}
        for request, root in zip(requests, roots_of(requests), strict=True):
            members.setdefault(root, []).append(request)
        roots = list(members)
        begun_s = np.array([requests[root].arrival_s for root in roots])
        rows, times_s = self._draw(begun_s, streams)
        names, num_drawn = CopyNames(requests, share_text=False), Counter[int]()
        drawn: list[RequestSpec] = []
        for row, begin_s in zip(rows.tolist(), times_s.tolist(), strict=True):
            chain, copy = members[roots[row]], num_drawn[row]
            drawn += [names.copy(request, copy, begin_s) for request in chain]
            num_drawn[row] += 1
        return in_order(drawn)

    def _draw(self, begun_s: NDArray[np.float64], streams: Streams) -> Drawn:
        """Return which rows come, and when, of chains that begin at `begun_s`."""
        num = len(begun_s)
        span_s = float(begun_s[-1]) * (1 + 1 / num)
        if self.window_s > span_s:
            raise WorkloadError(
                f"window_s must be at most the trace's length of {span_s:g} s; got "
                f"{self.window_s:g}; lower resample.window_s"
            )
        num_windows = self.num_windows or round(span_s / self.window_s)
        self._check_size(num, num_windows, span_s)
        rng = streams.generator("resampled_windows")
        starts_s = rng.random(num_windows) * span_s
        twice_s = np.concatenate([begun_s, begun_s + span_s])  # around the end
        first = twice_s.searchsorted(starts_s)
        sizes = twice_s.searchsorted(starts_s + self.window_s) - first
        window = np.repeat(np.arange(num_windows), sizes)
        place = np.arange(len(window)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = first[window] + place
        times_s = twice_s[rows] - starts_s[window] + window * self.window_s
        if not len(rows):
            raise WorkloadError(
                f"a workload needs at least one request; {num_windows} windows of "
                f"{self.window_s:g} s hold none; lengthen window_s"
            )
        # Rounding may put the last of a window a hair behind the first of the next.
        return rows % num, np.maximum.accumulate(times_s)

    def _check_size(self, num_requests: int, num_windows: int, span_s: float) -> None:
        expected = num_requests * num_windows * self.window_s / span_s
        if max(expected, num_windows) > MAX_REQUESTS:
            raise WorkloadError(
                f"a workload may hold {MAX_REQUESTS} requests; {num_windows} windows "
                f"would hold some {expected:.0f}; lower num_windows"
            )
