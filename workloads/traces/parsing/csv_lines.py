"""CSV traces line by line: header, fields, numbers."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from workloads._checks import MAX_TOKENS
from workloads.errors import TraceFormatError
from workloads.traces.parsing.files import format_error, numbered_lines
from workloads.traces.parsing.values import MAX_SECONDS, length_problem, time_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from workloads.traces.parsing.files import BadLines


_TimeT = TypeVar("_TimeT", int, float)


@dataclass(frozen=True, slots=True)
class CsvLines:
    """A CSV file behind its header; missing optional columns have no position."""

    header: str
    positions: Mapping[str, int]
    rows: Iterator[tuple[int, list[str]]]


def csv_lines(
    path: str | Path, needed: Sequence[str], bad: BadLines, optional: Sequence[str] = ()
) -> CsvLines:
    """Open a CSV file; columns may come in any order, others are ignored."""
    lines = numbered_lines(path, bad)
    number, header = next(lines, (1, ""))
    if not header:
        raise TraceFormatError(
            f"{path}: a trace needs the header {','.join(needed)}; got an empty "
            "file; check that it is complete"
        )
    try:
        names = [name.strip().strip('"') for name in split_fields(header)]
    except ValueError as error:
        raise format_error(path, number, str(error)) from None
    problem = _header_problem(header, names, needed, optional)
    if problem:
        raise format_error(path, number, problem)
    positions = {
        name: names.index(name) for name in (*needed, *optional) if name in names
    }
    rows = _rows(lines, bad, max(positions.values()) + 1)
    return CsvLines(header, positions, rows)


def split_fields(line: str) -> list[str]:
    """Return the fields of a line; the message of a ValueError is the problem."""
    # Only quotes need the csv module, which costs more than the rest.
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        problem = f"a line must be plain CSV; got {line[:80]!r} ({error})"
        raise ValueError(f"{problem}; mend or remove it") from None


def plain_int(text: str) -> int:
    """Return an int of ASCII digits: int() also takes signs, blanks, underscores."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


def plain_seconds(text: str) -> float:
    """Return a time in seconds: a finite number from 0, in plain or 1e-05 writing."""
    seconds = float(text)
    if not 0 <= seconds <= MAX_SECONDS or "_" in text or not text.isascii():
        raise ValueError(text)
    return seconds


def is_length(num_tokens: int) -> bool:
    return 1 <= num_tokens <= MAX_TOKENS


def seconds_problem(name: str, text: str) -> str | None:
    try:
        return time_problem(name, plain_seconds(text), "seconds", MAX_SECONDS)
    except ValueError:
        return time_problem(name, text, "seconds", MAX_SECONDS)


def column_length_problem(name: str, text: str) -> str | None:
    return length_problem(name, int(text) if _is_int(text) else text)


def timed_lengths(
    lines: CsvLines,
    names: Sequence[str],
    bad: BadLines,
    to_time: Callable[[str], _TimeT],
    time_problem: Callable[[str, str], str | None],
) -> Iterator[tuple[_TimeT, int, int, int]]:
    """Yield ``(time, line_number, num_prompt_tokens, num_output_tokens)`` of each row.

    `names` are the columns of time, prompt and output. `to_time` raises ValueError for
    what `time_problem` explains, given name and text.
    """
    columns = [lines.positions[name] for name in names]
    time_column, prompt_column, output_column = columns
    for number, fields in lines.rows:
        try:
            time = to_time(fields[time_column])
            num_prompt_tokens = plain_int(fields[prompt_column])
            num_output_tokens = plain_int(fields[output_column])
        except ValueError:
            num_prompt_tokens = num_output_tokens = 0
        if is_length(num_prompt_tokens) and is_length(num_output_tokens):
            yield time, number, num_prompt_tokens, num_output_tokens
            continue
        texts = [fields[column] for column in columns]
        problem = (
            column_length_problem(names[1], texts[1])
            or column_length_problem(names[2], texts[2])
            or time_problem(names[0], texts[0])
        )
        assert problem is not None
        bad.refuse(number, problem)


def too_few_fields(fields: Sequence[str], num_fields: int) -> str:
    got = ",".join(fields)[:120]
    rule = f"a line must have {num_fields} fields"
    return f"{rule}; got {got!r}; the file may be cut short"


def _is_int(text: str) -> bool:
    # int() refuses more than 4,300 digits; nothing near that is a length.
    return text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 100


def _rows(
    lines: Iterator[tuple[int, str]], bad: BadLines, num_fields: int
) -> Iterator[tuple[int, list[str]]]:
    for number, line in lines:
        try:
            fields = split_fields(line)
        except ValueError as error:
            bad.refuse(number, str(error))
            continue
        if len(fields) < num_fields:
            bad.refuse(number, too_few_fields(fields, num_fields))
            continue
        yield number, fields


def _header_problem(
    header: str, names: list[str], needed: Sequence[str], optional: Sequence[str]
) -> str | None:
    missing = [name for name in needed if name not in names]
    twice = [name for name in (*needed, *optional) if names.count(name) > 1]
    if missing:
        problem = f"columns must include {', '.join(missing)}; got {header[:120]!r}"
        return f"{problem}; rename the header's columns"
    if twice:
        problem = f"columns must differ; got {', '.join(twice)} twice"
        return f"{problem}; rename or remove the others"
    return None
