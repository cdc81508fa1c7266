"""Decision logs on disk: text, a JSON object a line, compressed or not."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from sim.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from sim.scheduler.log.lines import Line

SCHEDULE_FORMAT = "kvsim-schedule"
"""Name of the format in the header of a recorded schedule."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def write_log(lines: Iterable[Line], path: Path) -> int:
    """Write a log, whole or not at all; return its number of lines."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    num_lines = 0
    try:
        with partial.open("wb") as raw, _text(raw, path) as text:
            for line in lines:
                text.write(json.dumps(line, separators=(",", ":")) + "\n")
                num_lines += 1
        partial.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}; name another --out"
        ) from error
    finally:
        with suppress(OSError):  # no such directory: there is nothing to take away
            partial.unlink(missing_ok=True)
    return num_lines


def _text(raw: Any, path: Path) -> io.TextIOWrapper:
    stream = (
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
        if path.suffix == ".gz"
        else raw
    )
    return io.TextIOWrapper(stream, encoding="utf-8", newline="\n")


def read_log(path: Path) -> Iterator[Line]:
    """Read a log, or a recorded schedule, compressed or not, line by line.

    The header of a recorded schedule is left out.
    """
    number = 1
    try:
        with _opened(path) as text:
            for row in text:
                if not row.isspace() and not (number == 1 and _is_header(row)):
                    yield _line(row)
                number += 1
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}; name a whole log") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: not a log line: {error}") from error


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the header of a recorded schedule; None where there is none."""
    try:
        with _opened(path) as text:
            header = json.loads(text.readline())
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}; name a whole log") from error
    except (ValueError, RecursionError):
        return None
    is_header = isinstance(header, dict) and header.get("format") == SCHEDULE_FORMAT
    return header if is_header else None


def _opened(path: Path) -> TextIO:
    with path.open("rb") as raw:
        magic = raw.read(4)
    if magic.startswith(_GZIP):
        return gzip.open(path, "rt", encoding="utf-8")
    if magic == _ZSTD:
        import pyarrow as pa  # noqa: PLC0415  # slow, and for recorded schedules only

        stream = pa.input_stream(str(path), compression="zstd")
        return io.TextIOWrapper(stream, encoding="utf-8")
    return path.open(encoding="utf-8")


def _is_header(row: str) -> bool:
    header = json.loads(row)
    return isinstance(header, dict) and header.get("format") == SCHEDULE_FORMAT


def _line(row: str) -> Line:
    """Return a step, the header before the steps, or the answer of a sizing case."""
    line = json.loads(row)
    known = isinstance(line, dict) and (
        isinstance(line.get("t"), int)
        or isinstance(line.get("header"), dict)
        or isinstance(line.get("name"), str)
    )
    if not known:
        raise ValueError("it is no object with a step 't'")
    return cast("Line", line)
