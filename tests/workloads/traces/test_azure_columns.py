"""Whole columns are read as the careful parser reads them, or not at all."""

from __future__ import annotations

import gzip
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads.shared_traces import AZURE_CODE, AZURE_CONV, shared_trace
from workloads import TraceFormatError, WorkloadError
from workloads.traces import AzureTraceReader, azure, azure_columns

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:15:46.6805900,374,44"


def table(path: Path) -> azure_columns.AzureTable | None:
    """Return a file with a good header of three fields, read by whole columns."""
    minute_ticks = azure._minute_ticks
    return azure_columns.plain_table(path, 3, (0, 1, 2), minute_ticks)


def outcome(path: Path, by_columns: bool = True) -> Any:
    """Requests or error, and the warnings, of one way to read."""
    way: Any = nullcontext()
    if not by_columns:
        way = mock.patch.object(azure, "plain_table", return_value=None)
    with way, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Any = list(AzureTraceReader(path).read())
        except WorkloadError as error:
            result = (type(error), str(error))
    return result, [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("azure") / "trace.csv"


@st.composite
def timestamps(draw: st.DrawFn) -> str:
    date = draw(st.datetimes().filter(lambda at: at.year > 999))
    digits = draw(st.integers(0, 7))
    fraction = f".{draw(st.integers(0, 10**digits - 1)):0{digits}d}" if digits else ""
    between = draw(st.sampled_from(" T"))
    zone = draw(st.sampled_from(["", "", "Z", "+00:00"]))
    return f"{date:%Y-%m-%d}{between}{date:%H:%M:%S}{fraction}{zone}"


tokens = st.one_of(st.integers(1, 9), st.integers(1, 10**9)).map(str)
tokens |= st.integers(1, 99).map(lambda n: f"{n:05d}")
plain_lines = st.builds("{},{},{}".format, timestamps(), tokens, tokens)
line_ends = st.sampled_from(["\n", "\r\n"])


@given(
    st.lists(plain_lines, min_size=1, max_size=8),
    line_ends,
    st.sampled_from(["", "\n", "\r\n", " ", "\n\n", "\r\n \t\r\n", "\n" * 50]),
    st.integers(120, 400),
)
def test_plain_files_are_read_by_columns(
    path: Path, lines: list[str], end: str, last_end: str, block_bytes: int
) -> None:
    text = end.join([HEADER, *lines]) + last_end
    path.write_bytes(text.encode())
    with mock.patch.object(azure_columns, "_BLOCK_BYTES", block_bytes):
        assert table(path) is not None
        assert outcome(path) == outcome(path, by_columns=False)


# Nearly right: pieces that come by mistake, and pieces that int() and others take.
odd_pieces = st.sampled_from(
    [
        *["", "0", "6", "9", "-", "+", ".", ":", "T", "Z", "_", " ", ",", '"', "e"],
        *["\n", "\r", "\t", "\0", "\x1c", "\x85", "é", "\u0663", "\uff14", "\ufeff"],
        *["+00:00", "+01:00", "00", "24", "60", "\n\n", "\n ", "1000000001"],
    ]
)


@st.composite
def odd_texts(draw: st.DrawFn) -> str:
    end = draw(line_ends)
    text = end.join([HEADER, *draw(st.lists(plain_lines, min_size=1, max_size=4)), ""])
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = start + draw(st.integers(0, 2))
        text = text[:start] + draw(odd_pieces) + text[stop:]
    return text


@given(odd_texts(), st.integers(100, 400))
def test_nothing_else_is_accepted_and_nothing_else_is_said(
    path: Path, text: str, block_bytes: int
) -> None:
    path.write_bytes(text.encode())
    with mock.patch.object(azure_columns, "_BLOCK_BYTES", block_bytes):
        assert outcome(path) == outcome(path, by_columns=False)


@given(st.binary(max_size=40), st.integers(0, 80))
def test_bytes_of_any_kind(path: Path, odd: bytes, position: int) -> None:
    text = "\n".join([HEADER, GOOD, GOOD, ""]).encode()
    path.write_bytes(text[:position] + odd + text[position:])
    assert outcome(path) == outcome(path, by_columns=False)


@pytest.mark.parametrize(
    "line",
    [
        GOOD.replace("18:15", "18:60"),
        GOOD.replace("11-16", "02-30"),
        GOOD.replace(":46", ":60"),
        GOOD.replace(" 18", "_18"),
        GOOD.replace("46.", "46,"),
        GOOD.replace("46.6805900", "46.68059000"),
        GOOD.replace("46.6805900", "46."),
        GOOD.replace("46.6805900", "46.6805900Z+00:00"),
        GOOD.replace("46.6805900", "46.6805900+00:00Z"),
        GOOD.replace("46.6805900", "46+00:00+00:00"),
        GOOD.replace("374", "0"),
        GOOD.replace("374", "1000000001"),
        GOOD.replace("374", "00000000374"),
        GOOD.replace("374", ""),
        GOOD.replace("374", "+374"),
        GOOD.replace("374", '"374"'),
        GOOD.replace(",44", ""),
        GOOD + ",1",
        GOOD + " ",
        GOOD + "\r",
        GOOD + "\n",
        GOOD.encode("utf-16").decode("latin-1"),
        "",
        "x" * 3000,
    ],
)
def test_what_is_not_plain_is_left_to_the_careful_parser(path: Path, line: str) -> None:
    path.write_bytes("\r\n".join([HEADER, GOOD, line, GOOD, ""]).encode())
    with mock.patch.object(azure_columns, "_BLOCK_BYTES", 1000):
        assert table(path) is None
    assert outcome(path) == outcome(path, by_columns=False)


@pytest.mark.parametrize(
    "odd", ["x", " ", "0", "9", "+", "-", ":", ".", "Z", "\0", "/"]
)
def test_every_character_of_a_line_counts(path: Path, odd: str) -> None:
    zoned = GOOD.replace(",374", "+00:00,374")
    for line in (GOOD, zoned):
        for i in range(len(line)):
            text = f"{HEADER}\n{GOOD}\n{line[:i]}{odd}{line[i + 1 :]}\n"
            path.write_bytes(text.encode())
            assert outcome(path) == outcome(path, by_columns=False), text


TIME = "2023-11-16 18:15:46.6805900"


@pytest.mark.parametrize(
    ("header", "lines"),
    [
        # One field in quotes: later fields are not where the commas say.
        ("a,b," + HEADER, [f'"x,y",{TIME},374,44']),
        ("a," + HEADER, [f'x",{TIME},374,44', f'"x,{TIME},374,44']),
        ('"a,b",c,' + HEADER, [f"x,y,{TIME},374,44", f"x,y,{TIME},374,44,z"]),
        # One line too long, one too short, and together as many fields as in two.
        (HEADER + ",a", [f"{TIME},374,44,x,{TIME}", "374,44,x"]),
        # No UTF-8, and UTF-8 that looks like white space, in fields that are not read.
        (HEADER + ",a", [f"{TIME},374,44,\udcff"]),
        (HEADER + ",a", [f"{TIME},374,44,\u2028", f"{TIME},374,44,é"]),
        (HEADER + ",a", [f"{TIME},374,44,\r\r", f"{TIME},374,44,\0"]),
        # Blank lines before the header, and a byte-order mark.
        ("\n" + HEADER, [GOOD, GOOD]),
        ("\ufeff" + HEADER, [GOOD, "", GOOD]),
    ],
)
def test_beside_the_columns(path: Path, header: str, lines: list[str]) -> None:
    text = "\n".join([header, *lines, ""])
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert outcome(path) == outcome(path, by_columns=False)


def test_early_rows_after_blank_lines(path: Path) -> None:
    early = GOOD.replace("18:15", "17:15")
    path.write_text("\n".join([HEADER, GOOD, "", GOOD, early, early]))
    (_, warned) = outcome(path)
    assert warned == [
        f"{path}:5: timestamps must not fall; 2 of 4 rows are earlier than one before "
        "them; sorted by time"
    ]
    path.write_text("\n".join([HEADER, GOOD, GOOD, early, early]))
    assert table(path) is not None
    assert outcome(path) == outcome(path, by_columns=False)
    assert outcome(path)[1][0].startswith(f"{path}:4: timestamps must not fall; 2 of 4")


def test_an_error_beyond_the_first_block_names_its_line(path: Path) -> None:
    path.write_text("\n".join([HEADER, *[GOOD] * 50_000, "broken"]))
    with pytest.raises(TraceFormatError, match=r"trace\.csv:50002: a line must have 3"):
        AzureTraceReader(path).read()


def test_more_than_a_block(path: Path) -> None:
    path.write_text("\n".join([HEADER, *[GOOD] * 50_000]))
    assert path.stat().st_size > azure_columns._BLOCK_BYTES
    requests = AzureTraceReader(path).read().columns
    assert len(requests) == 50_000
    assert set(requests.num_prompt_tokens.tolist()) == {374}


@pytest.mark.parametrize("cut", [None, 40, -8])
def test_gzip_whole_and_broken(path: Path, cut: int | None) -> None:
    text = "\n".join([HEADER, *[GOOD] * 9]).encode()
    path.write_bytes(gzip.compress(text)[:cut])
    assert (table(path) is None) == (cut is not None)
    assert outcome(path) == outcome(path, by_columns=False)


def test_columns_in_any_order_beside_others(path: Path) -> None:
    header = "GeneratedTokens,note,TIMESTAMP,,ContextTokens,note"
    lines = [
        f"44,{note},2023-11-16 18:15:4{i},x,374,{note}"
        for i, note in enumerate(["", " a", "\t"])
    ]
    path.write_text("\n".join([header, *lines]))
    plain = azure_columns.plain_table(path, 6, (2, 4, 0), azure._minute_ticks)
    assert plain is not None
    (requests, _) = outcome(path)
    assert [spec.num_prompt_tokens for spec in requests] == [374] * 3
    assert (requests, []) == outcome(path, by_columns=False)


def test_centuries_apart_no_digit_is_lost(path: Path) -> None:
    # More ticks than a float holds exactly.
    path.write_text(
        f"{HEADER}\n1900-01-01 00:00:00.0000000,1,1\n1999-06-07 08:09:10.1234567,1,1\n"
    )
    days = 36_316  # 99 years, 24 of them leap, and 157 days
    ticks = (days * 86_400 + 8 * 3600 + 9 * 60 + 10) * 10**7 + 1_234_567
    assert ticks > 2**53
    requests, _ = outcome(path)
    assert requests[1].arrival_s == ticks / 10**7
    assert (requests, []) == outcome(path, by_columns=False)


@pytest.mark.parametrize("name", [AZURE_CONV, AZURE_CODE])
def test_published_traces(name: str) -> None:
    trace = shared_trace(name)
    assert table(trace) is not None
    assert outcome(trace) == outcome(trace, by_columns=False)
