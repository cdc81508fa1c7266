"""Trace files as bytes and lines, plain or compressed, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.errors import TraceFormatError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from workloads.traces.parsing.bad_lines import BadLines

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

CHUNK_BYTES = 1 << 20
"""Read at once where a file is not read by lines."""


def trace_path(path: str | Path) -> Path:
    """Return ``path`` as a path, a leading ``~`` expanded.

    Raises
    ------
    WorkloadError
        If it is neither text nor a path.
    """
    if not isinstance(path, (str, Path)):
        remedy = "give a file name, such as trace.csv"
        raise WorkloadError(f"path must be text; got {path!r}; {remedy}")
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~nobody
        remedy = "give the path in full"
        raise WorkloadError(f"path must exist; got {str(path)!r}; {remedy}") from None


def opened(path: str | Path) -> BinaryIO:
    """Open a file to read its bytes, unpacked if gzip or zstd, seen by its content.

    Raises
    ------
    OSError, ValueError
        If it cannot be opened, or is a pipe or device: what was read of it to tell
        its compression is gone then.
    """
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise io.UnsupportedOperation(
            "a pipe or device, which cannot be read twice: write it to a file first"
        )
    with Path(path).open("rb") as file:
        magic = file.read(4)
    if magic.startswith(_GZIP_MAGIC):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if magic == _ZSTD_MAGIC:
        import pyarrow as pa  # noqa: PLC0415 - slow, and for zstd only

        stream = pa.input_stream(str(path), compression="zstd")
        return io.BufferedReader(stream, CHUNK_BYTES)
    return Path(path).open("rb")


def numbered_lines(
    path: str | Path, bad: BadLines | None = None
) -> Iterator[tuple[int, str]]:
    """Yield ``(line_number, text)`` of a text file, compressed or not.

    Parameters
    ----------
    path
        File to read. Compression (gzip, zstd) is seen by content, not by name.
    bad
        Who decides on lines that are no text; None refuses the first.

    Yields
    ------
    tuple of (int, str)
        Line numbers from 1, and lines without their line ending, blank ones left
        out.

    Raises
    ------
    WorkloadError
        If the file is missing, a directory or not permitted.
    TraceFormatError
        If a line is no UTF-8 text or holds a NUL byte, or compressed data is broken:
        that is refused whatever `bad` says, as what follows is unknown.
    """
    number = 0
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                problem = None
                try:
                    # utf-8-sig drops the byte-order mark that spreadsheets write.
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
                except UnicodeDecodeError as error:
                    problem = not_utf8(error)
                else:
                    if "\0" in text:
                        problem = "a trace must be text; got a NUL byte; mend the line"
                    elif text:
                        yield number, text
                if problem:
                    if bad is None:
                        raise format_error(path, number, problem)
                    bad.refuse(number, problem)
    except (EOFError, zlib.error, OSError, ValueError) as error:
        if isinstance(error, TraceFormatError):
            raise
        raise broken(path, max(number, 1), error) from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the problem of bytes that are no text."""
    problem = f"a trace must be UTF-8 text; got {error.object[error.start]:#04x}"
    return f"{problem}; give the trace itself, plain or compressed (gzip, zstd)"


def format_error(path: str | Path, line_number: int, problem: str) -> TraceFormatError:
    """Return the error for one line of a trace, ``FILE:LINE: problem``."""
    return TraceFormatError(f"{path}:{line_number}: {problem}")


def no_rows(path: str | Path) -> TraceFormatError:
    """Return the error for a trace without requests."""
    return TraceFormatError(
        f"{path}: a trace needs at least one request; got none; "
        "check that the file is complete"
    )


def broken(path: str | Path, number: int, error: Exception) -> WorkloadError:
    """Return the error for a file that could not be read, or not to its end.

    Parameters
    ----------
    path
        The file.
    number
        Line after which that happened.
    error
        What reading raised.
    """
    name = _compression_of(path, error)
    if name is None:
        return _unreadable(path, error)
    problem = f"{name} data must be whole; got {str(error)[:80]!r} after this line"
    return format_error(path, number, f"{problem}; fetch the file again")


def _compression_of(path: str | Path, error: Exception) -> str | None:
    """Return whose data is broken, or None if the file itself cannot be read."""
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return "gzip"
    # Arrow's own errors carry no number of the system's.
    is_arrow = type(error) is OSError and error.errno is None
    return "zstd" if is_arrow else None


def _unreadable(path: str | Path, error: Exception) -> WorkloadError:
    if isinstance(error, FileNotFoundError):
        remedy = "check the path, or fetch a public trace: kvsim workload fetch"
        return WorkloadError(f"a trace must exist; got {str(path)!r}; {remedy}")
    if isinstance(error, IsADirectoryError):
        remedy = "give the file in it"
        return WorkloadError(f"a trace is a file; {str(path)!r} is a folder; {remedy}")
    reason = getattr(error, "strerror", None) or error
    return WorkloadError(
        f"a trace must be readable; got {str(path)!r} ({reason}); check the file"
    )
