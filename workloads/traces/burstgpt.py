"""BurstGPT traces: calls of a campus to ChatGPT and GPT-4, one a line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING

from workloads.errors import WorkloadError
from workloads.traces.parsing.csv_lines import (
    column_length_problem,
    csv_lines,
    is_length,
    plain_int,
    plain_seconds,
    seconds_problem,
)
from workloads.traces.parsing.files import (
    BadLines,
    FailureRule,
    Failures,
    check_rule,
    trace_path,
)
from workloads.traces.parsing.requests import (
    in_arrival_order,
    own_prompts,
    own_text_requests,
    sharing_specs,
)
from workloads.traces.parsing.values import session_numbers
from workloads.traces.writing import losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.spec import RequestSpec
    from workloads.traces.parsing.csv_lines import CsvLines

_TIME, _PROMPT, _OUTPUT = "Timestamp", "Request tokens", "Response tokens"
_SESSION, _MODEL, _LOG = "Session ID", "Model", "Log Type"
_HEADER = (
    _TIME,
    _SESSION,
    "Elapsed time",
    _MODEL,
    _PROMPT,
    _OUTPUT,
    "Total tokens",
    _LOG,
)

_Row = tuple[float, int, int, int, str]
"""``(time_s, line_number, num_prompt_tokens, num_output_tokens, session)``."""


@dataclass(frozen=True, slots=True)
class BurstGptTraceReader:
    """Reader of BurstGPT, with or without ``Session ID``.

    The trace holds no prompt identity: each prompt is text of its own, also within a
    session, whose id is kept for reports. Arrivals are as recorded: they had waited for
    the answers of their day, so no request waits for another again.

    Parameters
    ----------
    path
        CSV file, plain or compressed (gzip, zstd).
    model
        Keep calls of this ``Model`` only, ``ChatGPT`` or ``GPT-4`` in the published
        files.
    log_type
        Keep calls of this ``Log Type`` only, ``Conversation log`` or ``API log``.
    failures
        A call with 0 response tokens failed: ``drop`` leaves it out, as in the
        published files named ``without_fails``; ``keep`` gives it an output of one
        token, where its prompt is known: published failures have 0 request tokens too.
        Either way a warning counts them.
    skip_bad_lines
        Leave malformed lines out with a warning, instead of refusing the first.

    Raises
    ------
    WorkloadError
        If the path is neither text nor a path, or `failures` is unknown.

    Notes
    -----
    ``Timestamp`` is in seconds. ``Elapsed time`` and ``Total tokens`` are not used.

    Source: github.com/HPMLL/BurstGPT; Wang et al., BurstGPT, 2024 (arXiv:2401.17644).
    """

    path: str | Path
    model: str | None = None
    log_type: str | None = None
    failures: FailureRule = "drop"
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))
        check_rule(self.failures)

    def read(self) -> Iterator[RequestSpec]:
        with (
            Failures(self.path, self.failures) as failures,
            BadLines(self.path, self.skip_bad_lines) as bad,
        ):
            lines = csv_lines(
                self.path, (_TIME, _PROMPT, _OUTPUT), bad, (_SESSION, _MODEL, _LOG)
            )
            rows = self._rows(lines, failures, bad)
            if _SESSION in lines.positions:
                return _with_sessions(in_arrival_order(self.path, list(rows)))
            return own_text_requests(self.path, (row[:4] for row in rows))

    def _rows(
        self, lines: CsvLines, failures: Failures, bad: BadLines
    ) -> Iterator[_Row]:
        where = lines.positions
        columns = [where[name] for name in (_TIME, _PROMPT, _OUTPUT)]
        time_column, prompt_column, output_column = columns
        session_column = where.get(_SESSION)
        wanted = self._wanted(lines, bad)
        for number, fields in lines.rows:
            if wanted and any(fields[column] != value for column, value in wanted):
                continue
            try:
                time_s = plain_seconds(fields[time_column])
                num_prompt_tokens = plain_int(fields[prompt_column])
                num_output_tokens = plain_int(fields[output_column])
            except ValueError:
                num_prompt_tokens = num_output_tokens = -1
            failed = num_output_tokens == 0
            # The published ones are 0 and 0: of their prompts nothing is known.
            has_prompt = is_length(num_prompt_tokens)
            if not (has_prompt or (failed and num_prompt_tokens == 0)) or not (
                failed or is_length(num_output_tokens)
            ):
                bad.refuse(number, _problem([fields[column] for column in columns]))
                continue
            if failed:
                if not failures.is_kept(num_prompt_tokens):
                    continue
                num_output_tokens = 1
            session = "" if session_column is None else fields[session_column].strip()
            yield time_s, number, num_prompt_tokens, num_output_tokens, session

    def _wanted(self, lines: CsvLines, bad: BadLines) -> list[tuple[int, str]]:
        """Return the columns to choose rows by, each with its value."""
        chosen = ((_MODEL, self.model), (_LOG, self.log_type))
        wanted = []
        for name, value in chosen:
            if value is None:
                continue
            if name not in lines.positions:
                csv_lines(self.path, (name,), bad)  # says that it is missing
            wanted.append((lines.positions[name], value))
        return wanted


def _problem(texts: Sequence[str]) -> str:
    time_text, prompt_text, output_text = texts
    failed = prompt_text == output_text == "0"
    problem = (
        (not failed and column_length_problem(_PROMPT, prompt_text))
        or (output_text != "0" and column_length_problem(_OUTPUT, output_text))
        or seconds_problem(_TIME, time_text)
    )
    assert problem
    return problem


def _with_sessions(rows: list[_Row]) -> Iterator[RequestSpec]:
    first_s = rows[0][0]
    return sharing_specs(
        [row[0] - first_s for row in rows],
        own_prompts(row[2] for row in rows),
        [row[3] for row in rows],
        session_numbers([row[4] or None for row in rows]),
    )


@dataclass(frozen=True, slots=True)
class BurstGptTraceWriter:
    """Writer of BurstGPT's newer format: times, lengths and session ids.

    ``Elapsed time`` stays empty. As in the published file, requests with a session are
    a ``Conversation log`` and others an ``API log``.

    Parameters
    ----------
    model
        Value of ``Model`` of all requests.

    Raises
    ------
    WorkloadError
        If it is no text, or not all of it can be in a line of a file.
    """

    model: str = "unknown"

    def __post_init__(self) -> None:
        words = self.model.split() if isinstance(self.model, str) else [""]
        if not all(word.isprintable() for word in words) or words == [""]:
            raise WorkloadError(
                f"model must be printable text; got {self.model!r}; give a name"
            )

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        return losses(requests, kept=("sessions",))

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        model = self.model
        if any(character in model for character in ',"\r\n'):
            model = '"' + " ".join(model.split()).replace('"', '""') + '"'
        yield ",".join(_HEADER) + "\n"
        for request in requests:
            prompt, output = request.num_prompt_tokens, request.num_output_tokens
            session, log = "", "API log"
            if request.session_id is not None:
                session, log = str(request.session_id), "Conversation log"
            lengths = f"{prompt},{output},{prompt + output}"
            yield f"{request.arrival_s!r},{session},,{model},{lengths},{log}\n"
