"""Vidur traces: ``arrived_at,num_prefill_tokens,num_decode_tokens``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING

from workloads.traces.parsing.bad_lines import BadLines
from workloads.traces.parsing.csv_lines import (
    column_length_problem,
    csv_lines,
    is_length,
    plain_int,
    plain_seconds,
    seconds_problem,
)
from workloads.traces.parsing.files import trace_path
from workloads.traces.parsing.own_text import own_text_requests
from workloads.traces.writing.losses import losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.columns import SpecIterator
    from workloads.spec import RequestSpec
    from workloads.traces.parsing.own_text import Row

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
        """Return the requests in arrival order, the first at 0 s.

        Raises
        ------
        WorkloadError, TraceFormatError
            If the file cannot be read; if a line breaks the format, with file and line.

        Warns
        -----
        WorkloadWarning
            If the rows are not sorted by time (they are sorted), or lines were left
            out.
        """
        with BadLines(self.path, self.skip_bad_lines) as bad:
            return own_text_requests(self.path, self._rows(bad))

    def _rows(self, bad: BadLines) -> Iterator[Row]:
        lines = csv_lines(self.path, _COLUMNS, bad)
        columns = [lines.positions[name] for name in _COLUMNS]
        time_column, prompt_column, output_column = columns
        for number, fields in lines.rows:
            try:
                time_s = plain_seconds(fields[time_column])
                num_prompt_tokens = plain_int(fields[prompt_column])
                num_output_tokens = plain_int(fields[output_column])
            except ValueError:
                num_prompt_tokens = num_output_tokens = 0
            if is_length(num_prompt_tokens) and is_length(num_output_tokens):
                yield time_s, number, num_prompt_tokens, num_output_tokens
            else:
                bad.refuse(number, _problem([fields[column] for column in columns]))


def _problem(texts: Sequence[str]) -> str:
    """Say what is wrong with the three columns of a line."""
    time_text, prompt_text, output_text = texts
    problem = (
        column_length_problem(_COLUMNS[1], prompt_text)
        or column_length_problem(_COLUMNS[2], output_text)
        or seconds_problem(_COLUMNS[0], time_text)
    )
    assert problem is not None
    return problem


@dataclass(frozen=True, slots=True)
class VidurTraceWriter:
    """Writer of Vidur's format: times and lengths, each request by itself."""

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        """Return what the format cannot hold; see `TraceWriter`."""
        return losses(requests, kept=())

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        """Yield the lines of the file; see `TraceWriter`."""
        yield ",".join(_COLUMNS) + "\n"
        for request in requests:
            lengths = f"{request.num_prompt_tokens},{request.num_output_tokens}"
            yield f"{request.arrival_s!r},{lengths}\n"
