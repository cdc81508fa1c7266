"""Writing a trace: losses by format, chains as rows, and whole files."""

from __future__ import annotations

import gzip
import io
import math
import secrets
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from workloads.errors import WorkloadError
from workloads.requests.columns import RequestColumns
from workloads.traces.parsing.files import trace_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO, TextIO

    from workloads.spec import RequestSpec
    from workloads.traces.base import TraceWriter

_FIELDS: dict[str, tuple[str, Callable[[RequestSpec], bool]]] = {
    "sessions": (
        "session ids",
        lambda request: request.session_id is not None,
    ),
    "chains": (
        "that requests wait for the end of another (they arrive at their earliest)",
        lambda request: request.previous_id is not None,
    ),
    "delays": (
        "seconds that a user spends before a first request",
        lambda request: request.previous_id is None and request.delay_s > 0,
    ),
    "max_tokens": (
        "max_tokens that clients state",
        lambda request: request.max_tokens is not None,
    ),
    "output_end": (
        "that outputs end at a length that is asked for",
        lambda request: not request.ends_at_stop,
    ),
    "priority": ("priorities", lambda request: request.priority != 0),
    "samples": (
        "parallel samples and beams",
        lambda request: (
            request.best_of != 1
            or request.beam_width != 1
            or request.beam_switch_share != 0
        ),
    ),
    "slo_class": (
        "service levels (slo_class)",
        lambda request: bool(request.slo_class),
    ),
    "accepted_drafts": (
        "how many drafts were accepted",
        lambda request: bool(request.accepted_drafts),
    ),
}
"""By name: the field in words, and whether a request has it."""


def losses(requests: Sequence[RequestSpec], kept: Collection[str]) -> list[str]:
    """Return the facts that a format loses, a line each.

    `kept` is what it holds, of ``prefixes``, ``start`` and the names of `_FIELDS`;
    every format holds arrivals, lengths and order.
    """
    lines = []
    if "prefixes" not in kept and (num := num_sharing(requests)):
        lines.append(f"which prompts share text ({_of(num, requests)})")
    lines += field_losses(requests, kept)
    if "start" not in kept and requests and requests[0].arrival_s:
        lines.append(
            f"time before the first arrival ({requests[0].arrival_s:g} s): a trace "
            "starts at 0"
        )
    return lines


def field_losses(requests: Sequence[RequestSpec], kept: Collection[str]) -> list[str]:
    names = [name for name in _FIELDS if name not in kept]
    if isinstance(requests, RequestColumns):
        # One value for all, mostly; and a request knows of no other field.
        lacking = ("sessions", "chains", "delays", "accepted_drafts")
        names = [name for name in names if name not in lacking]
    lines = []
    for name in names:
        what, has = _FIELDS[name]
        if num := sum(map(has, requests)):
            lines.append(f"{what} ({_of(num, requests)})")
    return lines


def num_sharing(requests: Sequence[RequestSpec]) -> int:
    """Return how many prompts hold text of another prompt, or of an answer."""
    if isinstance(requests, RequestColumns):
        return 0
    seen: dict[int, int] = {}
    for request in requests:
        segments = {segment for segment, _ in request.prompt}
        for segment in chain(segments, (request.output_segment,)):
            seen[segment] = seen.get(segment, 0) + 1
    return sum(
        any(seen[segment] > 1 for segment, _ in request.prompt) for request in requests
    )


def num_quoting(requests: Sequence[RequestSpec]) -> int:
    """Return how many prompts hold text that was generated for a request."""
    if isinstance(requests, RequestColumns):
        return 0
    generated = {request.output_segment for request in requests}
    return sum(
        any(segment in generated for segment, _ in request.prompt)
        for request in requests
    )


def _of(num: int, requests: Sequence[RequestSpec]) -> str:
    return f"{num} of {len(requests)} requests"


class Link(NamedTuple):
    """How a request is written where a session is a row."""

    session_id: int | None
    follows: bool
    """Whether it is sent after the end of the last request of its session."""


def links(requests: Sequence[RequestSpec]) -> list[Link]:
    """Return how each request is written.

    A request that waits for one that is not the last of its session (two wait for the
    same, say) cannot be written so, and arrives at its earliest. A chain without a
    session gets a number that no session has.
    """
    if isinstance(requests, RequestColumns):
        return [Link(None, False)] * len(requests)
    session_ids = [request.session_id for request in requests]
    waited_for = {request.previous_id for request in requests}
    next_number = max((id_ for id_ in session_ids if id_ is not None), default=-1) + 1
    latest: dict[int, int] = {}
    found: list[Link] = []
    for index, request in enumerate(requests):
        session_id, previous_id = request.session_id, request.previous_id
        if session_id is None and previous_id is not None:
            session_id = found[previous_id].session_id
        elif session_id is None and index in waited_for:
            session_id, next_number = next_number, next_number + 1
        follows = (
            previous_id is not None
            and session_id is not None
            and latest.get(session_id) == previous_id
        )
        if session_id is not None:
            latest[session_id] = index
        found.append(Link(session_id, follows))
    return found


def chain_losses(requests: Sequence[RequestSpec], found: Sequence[Link]) -> list[str]:
    pairs = list(zip(requests, found, strict=True))
    unwritten = sum(
        request.previous_id is not None and not link.follows for request, link in pairs
    )
    named = sum(
        request.session_id is None and link.session_id is not None
        for request, link in pairs
    )
    lines = []
    if unwritten:
        lines.append(
            f"that {unwritten} of {len(requests)} requests wait for another than the "
            "last of their session (they arrive at their earliest)"
        )
    if named:
        lines.append(
            f"that {named} of {len(requests)} requests had no session id (a chain "
            "needs one here)"
        )
    return lines


def scaled(seconds: float, units_per_s: int) -> int | float:
    """Return seconds in another unit, a whole number where that reads back the same.

    Else the value that, divided by `units_per_s`, comes nearest.
    """
    units = seconds * units_per_s
    if round(units) / units_per_s == seconds:
        return round(units)
    near = (units, math.nextafter(units, 0), math.nextafter(units, math.inf))
    return min(near, key=lambda each: abs(each / units_per_s - seconds))


def write_trace(
    path: str | Path,
    requests: Sequence[RequestSpec],
    writer: TraceWriter,
    overwrite: bool = False,
) -> None:
    """Write requests to a file, which appears when it is complete.

    ``.gz`` and ``.zst`` at its end compress it. Equal requests give equal bytes.

    Raises
    ------
    WorkloadError
        If the file exists already or cannot be written, or the format
        cannot hold a request.
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
    """Refuse a file that must not be written, before work is done for it."""
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
        text.detach()  # written out; the caller closes the file
        if packed is not file:
            packed.close()


def _unwritable(path: Path, error: OSError) -> WorkloadError:
    reason = error.strerror or error
    return WorkloadError(
        f"'{path}' cannot be written: {reason}; make room or choose another --out"
    )
