"""Vidur traces: ``arrived_at,num_prefill_tokens,num_decode_tokens``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING

from workloads.traces.parsing.csv_lines import (
    csv_lines,
    plain_seconds,
    seconds_problem,
    timed_lengths,
)
from workloads.traces.parsing.files import BadLines, trace_path
from workloads.traces.parsing.requests import own_text_requests
from workloads.traces.writing import losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.requests.columns import SpecIterator
    from workloads.spec import RequestSpec

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


@dataclass(frozen=True, slots=True)
class VidurTraceReader:
    """Reader of Vidur's processed traces with arrival times.

    The trace holds no prompt identity: each prompt is text of its own, so there is
    no prefix to reuse. Other columns are ignored, and columns may come in any order.

    Parameters
    ----------
    path
        CSV file, plain or compressed (gzip, zstd).
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first.

    Raises
    ------
    WorkloadError
        If the path is neither text nor a path.

    Notes
    -----
    ``arrived_at`` is in seconds. Vidur's files of lengths alone have no such column
    and are no traces.

    Source: github.com/microsoft/vidur, ``data/processed_traces``; Agrawal et al.,
    Vidur, MLSys 2024.
    """

    path: str | Path
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))

    def read(self) -> SpecIterator:
        with BadLines(self.path, self.skip_bad_lines) as bad:
            rows = timed_lengths(
                csv_lines(self.path, _COLUMNS, bad),
                _COLUMNS,
                bad,
                plain_seconds,
                seconds_problem,
            )
            return own_text_requests(self.path, rows)


@dataclass(frozen=True, slots=True)
class VidurTraceWriter:
    """Writer of Vidur's format: times and lengths, each request by itself."""

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        return losses(requests, kept=())

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        yield ",".join(_COLUMNS) + "\n"
        for request in requests:
            lengths = f"{request.num_prompt_tokens},{request.num_output_tokens}"
            yield f"{request.arrival_s!r},{lengths}\n"
