"""JSON values one by one: elements of an array too large to hold, or lines."""

from __future__ import annotations

import codecs
import json
import zlib
from typing import TYPE_CHECKING, Any

from workloads.errors import WorkloadError
from workloads.traces.parsing.files import (
    CHUNK_BYTES,
    broken,
    format_error,
    not_utf8,
    numbered_lines,
    opened,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from workloads.traces.parsing.files import BadLines

_SPACE = " \t\r\n"
# What is wrong with a value whose end has not been read yet: a text without its end,
# or anything wrong within its last characters.
_UNENDED = "Unterminated string"
_LONGEST_TOKEN = 400


def json_values(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield ``(line_number, value)`` of each element of an array, or of each value.

    Only one value is in memory at a time. What is no JSON is refused: where the next
    value would begin is unknown then.
    """
    text = _Text(path)
    try:
        in_array = text.skip(_SPACE + "\ufeff") == "["
        if in_array:
            text.drop(1)
        num_values = 0
        while character := text.skip(_SPACE):
            if in_array and character == "]":
                text.drop(1)
                if text.skip(_SPACE):
                    raise text.error("an array must end the file; got more behind it")
                return
            if in_array and num_values:
                if character != ",":
                    raise text.error("values of an array must have commas in between")
                text.drop(1)
                text.skip(_SPACE)
            yield text.value()
            num_values += 1
        if in_array:
            raise text.error("an array must end with ]; the file may be cut short")
    except (EOFError, zlib.error, OSError, ValueError) as error:
        if isinstance(error, WorkloadError):
            raise
        raise broken(path, text.line_number, error) from None
    finally:
        text.close()


def json_lines(path: str | Path, bad: BadLines) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line_number, object)`` of a file with a JSON object a line."""
    for number, line in numbered_lines(path, bad):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"a line must be one JSON object; got {line[-40:]!r} at its "
            bad.refuse(number, f"{problem}end ({error}); the file may be cut short")
            continue
        if isinstance(entry, dict):
            yield number, entry
        else:
            got = str(entry)[:80]
            problem = f"a line must be a JSON object; got {got!r}; mend the line"
            bad.refuse(number, problem)


class _Text:
    """The text of a file, a part at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.line_number = 1
        try:
            self._file = opened(path)
        except (OSError, ValueError) as error:
            raise broken(path, 1, error) from None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._buffer = ""
        self._start = 0
        self._ended = False

    def close(self) -> None:
        self._file.close()

    def error(self, problem: str) -> WorkloadError:
        return format_error(self.path, self.line_number, f"{problem}; mend the file")

    def drop(self, num: int) -> None:
        """Leave characters behind, counting their lines."""
        end = self._start + num
        self.line_number += self._buffer.count("\n", self._start, end)
        self._start = end

    def skip(self, characters: str) -> str:
        """Leave such characters behind; return the next other one, or nothing."""
        while True:
            while self._start < len(self._buffer):
                character = self._buffer[self._start]
                if character not in characters:
                    return character
                self.drop(1)
            if not self._read(CHUNK_BYTES):
                return ""

    def value(self) -> tuple[int, Any]:
        while True:
            try:
                value, end = self._json.raw_decode(self._buffer, self._start)
            except (ValueError, RecursionError) as error:
                # Twice as much each time, so that a long value costs no more than that.
                size = max(CHUNK_BYTES, len(self._buffer) - self._start)
                if self._may_go_on(error) and self._read(size):
                    continue
                raise self._no_json(error) from None
            # A number may go on behind the text read so far.
            if end == len(self._buffer) and self._read(CHUNK_BYTES):
                continue
            line_number = self.line_number
            self.drop(end - self._start)
            return line_number, value

    def _may_go_on(self, error: Exception) -> bool:
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith(_UNENDED) or (
            error.pos >= len(self._buffer) - _LONGEST_TOKEN
        )

    def _no_json(self, error: Exception) -> WorkloadError:
        position = getattr(error, "pos", self._start)
        reason = getattr(error, "msg", None) or str(error)[:80]
        got = self._buffer[position : position + 40]
        self.drop(position - self._start)
        return self.error(f"a trace must be JSON; got {got!r} ({reason})")

    def _read(self, num_bytes: int) -> bool:
        if self._ended:
            return False
        data = self._file.read(num_bytes)
        self._ended = not data
        try:
            more = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            line_number = self.line_number + self._buffer.count("\n", self._start)
            line_number += error.object[: error.start].count(b"\n")
            raise format_error(self.path, line_number, not_utf8(error)) from None
        self._buffer = self._buffer[self._start :] + more
        self._start = 0
        return bool(more) or not self._ended
