"""Writing a trace: whole or not at all, compressed by its name."""

from __future__ import annotations

import gzip
import io
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from workloads.errors import WorkloadError
from workloads.traces.parsing.files import trace_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO, TextIO

    from workloads.spec import RequestSpec
    from workloads.traces.base import TraceWriter


def write_trace(
    path: str | Path,
    requests: Sequence[RequestSpec],
    writer: TraceWriter,
    overwrite: bool = False,
) -> None:
    """Write requests to a file, which appears when it is complete.

    Parameters
    ----------
    path
        File to write; ``.gz`` and ``.zst`` at its end compress it. Equal requests give
        equal bytes.
    requests
        What to write.
    writer
        The format.
    overwrite
        Replace a file that exists.

    Raises
    ------
    WorkloadError
        If the file exists or cannot be written, or the format cannot hold a request.
    """
    path = trace_path(path)
    check_writable(path, overwrite)
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as file, _text_of(file, path.suffix.lower()) as text:
            text.writelines(writer.lines(requests))
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path, overwrite: bool) -> None:
    """Refuse a file that must not be written, before work is done for it.

    Raises
    ------
    WorkloadError
        If it exists and is not to be replaced, is a folder, pipe or device, or would
        be in no folder.
    """
    try:
        if path.is_dir():
            raise WorkloadError(f"'{path}' is a folder; give a file in it")
        if path.exists() and not path.is_file():
            raise WorkloadError(
                f"'{path}' is a pipe or device, which a file would replace; give a file"
            )
        if path.exists() and not overwrite:
            raise WorkloadError(
                f"'{path}' exists already; choose another --out or add --overwrite"
            )
        if not path.parent.is_dir():
            raise WorkloadError(
                f"'{path}' must be in a folder that exists; there is no "
                f"'{path.parent}'; make it"
            )
    except OSError as error:
        raise _unwritable(path, error) from None


@contextmanager
def _text_of(file: BinaryIO, suffix: str) -> Iterator[TextIO]:
    """Open a file for text, compressed by the suffix of its name."""
    packed: BinaryIO = file
    if suffix == ".gz":
        # Without name and time, which would differ between equal files.
        packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0)  # type: ignore[assignment]
    elif suffix == ".zst":
        import pyarrow as pa  # noqa: PLC0415 - slow, and for zstd only

        packed = pa.CompressedOutputStream(file, "zstd")
    text = io.TextIOWrapper(packed, encoding="utf-8", newline="\n")
    try:
        yield text
    finally:
        text.detach()  # written out, and the file is closed by who opened it
        if packed is not file:
            packed.close()


def _unwritable(path: Path, error: OSError) -> WorkloadError:
    reason = error.strerror or error
    return WorkloadError(f"'{path}' cannot be written: {reason}; choose another --out")
