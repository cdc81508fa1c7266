"""Whatever a file holds, a reader answers with requests or with a `WorkloadError`."""

from __future__ import annotations

import gzip
import io
import json
import math
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cli.main import run as kvsim
from tests.workloads.traces.samples import SAMPLES, read
from workloads import RequestSpec, WorkloadError
from workloads.traces import guess_kind

if TYPE_CHECKING:
    from pathlib import Path

kinds = pytest.mark.parametrize("kind", sorted(SAMPLES))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace.txt"


odd_numbers = st.sampled_from(
    [0, -1, 1, 2, 1.5, -0.0, 1e300, 10**9 + 1, 10**18, 10**19, 10**400, math.nan]
)
odd_values = st.recursive(
    odd_numbers | st.none() | st.booleans() | st.text(max_size=3) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)
odd_fields = odd_numbers.map(str) | st.sampled_from(
    [
        "",
        " ",
        "nan",
        "inf",
        "1_0",
        "0x1",
        "\u0663",
        '"',
        '"a',
        "\0",
        "1e5",
        "+1",
        "9" * 99,
    ]
)
odd_bytes = st.sampled_from(
    [b"\0", b"\xff", b"\n", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"9", b"e"]
) | st.binary(max_size=3)


@st.composite
def cut_and_mixed(draw: st.DrawFn, text: str) -> bytes:
    """Bytes of a file in which some are replaced, removed or put in."""
    data = bytearray(text.encode())
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 1, 2, 30])))
        data[start:end] = draw(odd_bytes)
    return bytes(data[: draw(st.integers(0, len(data)) | st.just(len(data)))])


def replaced(value: Any, draw: st.DrawFn) -> Any:
    """Return a JSON value in which something, at some depth, is something else."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if draw(st.booleans()) else rest | {key: replaced(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], replaced(value[place], draw), *value[place + 1 :]]
    return draw(odd_values)


@st.composite
def wrong_values(draw: st.DrawFn, text: str) -> bytes:
    """A file with the right structure and one value that is another."""
    if "\n{" in text.rstrip() and not text.startswith("["):  # JSON lines
        lines = text.splitlines()
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] = json.dumps(replaced(json.loads(lines[place]), draw))
        return "\n".join(lines).encode()
    if text.startswith(("[", "{")):
        return json.dumps(replaced(json.loads(text), draw), indent=1).encode()
    lines = text.splitlines()
    place = draw(st.integers(0, len(lines) - 1))
    fields = lines[place].split(",")
    fields[draw(st.integers(0, len(fields) - 1))] = draw(odd_fields)
    lines[place] = ",".join(fields)
    return "\n".join(lines).encode()


@st.composite
def packed(draw: st.DrawFn, text: str) -> bytes:
    """A compressed file, cut short or with a wrong byte."""
    data = text.encode()
    if draw(st.booleans()):
        data = gzip.compress(data)
    else:
        data = pa.compress(data, "zstd", asbytes=True)
    place = draw(st.integers(0, len(data) - 1))
    if draw(st.booleans()):
        return data[:place]
    return data[:place] + draw(st.binary(min_size=1, max_size=2)) + data[place + 1 :]


def contents(kind: str) -> st.SearchStrategy[bytes]:
    text = SAMPLES[kind]
    return st.one_of(
        cut_and_mixed(text), wrong_values(text), packed(text), st.binary(max_size=60)
    )


def check_contract(requests: list[RequestSpec]) -> None:
    latest_s = 0.0
    for position, request in enumerate(requests):
        assert request.request_id == position
        assert latest_s <= request.arrival_s < math.inf
        assert request.num_output_tokens >= 1
        assert all(segment >= 0 and num >= 1 for segment, num in request.prompt)
        assert request.num_prompt_tokens >= 1
        assert request.previous_id is None or 0 <= request.previous_id < position
        assert 0 <= request.delay_s < math.inf
        latest_s = request.arrival_s


@kinds
@settings(max_examples=80)
@given(data=st.data())
def test_every_reader_answers(kind: str, path: Path, data: st.DataObject) -> None:
    path.write_bytes(data.draw(contents(kind)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for skip in (False, True):
            with suppress(WorkloadError):
                check_contract(read(kind, path, skip_bad_lines=skip))
        with suppress(WorkloadError):
            assert guess_kind(path) in SAMPLES


def refusal(kind: str, path: Path) -> str:
    """Return what a reader says of a file it refuses, or nothing."""
    try:
        read(kind, path)
    except WorkloadError as error:
        return str(error)
    return ""


@kinds
@settings(max_examples=40)
@given(data=st.data())
def test_refusals_name_the_file_in_one_line(
    kind: str, path: Path, data: st.DataObject
) -> None:
    path.write_bytes(data.draw(contents(kind)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = refusal(kind, path)
    assert "\n" not in line
    assert line == "" or line.startswith(f"{path}:")
    assert len(line) < 2 * len(str(path)) + 500


@kinds
@settings(max_examples=15)
@given(data=st.data())
def test_no_traceback_on_the_command_line(
    kind: str, path: Path, data: st.DataObject
) -> None:
    path.write_bytes(data.draw(contents(kind)))
    out = path.parent / "out.jsonl"
    command = ["workload", "convert", str(path), "--from", kind, "--to", "kvsim"]
    command += ["--out", str(out), "--overwrite", "--quiet"]
    if kind == "sharegpt":
        command += ["--set", "tokens_per_character=0.25"]
    with redirect_stderr(io.StringIO()) as errors, redirect_stdout(io.StringIO()):
        status = kvsim(command)  # raises for a fault of ours
    refused = [
        line
        for line in errors.getvalue().splitlines()
        if not line.startswith("kvsim: warning: ")
    ]
    assert (status, len(refused)) in ((0, 0), (2, 1))
