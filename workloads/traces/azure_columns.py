"""Azure traces by whole columns: plain lines are read at once, or none is.

A million lines one by one take seconds. Files are nearly always plain, so they are read
here with array operations, and left to the careful parser of `workloads.traces.azure`
from the beginning as soon as anything is not: it alone decides which lines are accepted
and explains errors, so nothing here raises or accepts more than it would.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

from workloads._checks import MAX_TOKENS
from workloads._numpy import np
from workloads.traces.parsing.files import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

# Read at once: large against the cost of a call, small against a processor's cache.
_BLOCK_BYTES = 1 << 20

_MINUTE_CHARS = 16  # 2023-11-16 18:15
_SECOND_CHARS = 19  # 2023-11-16 18:15:46
_FRACTION_DIGITS = 7
_DATE_PUNCTUATION = {4: b"-", 7: b"-", 10: b" T", 13: b":", 16: b":"}
_ZONE = b"+00:00"
_LENGTH_DIGITS = 10
_COMMA, _NEWLINE, _RETURN, _ZERO, _DOT, _Z = b",\n\r0.Z"


class AzureTable(NamedTuple):
    """The rows of a trace in file order, as columns of shape ``(n,)``, all int64."""

    ticks: NDArray[np.int64]
    """100 ns since 1970."""
    line_numbers: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]


class _Odd(Exception):  # noqa: N818 - no error: a reason to read line by line
    """Something that is not plain."""


def plain_table(
    path: str | Path,
    num_fields: int,
    columns: Sequence[int],
    minute_ticks: Callable[[str], int],
) -> AzureTable | None:
    """Read a trace of plain lines only; None if any is not, or cannot be read.

    Plain are ASCII lines without quotes or NUL bytes, as many fields in each as in the
    header, none blank but the last ones; timestamps with two-digit seconds, up to seven
    digits behind a dot, and UTC or no zone; lengths of up to ten digits, in range.
    `columns` are the positions of timestamp, prompt and output tokens; `minute_ticks`
    makes ticks of ``YYYY-MM-DD HH:MM``, or raises ValueError.
    """
    minutes = _Minutes(minute_ticks)
    try:
        parts = [
            _parsed(block, num_fields, columns, minutes) for block in _blocks(path)
        ]
    except (_Odd, OSError, EOFError, zlib.error):
        return None
    if not parts:
        return None
    ticks, prompts, outputs = map(np.concatenate, zip(*parts, strict=True))
    return AzureTable(ticks, np.arange(2, len(ticks) + 2), prompts, outputs)


class _Minutes(dict[int, int]):
    """Ticks by ``YYYYMMDDHHMM``: a trace has few distinct minutes and many rows."""

    def __init__(self, minute_ticks: Callable[[str], int]) -> None:
        self.minute_ticks = minute_ticks

    def __missing__(self, key: int) -> int:
        digits = f"{key:012d}"
        date = f"{digits[:4]}-{digits[4:6]}-{digits[6:8]}"
        try:
            ticks = self.minute_ticks(f"{date} {digits[8:10]}:{digits[10:]}")
        except ValueError:
            raise _Odd from None
        self[key] = ticks
        return ticks


def _blocks(path: str | Path) -> Iterator[bytes]:
    """Yield the bytes after the first line in whole lines, without blank last ones."""
    with opened(path) as file:
        file.readline()
        rest = b""
        while read := file.read(_BLOCK_BYTES):
            block = rest + read
            # The last line stays behind: it may go on, or only white space may follow.
            end = block.rfind(b"\n", 0, len(block.rstrip())) + 1
            rest = block[end:]
            if len(rest) > _BLOCK_BYTES:
                raise _Odd  # no line, and each try to complete it would cost more
            if end:
                yield block[:end]
        if rest := rest.rstrip():
            yield rest + b"\n"


def _parsed(
    block: bytes, num_fields: int, columns: Sequence[int], minutes: _Minutes
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return ticks and lengths of whole lines, or raise `_Odd`."""
    if not block.isascii() or b'"' in block or b"\0" in block:
        raise _Odd
    text = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero((text == _COMMA) | (text == _NEWLINE))
    num_lines = block.count(b"\n")
    if len(ends) != num_lines * num_fields:
        raise _Odd
    stops = ends.reshape(num_lines, num_fields)
    if (text[stops[:, -1]] != _NEWLINE).any():
        raise _Odd  # fields too many in one line, too few in another
    starts = np.concatenate(([0], ends[:-1] + 1)).reshape(stops.shape)
    stops[:, -1] -= text[stops[:, -1] - 1] == _RETURN
    fields = [_Field(text, starts[:, i], stops[:, i]) for i in columns]
    time, prompt, output = fields
    return _ticks(time, minutes), _lengths(prompt), _lengths(output)


class _Field:
    """A column of text: where it starts and stops in each line."""

    def __init__(
        self,
        text: NDArray[np.uint8],
        starts: NDArray[np.intp],
        stops: NDArray[np.intp],
    ) -> None:
        self.text = text
        self.starts = starts
        self.stops = stops
        self.widths = stops - starts

    def at(self, position: int) -> NDArray[np.uint8]:
        """Return a character of each field.

        The text's end stands for places beyond.
        """
        return self.text.take(self.starts + position, mode="clip")

    def from_end(self, position: int) -> NDArray[np.uint8]:
        """Return a character of each field; 1 is the last."""
        return self.text.take(self.stops - position, mode="clip")


def _digits(
    characters: NDArray[np.uint8], inside: NDArray[np.bool_] | None = None
) -> NDArray[np.uint8]:
    """Return the values of digits, 0 for places outside."""
    digits = characters - _ZERO  # wraps around below 0
    if inside is not None:
        digits *= inside
    if (digits > 9).any():
        raise _Odd
    return digits


def _lengths(field: _Field) -> NDArray[np.int64]:
    """Return whole numbers from 1 to `MAX_TOKENS`; no digits are 0."""
    longest = int(field.widths.max())
    if longest > _LENGTH_DIGITS:
        raise _Odd
    lengths = field.widths * 0
    for power in reversed(range(longest)):
        digits = _digits(field.from_end(power + 1), field.widths > power)
        lengths = lengths * 10 + digits
    if lengths.min() < 1 or lengths.max() > MAX_TOKENS:
        raise _Odd
    return lengths


def _ticks(field: _Field, minutes: _Minutes) -> NDArray[np.int64]:
    widths = _widths_without_zone(field)
    fraction_digits = widths - _SECOND_CHARS - 1
    # No fraction, or a dot and up to seven digits.
    is_whole = fraction_digits == -1
    if not (
        is_whole | ((fraction_digits >= 1) & (fraction_digits <= _FRACTION_DIGITS))
    ).all():
        raise _Odd
    minute = _minute_keys(field)
    tens, ones = (_digits(field.at(p)) for p in (_MINUTE_CHARS + 1, _MINUTE_CHARS + 2))
    if (tens > 5).any() or ((field.at(_SECOND_CHARS) != _DOT) & ~is_whole).any():
        raise _Odd
    ticks = tens * 10 + (ones + widths * 0)
    for power in range(_FRACTION_DIGITS):
        characters = field.at(_SECOND_CHARS + 1 + power)
        ticks = ticks * 10 + _digits(characters, fraction_digits > power)
    return ticks + _minute_ticks(minute, minutes)


def _widths_without_zone(field: _Field) -> NDArray[np.intp]:
    widths = field.widths
    zoned = field.from_end(len(_ZONE)) == _ZONE[0]
    if zoned.any():
        for i, character in enumerate(_ZONE):
            if (zoned & (field.from_end(len(_ZONE) - i) != character)).any():
                raise _Odd
        widths = widths - len(_ZONE) * zoned
    # Not before a zone: a Z there is no digit of a fraction, hence odd.
    bare: NDArray[np.intp] = widths - (field.from_end(1) == _Z)
    return bare


def _minute_keys(field: _Field) -> NDArray[np.int64]:
    """Return ``YYYYMMDDHHMM`` as a number."""
    keys = field.widths * 0
    for position in range(_MINUTE_CHARS + 1):
        characters = field.at(position)
        allowed = _DATE_PUNCTUATION.get(position)
        if allowed is None:
            keys = keys * 10 + _digits(characters)
        elif not ((characters == allowed[0]) | (characters == allowed[-1])).all():
            raise _Odd
    return keys


def _minute_ticks(keys: NDArray[np.int64], minutes: _Minutes) -> NDArray[np.int64]:
    """Return the ticks of minutes, looked up once a run of equal ones."""
    starts = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    ticks = [minutes[key] for key in keys[starts].tolist()]
    return np.repeat(np.array(ticks, np.int64), np.diff(starts, append=len(keys)))
