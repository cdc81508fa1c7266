"""Trace files as lines, plain or compressed; the rules for bad lines and failures."""

from __future__ import annotations

import gzip
import io
import sys
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from workloads.errors import TraceFormatError, WorkloadError, WorkloadWarning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

CHUNK_BYTES = 1 << 20
"""Read at once where a file is not read by lines."""
FailureRule = Literal["drop", "keep"]
"""Leave failed requests out, or keep them with an output of one token."""


def trace_path(path: str | Path) -> Path:
    """Return `path` as a path, a leading ``~`` expanded."""
    if not isinstance(path, (str, Path)):
        remedy = "give a file name, such as trace.csv"
        raise WorkloadError(f"path must be text; got {path!r}; {remedy}")
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~nobody
        remedy = "give the path in full"
        raise WorkloadError(f"path must exist; got {str(path)!r}; {remedy}") from None


def opened(path: str | Path) -> BinaryIO:
    """Open a file for its bytes; gzip and zstd are seen by content, pipes refused."""
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
    """Yield ``(line_number, text)`` of a text file, blank lines left out.

    `bad` decides on lines that are no text; None refuses the first. Broken compressed
    data is refused whatever `bad` says, as the lines behind it are unknown.
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
    problem = f"a trace must be UTF-8 text; got {error.object[error.start]:#04x}"
    return f"{problem}; give the trace itself, plain or compressed (gzip, zstd)"


def format_error(path: str | Path, line_number: int, problem: str) -> TraceFormatError:
    return TraceFormatError(f"{path}:{line_number}: {problem}")


def no_rows(path: str | Path) -> TraceFormatError:
    return TraceFormatError(
        f"{path}: a trace needs at least one request; got none; "
        "check that the file is complete"
    )


def broken(path: str | Path, number: int, error: Exception) -> WorkloadError:
    """Return the error for a file that could not be read beyond line `number`."""
    name = _compression_of(path, error)
    if name is None:
        return _unreadable(path, error)
    problem = f"{name} data must be whole; got {str(error)[:80]!r} after this line"
    return format_error(path, number, f"{problem}; fetch the file again")


def _compression_of(path: str | Path, error: Exception) -> str | None:
    """Return the compression that is broken, or None if the file cannot be read."""
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


class BadLines:
    """The rule for malformed lines: the first is refused, or all are left out."""

    def __init__(self, path: str | Path, skip: bool) -> None:
        self.path = path
        self.skip = skip
        self.num_skipped = 0
        self.first = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.report()  # after an error, too: lines may have been left out

    def refuse(self, line_number: int, problem: str) -> None:
        """Raise TraceFormatError, or count the line."""
        error = format_error(self.path, line_number, problem)
        if not self.skip:
            raise error
        if not self.num_skipped:
            self.first = str(error)
        self.num_skipped += 1

    def report(self) -> None:
        if self.num_skipped:
            lines = "line" if self.num_skipped == 1 else "lines"
            warn(
                f"{self.path}: left out {self.num_skipped} malformed {lines}; "
                f"the first: {self.first}"
            )


def warn(message: str) -> None:
    """Warn at the line that called the reader, however deep in this package this is."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, WorkloadWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.startswith("workloads.traces.")


def check_rule(rule: str) -> None:
    if rule not in ("drop", "keep"):
        raise WorkloadError(
            f"failures must be drop or keep; got {rule!r}; drop leaves failed requests "
            "out, keep gives them an output of 1 token"
        )


class Failures:
    """The rule for failed requests of one file, with a warning at the end."""

    def __init__(self, path: str | Path, rule: FailureRule) -> None:
        self.path = path
        self.keep = rule == "keep"
        self.num_failed = 0
        self.num_without_prompt = 0

    def is_kept(self, num_prompt_tokens: int) -> bool:
        """Count a failed request; without a prompt (0 tokens) none can be kept."""
        self.num_failed += 1
        self.num_without_prompt += num_prompt_tokens == 0
        return self.keep and num_prompt_tokens > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.report()  # after an error, too: none may be left but failures

    def report(self) -> None:
        if not self.num_failed:
            return
        what = "kept with an output of 1 token" if self.keep else "left out"
        if self.keep and self.num_without_prompt:
            what += f", but {self.num_without_prompt} without a prompt are left out"
        other = "drop" if self.keep else "keep"
        warn(
            f"{self.path}: {self.num_failed} requests without a response (failures) "
            f"are {what}; failures={other} is the other choice"
        )
