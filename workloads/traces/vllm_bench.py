"""Results of ``vllm bench serve --save-detailed``: its requests and their times."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any

from workloads.errors import TraceFormatError
from workloads.traces.parsing.files import (
    BadLines,
    FailureRule,
    Failures,
    broken,
    check_rule,
    format_error,
    not_utf8,
    opened,
    trace_path,
)
from workloads.traces.parsing.requests import own_text_requests
from workloads.traces.parsing.values import MAX_SECONDS, length_problem, time_problem
from workloads.traces.writing import losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.requests.columns import SpecIterator
    from workloads.spec import RequestSpec
    from workloads.traces.parsing.requests import Row

_TIMES, _PROMPTS, _OUTPUTS = "start_times", "input_lens", "output_lens"
_KEYS = (_TIMES, _PROMPTS, _OUTPUTS)
_ERRORS = "errors"


@dataclass(frozen=True, slots=True)
class VllmBenchTraceReader:
    """Reader of a result of ``vllm bench serve`` with ``--save-detailed``.

    The result holds no prompt identity: each prompt is text of its own, so there is no
    prefix to reuse. Arrivals are when requests were sent, which with
    ``--max-concurrency`` depended on the server.

    Parameters
    ----------
    path
        JSON file of one result, plain or compressed (gzip, zstd).
    failures
        A request with an output length of 0 or an entry in ``errors`` failed: ``drop``
        leaves it out, ``keep`` gives it an output of one token. Either way a warning
        counts them.
    skip_bad_lines
        Leave malformed requests out with a warning, instead of refusing the first. What
        is no JSON is refused anyway.

    Raises
    ------
    WorkloadError
        If the path is neither text nor a path, or `failures` is unknown.

    Notes
    -----
    Read are ``start_times`` in seconds, ``input_lens``, ``output_lens`` and ``errors``.
    Older versions wrote no ``start_times``; such a result is refused.

    Source: vLLM, ``vllm/benchmarks/serve.py``.
    """

    path: str | Path
    failures: FailureRule = "drop"
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", trace_path(self.path))
        check_rule(self.failures)

    def read(self) -> SpecIterator:
        with (
            Failures(self.path, self.failures) as failures,
            BadLines(self.path, self.skip_bad_lines) as bad,
        ):
            return own_text_requests(self.path, self._rows(failures, bad))

    def _rows(self, failures: Failures, bad: BadLines) -> Iterator[Row]:
        text = _text(self.path)
        result = _result(self.path, text)
        line_number = _line_of(text, _TIMES)
        del text  # generated texts make it long
        errors = result.get(_ERRORS) or [""] * len(result[_TIMES])
        columns = (*(result[key] for key in _KEYS), errors)
        for index, row in enumerate(zip(*columns, strict=True)):
            time_s, num_prompt_tokens, num_output_tokens, error = row
            if failed := bool(error) or num_output_tokens == 0:
                num_output_tokens = 1
            problem = _problem(time_s, num_prompt_tokens, num_output_tokens)
            if problem and not (failed and not failures.keep):
                bad.refuse(line_number, f"request {index}: {problem}")
                continue
            if failed and not failures.is_kept(num_prompt_tokens):
                continue
            yield time_s, line_number, num_prompt_tokens, num_output_tokens


def _text(path: str | Path) -> str:
    try:
        with opened(path) as file:
            data = file.read()
    except (EOFError, zlib.error, OSError, ValueError) as error:
        raise broken(path, 1, error) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise format_error(path, line_number, not_utf8(error)) from None


def _result(path: str | Path, text: str) -> dict[str, Any]:
    if not text.strip():
        raise TraceFormatError(
            f"{path}: a trace needs a JSON object; got an empty file; check that it is "
            "complete"
        )
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        line_number = getattr(error, "lineno", 1)
        remedy = "the file may be cut short, or hold more than one result"
        problem = f"a result must be one JSON object; {str(error)[:80]}; {remedy}"
        raise format_error(path, line_number, problem) from None
    if wrong := _result_problem(result):
        raise format_error(path, 1, wrong)
    checked: dict[str, Any] = result
    return checked


def _result_problem(result: object) -> str | None:
    if not isinstance(result, dict):
        return (
            f"a result must be a JSON object; got {str(result)[:80]!r}; mend the file"
        )
    missing = [key for key in _KEYS if not isinstance(result.get(key), list)]
    if missing:
        rule = f"a result must have the lists {', '.join(missing)}"
        found = ", ".join(map(str, result))[:120]
        return f"{rule}; got {found!r}; run vllm bench serve with --save-detailed"
    errors = result.get(_ERRORS)
    lists = {key: result[key] for key in _KEYS}
    if errors is not None:
        if not isinstance(errors, list):
            return f"errors must be a list; got {str(errors)[:80]!r}; mend or remove it"
        lists |= {_ERRORS: errors} if errors else {}
    lengths = {key: len(value) for key, value in lists.items()}
    if len(set(lengths.values())) > 1:
        return f"lists must have one length; got {lengths}; mend the file"
    return None


def _line_of(text: str, key: str) -> int:
    return text.count("\n", 0, text.find(f'"{key}"')) + 1


def _problem(
    time_s: object, num_prompt_tokens: object, num_output_tokens: object
) -> str | None:
    return (
        time_problem(_TIMES, time_s, "seconds", MAX_SECONDS)
        or length_problem(_PROMPTS, num_prompt_tokens)
        or length_problem(_OUTPUTS, num_output_tokens)
    )


@dataclass(frozen=True, slots=True)
class VllmBenchTraceWriter:
    """Writer of the requests sent, as a result of ``vllm bench serve`` holds them.

    A server's times (``ttfts``, ``itls``, metrics) are not made up, so this is no
    complete result.
    """

    def losses(self, requests: Sequence[RequestSpec]) -> list[str]:
        return losses(requests, kept=())

    def lines(self, requests: Sequence[RequestSpec]) -> Iterator[str]:
        yield "{\n"
        yield f'"num_prompts": {len(requests)},\n'
        columns = (
            (_TIMES, (repr(request.arrival_s) for request in requests)),
            (_PROMPTS, (str(request.num_prompt_tokens) for request in requests)),
            (_OUTPUTS, (str(request.num_output_tokens) for request in requests)),
            (_ERRORS, ('""' for _ in requests)),
        )
        for key, values in columns:
            end = "" if key == _ERRORS else ","
            yield f'"{key}": [{", ".join(values)}]{end}\n'
        yield "}\n"
