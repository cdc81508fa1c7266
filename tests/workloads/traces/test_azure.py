from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from tests.workloads.shared_traces import AZURE_CODE, AZURE_CONV, shared_trace
from workloads import RequestSpec, TraceFormatError, WorkloadWarning
from workloads.traces import AzureTraceReader

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:15:46.6805900"


def read(folder: Path, *lines: str, header: str = HEADER) -> list[RequestSpec]:
    path = folder / "trace.csv"
    path.write_text("\n".join([header, *lines, ""]))
    return list(AzureTraceReader(path=path).read())


def test_literal(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-17 00:00:00.0000001,879,55",
    )
    assert requests == [
        RequestSpec(0, 0.0, ((0, 374),), 44, 1),
        RequestSpec(1, 4.314579, ((2, 396),), 109, 3),
        RequestSpec(2, 20653.3194101, ((4, 879),), 55, 5),
    ]


def test_ticks_are_exact(tmp_path: Path) -> None:
    # As floats since 1970 these two would be one and the same instant.
    requests = read(
        tmp_path, "2023-11-16 18:15:46.0000000,1,1", "2023-11-16 18:15:46.0000001,1,1"
    )
    assert requests[1].arrival_s == 1e-7


@pytest.mark.parametrize(
    ("text", "arrival_s"),
    [
        ("2023-11-16 18:15:00", 0),
        ("2023-11-16 18:15:01.5", 1.5),
        ("2023-11-16 18:15:59.9999999", 59.9999999),
        ("2023-11-16T18:16:00.25", 60.25),
        ("2023-11-16 18:15:07.009930+00:00", 7.00993),
        ("2023-11-16 18:15:07.009930Z", 7.00993),
        ("2024-02-29 18:15:00.0000000", 105 * 86_400.0),
    ],
)
def test_timestamps(text: str, arrival_s: float, tmp_path: Path) -> None:
    requests = read(tmp_path, "2023-11-16 18:15:00.0000000,1,1", f"{text},1,1")
    assert requests[1].arrival_s == arrival_s


def test_columns_by_name(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        '7,"a, b","2023-11-16 18:15:46.0000000",5',
        header='GeneratedTokens,note,TIMESTAMP,"ContextTokens"',
    )
    assert requests == [RequestSpec(0, 0.0, ((0, 5),), 7, 1)]


@pytest.mark.parametrize(
    ("header", "missing"),
    [
        ("TIMESTAMP,ContextTokens", "GeneratedTokens"),
        ("timestamp,ContextTokens,GeneratedTokens", "TIMESTAMP"),
        ("arrived_at,num_prefill_tokens", "TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("2023-11-16 18:15:46.6805900,374,44", "TIMESTAMP, ContextTokens"),
    ],
)
def test_missing_columns(header: str, missing: str, tmp_path: Path) -> None:
    rule = rf"trace\.csv:1: columns must include {missing}.*; got '{header}'; rename"
    with pytest.raises(TraceFormatError, match=rule):
        read(tmp_path, header=header)


@pytest.mark.parametrize("name", HEADER.split(","))
def test_columns_twice(name: str, tmp_path: Path) -> None:
    rule = rf"trace\.csv:1: columns must differ; got {name} twice; rename or remove"
    for twice in (f"{HEADER},{name}", f'{HEADER}," {name} "'):
        with pytest.raises(TraceFormatError, match=rule):
            read(tmp_path, header=twice)


def test_other_columns_may_come_twice_and_hold_commas(tmp_path: Path) -> None:
    header = f'note,"a, b",{HEADER},note'
    (request,) = read(tmp_path, f"x,y,{GOOD},374,44,z", header=header)
    assert request == RequestSpec(0, 0.0, ((0, 374),), 44, 1)


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match=r"trace\.csv: .*one request; got none"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f"{GOOD},0,44", "ContextTokens must be a whole number from 1 .*; got 0"),
        (f"{GOOD},374,0", "GeneratedTokens must be a whole number from 1 .*; got 0"),
        (f"{GOOD},-3,44", "ContextTokens must be .*; got -3"),
        (f"{GOOD},374,4.5", "GeneratedTokens must be .*; got '4.5'"),
        (f"{GOOD},374,44.0", "GeneratedTokens must be .*; got '44.0'"),
        (f"{GOOD},nan,44", "ContextTokens must be .*; got 'nan'"),
        (f"{GOOD},,44", "ContextTokens must be .*; got ''"),
        (f"{GOOD},many,44", "ContextTokens must be .*; got 'many'"),
        (f"{GOOD},1e3,44", "ContextTokens must be .*; got '1e3'"),
        (f"{GOOD},2000000000,44", "ContextTokens must be .*; got 2000000000"),
        (f"{GOOD},{'9' * 5000},44", "ContextTokens must be "),
        (f"{GOOD},1_000,44", "ContextTokens must be .*; got '1_000'"),
        (f"{GOOD},374,+5", r"GeneratedTokens must be .*; got '\+5'"),
        (f"{GOOD},374, 5", "GeneratedTokens must be .*; got ' 5'"),
        (f"{GOOD},\u0661\u0662,44", "ContextTokens must be .*; got '\u0661\u0662'"),
        (f"{GOOD},374,\uff14", "GeneratedTokens must be .*; got '\uff14'"),
        (f"{GOOD},\u00b2,44", "ContextTokens must be .*; got '\u00b2'"),
        (f'{GOOD},"{"9" * 200_000}",44', "a line must be plain CSV; got .*larger"),
        (f'{GOOD},"5,5', "a line must have 3 fields"),
        (f"{GOOD},374", "a line must have 3 fields; got "),
        ("2023-11-", "a line must have 3 fields; got '2023-11-'"),
        (",374,44", "TIMESTAMP must be a time such as .*; got ''"),
        ("NaN,374,44", "TIMESTAMP must be .*; got 'NaN'"),
        ("1700158546.68,374,44", "TIMESTAMP must be .*; got '1700158546.68'"),
        ("2023-13-16 18:15:46.68,374,44", "TIMESTAMP must be"),
        ("2023-02-29 18:15:46.68,374,44", "TIMESTAMP must be"),
        ("2023-11-16 24:15:46.68,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:60:46.68,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15:60.0000000,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15:+6.6805900,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15:46.66_5900,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15:46.68059001,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15:46.,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15:4,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15-46.6805900,374,44", "TIMESTAMP must be"),
        ("2023-11-16 18:15:46.6805900+01:00,374,44", "TIMESTAMP must be"),
        ("20231116T181500Z:00,374,44", "TIMESTAMP must be"),
    ],
)
def test_bad_lines(line: str, problem: str, tmp_path: Path) -> None:
    rule = rf"trace\.csv:3: {problem}.*; (mend|the file)"
    with pytest.raises(TraceFormatError, match=rule) as info:
        read(tmp_path, f"{GOOD},1,1", line, f"{GOOD},1,1")
    assert "\n" not in str(info.value)
    assert len(str(info.value)) < len(str(tmp_path)) + 400


class Published(NamedTuple):
    """A row of the table that was published with the traces."""

    name: str
    num_requests: int
    span_s: float
    rate: float
    gaps_cv: float
    prompt_mean: float
    prompt_max: int
    output_mean: float
    output_max: int


@pytest.mark.parametrize(
    "trace",
    [
        Published(AZURE_CODE, 8_819, 3435.9, 2.566, 13.2, 2047.8, 7437, 27.9, 1899),
        Published(AZURE_CONV, 19_366, 3501.7, 5.530, 1.09, 1154.7, 14050, 211.1, 1000),
    ],
    ids=lambda trace: trace.name,
)
def test_published_traces(trace: Published) -> None:
    requests = list(AzureTraceReader(path=shared_trace(trace.name)).read())
    gaps_s = np.diff([request.arrival_s for request in requests])
    prompt_tokens = np.array([request.num_prompt_tokens for request in requests])
    output_tokens = np.array([request.num_output_tokens for request in requests])
    last_s = requests[-1].arrival_s
    assert len(requests) == trace.num_requests
    assert last_s == pytest.approx(trace.span_s, abs=0.05)
    assert len(requests) / last_s == pytest.approx(trace.rate, abs=0.001)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(trace.gaps_cv, rel=0.005)
    assert prompt_tokens.mean() == pytest.approx(trace.prompt_mean, abs=0.05)
    assert prompt_tokens.max() == trace.prompt_max
    assert output_tokens.mean() == pytest.approx(trace.output_mean, abs=0.05)
    assert output_tokens.max() == trace.output_max
    segments = {segment for request in requests for segment, _ in request.prompt}
    assert len(segments) == trace.num_requests


def test_the_week_of_2024(tmp_path: Path) -> None:
    # As in the published file: UTC, microseconds, and none in whole seconds.
    path = tmp_path / "code_1week.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01+00:00,7,8\n"
        "2024-05-19 23:59:59.999999+00:00,9,10\n"
    )
    assert list(AzureTraceReader(path=path).read()) == [
        RequestSpec(0, 0.0, ((0, 2162),), 5, 1),
        RequestSpec(1, 0.99007, ((2, 7),), 8, 3),
        RequestSpec(2, 863999.990069, ((4, 9),), 10, 5),
    ]


def test_skipping_changes_nothing_where_nothing_is_bad(tmp_path: Path) -> None:
    path = shared_trace(AZURE_CODE)
    plain = AzureTraceReader(path=path).read().columns
    skipping = AzureTraceReader(path=path, skip_bad_lines=True).read().columns
    assert (plain.arrival_s == skipping.arrival_s).all()
    cut = tmp_path / "cut.csv"
    cut.write_text(path.read_text() + "\n2023-11-16 19:14:21,5\n")
    with pytest.warns(WorkloadWarning, match=r":8821: a line must have 3 fields"):
        less = AzureTraceReader(path=cut, skip_bad_lines=True).read().columns
    assert (plain.num_prompt_tokens == less.num_prompt_tokens).all()
