"""Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING

from workloads._numpy import np
from workloads.errors import WorkloadError
from workloads.requests.columns import RequestColumns, SpecIterator
from workloads.traces.azure_columns import AzureTable, plain_table
from workloads.traces.parsing.csv_lines import (
    csv_lines,
    timed_lengths,
)
from workloads.traces.parsing.files import BadLines, trace_path
from workloads.traces.parsing.requests import columns_in_arrival_order
from workloads.traces.writing import losses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TICKS_PER_S = 10_000_000
_TICKS_PER_MINUTE = 60 * _TICKS_PER_S
_EPOCH = datetime(1970, 1, 1)
# Zones that mean the same as none here; any other would need a conversion.
_UTC = ("+00:00", "Z")

_Row = tuple[int, int, int, int]
"""``(ticks, line_number, num_prompt_tokens, num_output_tokens)``."""


@dataclass(frozen=True, slots=True)
class AzureTraceReader:
    """Reader of the Azure LLM inference traces: 2023, and the week of 2024.

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
    Timestamps are wall time with up to seven digits of a second, without a zone (2023)
    or with that of UTC (2024, where whole seconds come without a fraction). They are
    kept as whole ticks of 100 ns until the first arrival has been subtracted, so no
    digit is lost.

    Source: github.com/Azure/AzurePublicDataset, ``AzureLLMInferenceDataset2023.md``
    and ``AzureLLMInferenceDataset2024.md``; Patel et al., Splitwise, ISCA 2024;
    Stojkovic et al., DynamoLLM, HPCA 2025.
    """

    path: str | Path
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))

    def read(self) -> SpecIterator:
        with BadLines(self.path, self.skip_bad_lines) as bad:
            ticks, prompts, outputs = columns_in_arrival_order(
                self.path, *_table(self.path, bad)
            )
        times_s = _seconds(ticks - ticks[0])
        return SpecIterator(RequestColumns(times_s, prompts, outputs))


def _table(path: str | Path, bad: BadLines) -> AzureTable:
    """Return the rows by columns if all are plain, else one by one."""
    lines = csv_lines(path, _COLUMNS, bad)
    columns = [lines.positions[name] for name in _COLUMNS]
    num_fields = lines.header.count(",") + 1
    table = plain_table(path, num_fields, columns, _minute_ticks)
    if table:
        return table
    rows = timed_lengths(lines, _COLUMNS, bad, _tick_parser(), _time_problem)
    return _careful_table(rows)


def _careful_table(rows: Iterator[_Row]) -> AzureTable:
    table = np.fromiter(rows, dtype=[(name, np.int64) for name in AzureTable._fields])
    return AzureTable(*(table[name].copy() for name in AzureTable._fields))


def _seconds(ticks: NDArray[np.int64]) -> NDArray[np.float64]:
    if ticks[-1] <= 2**53:  # 28 years; more would be rounded to a float before
        return ticks / _TICKS_PER_S
    return np.array([each / _TICKS_PER_S for each in ticks.tolist()])


def _tick_parser() -> Callable[[str], int]:
    """Return a parser of timestamps to ticks of 100 ns since 1970.

    A trace has few distinct minutes and many rows: ``2023-11-16 18:15`` is parsed
    by `datetime` once, and the seconds after it are plain digits.
    """
    minutes: dict[str, int] = {}

    def to_ticks(text: str) -> int:
        prefix = text[:16]
        ticks = minutes.get(prefix)
        if ticks is None:
            ticks = minutes[prefix] = _minute_ticks(prefix)
        rest = text[16:]
        digits = rest[1:3] + rest[4:]
        if len(rest) != 11 or rest[0] + rest[3] != ":." or not digits.isdecimal():
            digits = _second_digits(rest)
        # Only plain digits: int() would also take signs, blanks and underscores.
        if not (digits.isdecimal() and digits.isascii() and digits < "6"):
            raise ValueError(text)
        return ticks + int(digits)

    return to_ticks


def _minute_ticks(prefix: str) -> int:
    # fromisoformat() also reads week dates and zones, which are not this format.
    if len(prefix) != 16 or (prefix[4], prefix[7], prefix[13]) != ("-", "-", ":"):
        raise ValueError(prefix)
    elapsed = datetime.fromisoformat(prefix) - _EPOCH
    return (elapsed.days * 86_400 + elapsed.seconds) * _TICKS_PER_S


def _second_digits(rest: str) -> str:
    """Return the nine digits of ``:SS``, ``:SS.f`` to ``:SS.fffffff``, and UTC."""
    for zone in _UTC:
        rest = rest.removesuffix(zone)
    seconds, dot, fraction = rest.partition(".")
    if len(seconds) != 3 or seconds[0] != ":" or len(fraction) > 7:
        raise ValueError(rest)
    if dot and not fraction:
        raise ValueError(rest)
    return seconds[1:] + fraction.ljust(7, "0")


def _time_problem(name: str, text: str) -> str:
    rule = f"{name} must be a time such as 2023-11-16 18:15:46.6805900"
    return f"{rule}; got {text!r:.80}; mend or remove the line"


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
