"""Writer of Azure's format: a time of day and two lengths."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from workloads.errors import WorkloadError
from workloads.traces.writing.losses import losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.spec import RequestSpec

_TICKS_PER_S = 10_000_000
_TICKS_PER_MINUTE = 60 * _TICKS_PER_S


@dataclass(frozen=True, slots=True)
class AzureTraceWriter:
    """Writer of the format of 2023, to 100 ns.

    Parameters
    ----------
    start
        Wall time of 0 s, such as ``2023-11-16 18:15``, to the minute. Readers subtract
        it.

    Raises
    ------
    WorkloadError
        If `start` is no such time.
    """

    start: str = "1970-01-01 00:00"

    def __post_init__(self) -> None:
        self._start()

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        """Return what the format cannot hold; see `TraceWriter`."""
        rounded = sum(
            abs(
                round(request.arrival_s * _TICKS_PER_S) / _TICKS_PER_S
                - request.arrival_s
            )
            > 1e-9
            for request in requests
        )
        lines = losses(requests, kept=())
        if rounded:
            lines.append(f"times below 100 ns ({rounded} of {len(requests)} requests)")
        return lines

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        """Yield the lines of the file; see `TraceWriter`."""
        yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        start = self._start()
        for request in requests:
            ticks = round(request.arrival_s * _TICKS_PER_S)
            minutes, rest = divmod(ticks, _TICKS_PER_MINUTE)
            try:
                minute = start + timedelta(minutes=minutes)
            except OverflowError:
                raise WorkloadError(
                    f"times must be before the year 10000; got {request.arrival_s!r} s "
                    f"from {self.start}; give an earlier start, or another format"
                ) from None
            seconds, fraction = divmod(rest, _TICKS_PER_S)
            day_and_minute = minute.isoformat(" ", "minutes")
            time = f"{day_and_minute}:{seconds:02d}.{fraction:07d}"
            yield f"{time},{request.num_prompt_tokens},{request.num_output_tokens}\n"

    def _start(self) -> datetime:
        try:
            return datetime.strptime(self.start, "%Y-%m-%d %H:%M")
        except (ValueError, TypeError):
            rule = "start must be a time such as 2023-11-16 18:15"
            raise WorkloadError(f"{rule}; got {self.start!r}; mend it") from None
