"""Logs of one's own: CSV or JSON lines, whose columns the reader is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any, Literal

from workloads._checks import MAX_TOKENS, between, whole
from workloads.errors import WorkloadError
from workloads.requests.chains import in_order
from workloads.spec import RequestSpec
from workloads.traces.llmservingsim import extended
from workloads.traces.parsing.csv_lines import csv_lines, plain_int
from workloads.traces.parsing.files import BadLines, numbered_lines, trace_path
from workloads.traces.parsing.json_values import json_lines
from workloads.traces.parsing.requests import (
    in_arrival_order,
    own_prompts,
    own_text_requests,
    sharing_specs,
)
from workloads.traces.parsing.values import (
    MAX_SECONDS,
    MAX_THINK_S,
    length_problem,
    session_numbers,
    time_problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from workloads.spec import Segment

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

_Row = tuple[float, int, int, int, object]
"""``(time_s, line_number, num_prompt_tokens, num_output_tokens, session)``."""


@dataclass(frozen=True, slots=True)
class TableTraceReader:
    """Reader of any log of requests, CSV or JSON lines, by the names of its columns.

    A CSV file has a header, a JSON file an object a line, in which
    ``response.body.usage.prompt_tokens`` names what lies deeper. Nothing tells which
    prompts share text: each is text of its own, unless `assume_history`.

    Parameters
    ----------
    path
        File, plain or compressed (gzip, zstd).
    time
        Column of the arrivals: ISO 8601 (without a zone: UTC), or numbers.
    prompt_tokens, output_tokens
        Columns of the lengths.
    time_unit
        Of arrivals that are numbers, since any moment: ``s``, ``ms``, ``us``, ``ns``.
    session
        Column of the conversation or agent.
    assume_history
        A session's prompts begin with its prompt and answer before, as far as they are
        long enough: what a chat or an agent sends.
    system_tokens
        Tokens with which all prompts begin, of those that are counted: one system
        prompt.
    think_time_s
        Seconds from the end of an answer to the next request of its session, whenever
        that came in the log. None: arrivals are as recorded, also within a session,
        which had waited for the answers of their day.
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first. A
        follow-up then follows the rest of its session.

    Raises
    ------
    WorkloadError
        If the path is no path, a name of a column no text, the unit unknown, a number
        out of range, or a history or a think time given without sessions.
    """

    path: str | Path
    time: str
    prompt_tokens: str
    output_tokens: str
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    session: str | None = None
    assume_history: bool = False
    system_tokens: int = 0
    think_time_s: float | None = None
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))
        for key in ("time", "prompt_tokens", "output_tokens", "session"):
            name = getattr(self, key)
            if not (isinstance(name, str) or (key == "session" and name is None)):
                raise WorkloadError(
                    f"{key} must be the name of a column; got {name!r}; "
                    "quote names that are numbers"
                )
        if self.time_unit not in (None, *_PER_SECOND):
            raise WorkloadError(
                f"time_unit must be one of {', '.join(_PER_SECOND)}; "
                f"got {self.time_unit!r}; leave it out for ISO times"
            )
        remedy = "give tokens, or leave it out for none"
        whole("system_tokens", self.system_tokens, 0, MAX_TOKENS, remedy)
        if self.think_time_s is not None:
            remedy = "give seconds, or leave it out for arrivals as recorded"
            between("think_time_s", self.think_time_s, 0, MAX_THINK_S, remedy)
        closes_loop = self.think_time_s is not None
        needing = {"assume_history": self.assume_history, "think_time_s": closes_loop}
        for key, is_set in needing.items():
            if is_set and self.session is None:
                raise WorkloadError(
                    f"{key} needs session, the column of conversations; "
                    f"got none; name it, or leave {key} out"
                )

    def read(self) -> Iterator[RequestSpec]:
        with BadLines(self.path, self.skip_bad_lines) as bad:
            rows = self._rows(bad)
            if self.session is None and not self.system_tokens:
                return own_text_requests(self.path, (row[:4] for row in rows))
            requests = self._sharing(in_arrival_order(self.path, list(rows)))
            if self.think_time_s is None:
                return requests
            return iter(in_order(_following(requests, float(self.think_time_s))))

    def _rows(self, bad: BadLines) -> Iterator[_Row]:
        for number, values in self._lines(bad):
            time, prompt, output = map(_number, values[:3])
            problem = (
                self._time_problem(time)
                or length_problem(self.prompt_tokens, prompt)
                or length_problem(self.output_tokens, output)
            )
            if problem:
                bad.refuse(number, problem)
            else:
                yield self._seconds(time), number, prompt, output, values[3]

    def _lines(self, bad: BadLines) -> Iterator[tuple[int, list[Any]]]:
        """Yield the line and the values of the four columns, None without sessions."""
        names = [self.time, self.prompt_tokens, self.output_tokens]
        if self.session is not None:
            names.append(self.session)
        _, first = next(numbered_lines(self.path), (0, ""))
        rest = [None] * (4 - len(names))
        if first.startswith("{"):
            for number, entry in json_lines(self.path, bad):
                try:
                    values = [_value(entry, name) for name in names]
                except KeyError as error:
                    bad.refuse(number, _missing_problem(error.args[0], entry))
                else:
                    yield number, values + rest
        else:
            lines = csv_lines(self.path, names, bad)
            columns = [lines.positions[name] for name in names]
            for number, fields in lines.rows:
                yield number, [fields[column].strip() for column in columns] + rest

    def _time_problem(self, value: object) -> str | None:
        if self.time_unit is not None:
            most = MAX_SECONDS * _PER_SECOND[self.time_unit]
            return time_problem(self.time, value, self.time_unit, most)
        if type(value) in (int, float):
            raise WorkloadError(
                f"{self.path}: time_unit must be one of {', '.join(_PER_SECOND)} "
                f"where times are numbers; got {value} as {self.time} without it; "
                "set time_unit"
            )
        if _iso_seconds(value) is None:
            rule = f"{self.time} must be a time such as 2026-11-28T09:30:00.5+00:00"
            return f"{rule}; got {value!r:.80}; mend or remove the line"
        return None

    def _seconds(self, value: Any) -> float:
        if self.time_unit is None:
            return _iso_seconds(value) or 0.0
        return float(value) / _PER_SECOND[self.time_unit]

    def _sharing(self, rows: list[_Row]) -> Iterator[RequestSpec]:
        sessions: Sequence[int | None] = [None] * len(rows)
        if self.session is not None:
            sessions = session_numbers([None if r[4] == "" else r[4] for r in rows])
        prompts = own_prompts(row[2] for row in rows)
        if self.system_tokens:
            system = (2 * len(rows), self.system_tokens)
            prompts = (_behind(system, prompt) for prompt in prompts)
        if self.assume_history:
            prompts = _with_history(rows, prompts, sessions)
        first_s = rows[0][0]
        return sharing_specs(
            [row[0] - first_s for row in rows],
            prompts,
            [row[3] for row in rows],
            sessions,
        )


def _behind(system: Segment, prompt: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return a prompt of as many tokens that begins with the system prompt."""
    ((own, num_tokens),) = prompt
    segment, num_system_tokens = system
    if num_tokens <= num_system_tokens:
        return ((segment, num_tokens),)
    return (system, (own, num_tokens - num_system_tokens))


def _following(
    requests: Iterable[RequestSpec], think_time_s: float
) -> Iterator[RequestSpec]:
    """Yield requests of which those of a session wait for the one before."""
    latest: dict[int, int] = {}
    for request in requests:
        session_id = request.session_id
        previous_id = None if session_id is None else latest.get(session_id)
        if session_id is not None:
            latest[session_id] = request.request_id
        delay_s = 0.0 if previous_id is None else think_time_s
        yield request._replace(previous_id=previous_id, delay_s=delay_s)


def _with_history(
    rows: Sequence[_Row],
    prompts: Iterable[tuple[Segment, ...]],
    sessions: Sequence[int | None],
) -> Iterator[tuple[Segment, ...]]:
    """Yield prompts that begin with the prompt and answer before in their session."""
    latest: dict[int, RequestSpec] = {}
    for i, (row, own, session) in enumerate(zip(rows, prompts, sessions, strict=True)):
        prompt = own
        if session is not None:
            if session in latest:
                prompt = extended(latest[session], 2 * i, row[2])
            latest[session] = RequestSpec(i, row[0], prompt, row[3], 2 * i + 1)
        yield prompt


def _value(entry: dict[str, Any], name: str) -> Any:
    """Return what an object holds by a key, or by keys with points in between."""
    if name in entry:
        return entry[name]
    value: Any = entry
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            raise KeyError(name)
        value = value[key]
    return value


def _missing_problem(name: str, entry: dict[str, Any]) -> str:
    got = ", ".join(_paths(entry))[:300] or "none"
    rule = f"keys must include {name}; got {got}"
    return f"{rule}; name one that is there, or mend the line"


def _paths(entry: dict[str, Any], below: str = "", depth: int = 5) -> Iterator[str]:
    for key, value in entry.items():
        if isinstance(value, dict) and value and depth:
            yield from _paths(value, f"{below}{key}.", depth - 1)
        else:
            yield below + key


def _number(value: Any) -> Any:
    """Return the number that a text is, or what was given."""
    if not isinstance(value, str) or not value.isascii() or "_" in value:
        return value
    try:
        return plain_int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value


def _iso_seconds(value: object) -> float | None:
    """Return seconds since 1970 of an ISO time, or None if it is none."""
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return seconds if seconds >= 0 else None
