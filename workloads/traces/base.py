"""What every trace reader is, and what they share: lines, errors, arrival order.

Segment ids, one scheme for all readers and for synthetic traffic::

    even, 2 * k       text of prompts; k is the trace's own identity of it
    odd,  2 * i + 1   text generated for request i

so that a prompt and an output can never be taken for the same text.
"""

from __future__ import annotations

import gzip
import warnings
import zlib
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from workloads._checks import MAX_TOKENS
from workloads.errors import TraceFormatError, WorkloadError, WorkloadWarning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    import numpy as np
    from numpy.typing import NDArray

    from workloads.spec import RequestSpec

RowT = TypeVar("RowT", bound="tuple[Any, ...]")

_GZIP_MAGIC = b"\x1f\x8b"


@runtime_checkable
class TraceReader(Protocol):
    """A recorded trace."""

    def read(self) -> Iterator[RequestSpec]:
        """Return the requests in arrival order.

        Returns
        -------
        iterator of RequestSpec
            Arrivals in seconds, at least 0 and never falling; the first arrival of
            a recording is time 0. `workloads.workload.TraceWorkload` numbers the
            requests anew.

        Raises
        ------
        WorkloadError
            If the file cannot be read.
        TraceFormatError
            If it breaks its format.
        """
        ...


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
    return Path(path).expanduser()


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line_number, text)`` of a text file, gzipped or not.

    Parameters
    ----------
    path
        File to read. Compression is seen by content, not by name.

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
        If it is no UTF-8 text or its compression is broken.
    """
    number = 1
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                # utf-8-sig drops the byte-order mark that spreadsheets write.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
                if text:
                    yield number, text
    except UnicodeDecodeError as error:
        problem = f"a trace must be UTF-8 text; got {error.object[error.start]:#04x}"
        remedy = "give the trace itself, plain or gzipped"
        raise format_error(path, number, f"{problem}; {remedy}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"gzip data must be whole; got {str(error)[:80]!r} after this line"
        raise format_error(path, number, f"{problem}; fetch the file again") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def format_error(path: str | Path, line_number: int, problem: str) -> TraceFormatError:
    """Return the error for one line of a trace, ``FILE:LINE: problem``."""
    return TraceFormatError(f"{path}:{line_number}: {problem}")


def in_arrival_order(path: str | Path, rows: list[RowT]) -> list[RowT]:
    """Return rows sorted by their first field, with a warning where they were not.

    Parameters
    ----------
    path
        File they come from, for messages.
    rows
        Tuples that begin with ``(time, line_number)``, in file order.

    Returns
    -------
    list of tuple
        The same rows; equal times keep file order.

    Raises
    ------
    TraceFormatError
        If there are no rows.

    Warns
    -----
    WorkloadWarning
        If a time is earlier than one before it: first such line, and how many.
    """
    if not rows:
        raise _no_rows(path)
    latest = rows[0][0]
    early_lines: list[int] = []
    for row in rows:
        if row[0] < latest:
            early_lines.append(row[1])
        else:
            latest = row[0]
    if not early_lines:
        return rows
    _warn_early(path, early_lines[0], len(early_lines), len(rows))
    return sorted(rows, key=itemgetter(0))


def columns_in_arrival_order(
    path: str | Path,
    times: NDArray[np.int64],
    line_numbers: NDArray[np.int64],
    *columns: NDArray[np.int64],
) -> tuple[NDArray[np.int64], ...]:
    """Return columns sorted by time, with a warning where they were not.

    Parameters
    ----------
    path
        File they come from, for messages.
    times, line_numbers
        Of each row in file order, shape ``(n,)``.
    columns
        Whatever else rows hold, of the same shape.

    Returns
    -------
    tuple of numpy.ndarray
        ``(times, *columns)``; equal times keep file order.

    Raises
    ------
    TraceFormatError
        If there are no rows.

    Warns
    -----
    WorkloadWarning
        As `in_arrival_order`.
    """
    import numpy as np  # noqa: PLC0415 - 0.2 s that `--help` need not pay

    if not len(times):
        raise _no_rows(path)
    early = np.flatnonzero(times < np.maximum.accumulate(times))
    if not len(early):
        return times, *columns
    _warn_early(path, int(line_numbers[early[0]]), len(early), len(times))
    order = times.argsort(kind="stable")
    return tuple(column[order] for column in (times, *columns))


def _no_rows(path: str | Path) -> TraceFormatError:
    return TraceFormatError(
        f"{path}: a trace needs at least one request; got none; "
        "check that the file is complete"
    )


def _warn_early(
    path: str | Path, line_number: int, num_early: int, num_rows: int
) -> None:
    message = (
        f"{path}:{line_number}: timestamps must not fall; {num_early} of "
        f"{num_rows} rows are earlier than one before them; sorted by time"
    )
    # To whoever calls read(), which calls our caller.
    warnings.warn(message, WorkloadWarning, stacklevel=4)


def length_problem(name: str, value: object) -> str | None:
    """Return what is wrong with a length in tokens, or None if it is right.

    Parameters
    ----------
    name
        Column or key, for the message.
    value
        What the trace says; only an int from 1 to 1e9 is right.
    """
    if type(value) is int and 1 <= value <= MAX_TOKENS:
        return None
    rule = f"{name} must be a whole number from 1 to {MAX_TOKENS}"
    return f"{rule}; got {value!r:.80}; mend or remove the line"


def opened(path: str | Path) -> BinaryIO | gzip.GzipFile:
    """Open a file to read its bytes, unpacked if it is gzipped by its content."""
    with Path(path).open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    return gzip.open(path, "rb") if is_gzip else Path(path).open("rb")


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
