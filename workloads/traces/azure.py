"""Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING

from workloads.columns import RequestColumns, SpecIterator
from workloads.traces.azure_columns import AzureTable, plain_table
from workloads.traces.parsing.bad_lines import BadLines
from workloads.traces.parsing.csv_lines import (
    CsvLines,
    column_length_problem,
    csv_lines,
    is_length,
    plain_int,
)
from workloads.traces.parsing.files import trace_path
from workloads.traces.parsing.order import columns_in_arrival_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TICKS_PER_S = 10_000_000
_EPOCH = datetime(1970, 1, 1)
# Zones that mean what no zone means here; any other would need a conversion.
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
        """Return the requests in arrival order, the first at 0 s.

        The whole file is checked before the first request is handed out.

        Returns
        -------
        SpecIterator
            An iterator of `RequestSpec` that also has them as columns.

        Raises
        ------
        WorkloadError
            If the file cannot be read.
        TraceFormatError
            If a line breaks the format; names file and line.

        Warns
        -----
        WorkloadWarning
            If the rows are not sorted by time (they are sorted), or lines were left
            out.
        """
        with BadLines(self.path, self.skip_bad_lines) as bad:
            ticks, prompts, outputs = columns_in_arrival_order(
                self.path, *_table(self.path, bad)
            )
        times_s = _seconds(ticks - ticks[0])
        return SpecIterator(RequestColumns(times_s, prompts, outputs))


def _table(path: str | Path, bad: BadLines) -> AzureTable:
    """Return the rows in file order: by columns if all are plain, else one by one."""
    lines = csv_lines(path, _COLUMNS, bad)
    time_column, prompt_column, output_column = map(lines.positions.get, _COLUMNS)
    assert time_column is not None
    assert prompt_column is not None
    assert output_column is not None
    columns = (time_column, prompt_column, output_column)
    num_fields = lines.header.count(",") + 1
    table = plain_table(path, num_fields, columns, _minute_ticks)
    return table or _careful_table(_rows(lines, columns, bad))


def _careful_table(rows: Iterator[_Row]) -> AzureTable:
    import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

    table = np.fromiter(rows, dtype=[(name, np.int64) for name in AzureTable._fields])
    return AzureTable(*(table[name].copy() for name in AzureTable._fields))


def _seconds(ticks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return ticks in seconds, each rounded once."""
    import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

    if ticks[-1] <= 2**53:  # 28 years; more would be rounded to a float before
        return ticks / _TICKS_PER_S
    return np.array([each / _TICKS_PER_S for each in ticks.tolist()])


def _rows(
    lines: CsvLines, columns: tuple[int, int, int], bad: BadLines
) -> Iterator[_Row]:
    """Yield the parsed rows of the lines after the header, in file order."""
    time_column, prompt_column, output_column = columns
    to_ticks = _tick_parser()
    for number, fields in lines.rows:
        try:
            ticks = to_ticks(fields[time_column])
            num_prompt_tokens = plain_int(fields[prompt_column])
            num_output_tokens = plain_int(fields[output_column])
        except ValueError:
            bad.refuse(number, _problem(fields, columns))
            continue
        if is_length(num_prompt_tokens) and is_length(num_output_tokens):
            yield ticks, number, num_prompt_tokens, num_output_tokens
        else:
            bad.refuse(number, _problem(fields, columns))


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
    """Return the ticks of ``YYYY-MM-DD HH:MM``."""
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


def _problem(fields: list[str], columns: tuple[int, int, int]) -> str:
    """Say what is wrong with a line that did not parse."""
    time_text, *length_texts = (fields[column] for column in columns)
    for name, text in zip(_COLUMNS[1:], length_texts, strict=True):
        problem = column_length_problem(name, text)
        if problem:
            return problem
    rule = "TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900"
    return f"{rule}; got {time_text!r:.80}; mend or remove the line"
