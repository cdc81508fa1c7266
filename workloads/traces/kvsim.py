"""Our own format: JSON lines that hold all that is known of a request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any

from workloads._checks import MAX_SPECULATIVE_TOKENS, MAX_TOKENS
from workloads.errors import WorkloadError
from workloads.requests.chains import in_order, renumbered
from workloads.spec import RequestSpec, Segment
from workloads.traces.parsing.files import (
    BadLines,
    format_error,
    no_rows,
    trace_path,
)
from workloads.traces.parsing.json_values import json_lines
from workloads.traces.parsing.requests import warned_early
from workloads.traces.parsing.values import (
    MAX_SECONDS,
    MAX_SESSION_ID,
    length_problem,
    missing_problem,
    time_problem,
    whole_problem,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HEADER_KEY = "kvsim_requests"
"""Key of the first line; its value is the version of the format."""
VERSION = 1

_MAX_ID = MAX_SESSION_ID
_MAX_SEGMENT = 2**96
"""Above all that readers and copies of traces make of 64-bit hashes."""
_MAX_WIDTH = 256  # that of `workloads.transforms.sampling`, which needs numpy
_DEFAULTS = RequestSpec(0, 0.0, (), 1, 1)


def _whole(low: int, high: int) -> Callable[[str, object], str | None]:
    return lambda name, value: whole_problem(name, value, low, high)


def _seconds(name: str, value: object) -> str | None:
    return time_problem(name, value, "seconds", MAX_SECONDS)


def _share(name: str, value: object) -> str | None:
    return time_problem(name, value, "parts of one", 1)


def _flag(name: str, value: object) -> str | None:
    if isinstance(value, bool):
        return None
    return f"{name} must be true or false; got {value!r:.80}; mend or remove the line"


def _text(name: str, value: object) -> str | None:
    # JSON can escape half a character, which no terminal and no file can be given.
    if isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value):
        return None
    return f"{name} must be text; got {str(value)[:80]!r}; mend or remove the line"


def _prompt(name: str, value: object) -> str | None:
    if type(value) is int:
        return length_problem(name, value)
    if isinstance(value, list) and value and all(map(_is_segment, value)):
        return length_problem(f"{name} in all", sum(num for _, num in value))
    rule = f"{name} must be a number of tokens or a list of [segment, tokens]"
    return f"{rule}; got {str(value)[:80]!r}; mend or remove the line"


def _is_segment(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and type(value[0]) is type(value[1]) is int
        and 0 <= value[0] <= _MAX_SEGMENT
        and 1 <= value[1] <= MAX_TOKENS
    )


def _counts(name: str, value: object) -> str | None:
    if isinstance(value, list) and all(
        type(each) is int and 0 <= each <= MAX_SPECULATIVE_TOKENS for each in value
    ):
        return None
    return (
        f"{name} must be a list of whole numbers from 0 to {MAX_SPECULATIVE_TOKENS}; "
        f"got {str(value)[:80]!r}; mend or remove the line"
    )


_FIELDS: Mapping[str, Callable[[str, object], str | None]] = {
    "arrival_s": _seconds,
    "prompt": _prompt,
    "num_output_tokens": length_problem,
    "output_segment": _whole(0, _MAX_SEGMENT),
    "max_tokens": _whole(1, MAX_TOKENS),
    "priority": _whole(-(10**9), 10**9),
    "best_of": _whole(1, _MAX_WIDTH),
    "beam_width": _whole(1, _MAX_WIDTH),
    "beam_switch_share": _share,
    "slo_class": _text,
    "session_id": _whole(0, _MAX_ID),
    "previous_id": _whole(0, _MAX_ID),
    "delay_s": _seconds,
    "ends_at_stop": _flag,
    "accepted_drafts": _counts,
}
"""Keys of a line and their types; the first three are needed."""
_NEEDED = ("arrival_s", "prompt", "num_output_tokens")
_MAY_BE_NULL = ("max_tokens", "session_id", "previous_id")


@dataclass(frozen=True, slots=True)
class KvsimTraceReader:
    """Reader of kvsim's own format, which loses nothing.

    The first line names the format, each other one is a request::

        {"kvsim_requests": 1}
        {"arrival_s": 0.0, "prompt": 374, "num_output_tokens": 44}
        {"arrival_s": 4.5, "prompt": [[0, 374], [1, 44], [2, 80]],
         "num_output_tokens": 9, "previous_id": 0, "delay_s": 4.5}

    (a request on one line, not two as here). Keys are the fields of `RequestSpec` but
    for ``request_id``, which is the line: 0 for the one below the header. Left out are
    fields that have their default, and ``output_segment`` where it is ``2 * i + 1`` in
    line ``i``; a ``prompt`` that is a number is text of its own, segment ``2 * i``.

    Unlike other traces, a file may begin after 0 s, and arrivals of follow-ups are
    taken as they are. If the lines are not sorted by arrival, they are sorted, and
    follow-ups arrive at their earliest.

    Parameters
    ----------
    path
        JSON-lines file, plain or compressed (gzip, zstd).
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first; and
        with them all requests that wait for them.

    Raises
    ------
    WorkloadError
        If the path is neither text nor a path.
    """

    path: str | Path
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))

    def read(self) -> Iterator[RequestSpec]:
        with BadLines(self.path, self.skip_bad_lines) as bad:
            numbered = list(_requests(self.path, bad))
        if not numbered:
            raise no_rows(self.path)
        requests = [request for _, request in numbered]
        times = [(request.arrival_s, number) for number, request in numbered]
        if warned_early(self.path, times):
            requests = in_order(requests)
        elif requests[-1].request_id != len(requests) - 1:
            requests = renumbered(requests)
        return iter(requests)


def _requests(path: str | Path, bad: BadLines) -> Iterator[tuple[int, RequestSpec]]:
    """Yield line numbers and requests, `request_id` being the line of the file."""
    lines = json_lines(path, bad)
    first = next(lines, None)
    if first is None:
        raise no_rows(path)
    _check_header(path, *first)
    first_line = first[0]
    known: set[int] = set()
    for number, entry in lines:
        index = number - first_line - 1
        problem = _problem(entry) or _previous_problem(entry, index, known)
        if problem:
            bad.refuse(number, problem)
            continue
        known.add(index)
        yield number, _request(index, entry)


def _check_header(path: str | Path, number: int, header: dict[str, Any]) -> None:
    version = header.get(HEADER_KEY)
    if version == VERSION and type(version) is int:
        return
    rule = f'the first line must be {{"{HEADER_KEY}": {VERSION}}}'
    problem = f"{rule}; got {str(header)[:80]!r}; give the format with --from or kind"
    raise format_error(path, number, problem)


def _problem(entry: dict[str, Any]) -> str | None:
    problem = missing_problem(entry, _NEEDED)
    for name, value in entry.items():
        if problem:
            break
        if name not in _FIELDS:
            known = ", ".join(_FIELDS)
            problem = f"keys must be of {known}; got {name!r:.80}; rename or remove it"
        elif value is not None or name not in _MAY_BE_NULL:
            problem = _FIELDS[name](name, value)
    return problem


def _previous_problem(entry: dict[str, Any], index: int, known: set[int]) -> str | None:
    previous_id = entry.get("previous_id")
    if previous_id is None or previous_id in known:
        return None
    rule = f"previous_id must be a request before, from 0 to {index - 1}"
    return f"{rule}; got {previous_id} (left out, or not before); mend the line"


def _request(index: int, entry: dict[str, Any]) -> RequestSpec:
    prompt = entry["prompt"]
    segments: tuple[Segment, ...] = ((2 * index, prompt),)
    if isinstance(prompt, list):
        segments = tuple((segment, num) for segment, num in prompt)
    request = RequestSpec(
        index,
        float(entry["arrival_s"]),
        segments,
        entry["num_output_tokens"],
        2 * index + 1,
    )
    more = {name: entry[name] for name in entry if name not in _NEEDED}
    for name in ("delay_s", "beam_switch_share"):
        if name in more:
            more[name] = float(more[name])
    if "accepted_drafts" in more:
        more["accepted_drafts"] = tuple(more["accepted_drafts"])
    return request._replace(**more) if more else request


@dataclass(frozen=True, slots=True)
class KvsimTraceWriter:
    """Writer of kvsim's own format, which loses nothing."""

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        return []

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        yield json.dumps({HEADER_KEY: VERSION}) + "\n"
        for index, request in enumerate(requests):
            if request.request_id != index:
                raise WorkloadError(
                    f"request_id must be the position, {index}; got "
                    f"{request.request_id}; renumber the requests"
                )
            yield request_line(index, request)


def request_line(index: int, request: RequestSpec) -> str:
    """Return the line of a request, which is number `index` below the header."""
    segments = request.prompt
    is_own = len(segments) == 1 and segments[0][0] == 2 * index
    entry: dict[str, Any] = {
        "arrival_s": request.arrival_s,
        "prompt": segments[0][1] if is_own else segments,
        "num_output_tokens": request.num_output_tokens,
    }
    if request.output_segment != 2 * index + 1:
        entry["output_segment"] = request.output_segment
    if request[5:] != _DEFAULTS[5:]:
        names = RequestSpec._fields[5:]
        changed = zip(names, request[5:], _DEFAULTS[5:], strict=True)
        entry |= {name: value for name, value, default in changed if value != default}
    return json.dumps(entry) + "\n"
