"""Files that are none, values at the ends of their range, and nothing that is left."""

from __future__ import annotations

import gzip
import os
import warnings
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from tests.workloads.traces.samples import FIRST_LINE, SAMPLES, read, write
from workloads import TraceFormatError, WorkloadError, WorkloadWarning
from workloads.draws.streams import Streams
from workloads.traces import (
    BurstGptTraceWriter,
    KvsimTraceWriter,
    guess_kind,
    write_trace,
)
from workloads.traces.parsing.values import MAX_SESSION_ID, session_numbers
from workloads.transforms.sampling import MAX_WIDTH
from workloads.transforms.superposition import superposed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, "zstd", asbytes=True)
    return packed


BENCH = """{"start_times": [0.0, -1.0, 2.0], "input_lens": [5, 5, 5],
"output_lens": [4, 0, 3], "errors": ["", "Timeout", ""]}"""


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_pipes_are_not_read(kind: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for reading in (lambda: read(kind, pipe), lambda: guess_kind(pipe)):
        with pytest.raises(WorkloadError, match="a pipe or device, which cannot"):
            reading()


def test_pipes_and_devices_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    requests = read("vidur", write(tmp_path, SAMPLES["vidur"]))
    with pytest.raises(WorkloadError, match="is a pipe or device"):
        write_trace(pipe, requests, KvsimTraceWriter(), overwrite=True)
    assert pipe.is_fifo()


@pytest.mark.parametrize("kind", sorted(FIRST_LINE))
def test_where_no_line_is_left_the_reason_is_said(kind: str, tmp_path: Path) -> None:
    header = SAMPLES[kind].splitlines()[: FIRST_LINE[kind] - 1]
    path = write(tmp_path, "\n".join([*header, "broken", "broken"]))
    with (
        pytest.warns(
            WorkloadWarning, match=f"left out 2 malformed .*:{len(header) + 1}"
        ),
        pytest.raises(TraceFormatError, match="needs at least one request; got none"),
    ):
        read(kind, path, skip_bad_lines=True)


def test_where_all_failed_it_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, "Timestamp,Request tokens,Response tokens\n1,2,0\n2,3,0\n")
    with (
        pytest.warns(WorkloadWarning, match="2 requests without a response"),
        pytest.raises(TraceFormatError, match="needs at least one request; got none"),
    ):
        read("burstgpt", path)


def test_a_failure_that_is_malformed_is_counted_once(tmp_path: Path) -> None:
    path = write(tmp_path, BENCH)
    with pytest.warns(WorkloadWarning) as caught:
        kept = read("vllm_bench", path, failures="keep", skip_bad_lines=True)
    assert len(kept) == 2
    (warning,) = caught
    assert "left out 1 malformed line" in str(warning.message)
    with pytest.warns(WorkloadWarning, match="1 requests without a response") as caught:
        assert len(read("vllm_bench", path)) == 2
    assert len(caught) == 1


def test_hashes_of_64_bits_survive(tmp_path: Path) -> None:
    line = '{{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [{}]}}'
    requests = read("mooncake", write(tmp_path, line.format(2**64 - 1)))
    assert requests[0].prompt == ((2 * (2**64 - 1), 5),)
    copies = superposed(requests, 3, Streams(0))
    write_trace(tmp_path / "copies", copies, KvsimTraceWriter())
    assert read("kvsim", tmp_path / "copies") == list(copies)
    with pytest.raises(TraceFormatError, match=r":1: hash_ids must be .* of 64 bits"):
        read("mooncake", write(tmp_path, line.format(2**64)))


def test_large_session_ids_survive(tmp_path: Path) -> None:
    line = '{{"timestamp": {}, "input_length": 5, "output_length": 5, "hash_ids": [0]'
    line += ', "session_id": "{}"}}\n'
    ids = [7, MAX_SESSION_ID - 4]
    path = write(tmp_path, "".join(line.format(i, id_) for i, id_ in enumerate(ids)))
    requests = read("mooncake", path)
    assert [request.session_id for request in requests] == ids
    copies = superposed(requests, 3, Streams(0))
    found = [request.session_id for request in copies]
    assert sorted(map(int, map(str, found))) == [7, *range(ids[1], ids[1] + 5)]
    assert session_numbers([str(MAX_SESSION_ID + 1)]) == [0]


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    text = '{"kvsim_requests": 1}\n{"arrival_s": 0, "prompt": 3, '
    text += '"num_output_tokens": 4, "slo_class": "%s"}\n'
    with pytest.raises(TraceFormatError, match=":2: slo_class must be text"):
        read("kvsim", write(tmp_path, text % "\\ud800"))
    whole = read("kvsim", write(tmp_path, text % "\\ud83d\\ude00"))
    assert whole[0].slo_class == "\U0001f600"


@pytest.mark.parametrize("model", ["\0", "\ud800", "a\x1bb", 3])
def test_models_that_no_line_can_hold(model: str) -> None:
    with pytest.raises(WorkloadError, match="model must be printable text"):
        BurstGptTraceWriter(model=model)


def test_nothing_is_reported_of_good_files(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, text in SAMPLES.items():
            read(kind, write(tmp_path, text), skip_bad_lines=True)


def test_samples_as_many_as_may_be_drawn(tmp_path: Path) -> None:
    text = '{"kvsim_requests": 1}\n{"arrival_s": 0, "prompt": 3, '
    text += '"num_output_tokens": 4, "best_of": %d}\n'
    assert read("kvsim", write(tmp_path, text % MAX_WIDTH))[0].best_of == MAX_WIDTH
    with pytest.raises(TraceFormatError, match=r"best_of must .* from 1 to 256"):
        read("kvsim", write(tmp_path, text % (MAX_WIDTH + 1)))


@pytest.mark.parametrize("kind", sorted(SAMPLES))
@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_members_one_after_another(
    kind: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    text = SAMPLES[kind].encode()
    whole = read(kind, write(tmp_path, text))
    half = len(text) // 2
    parts = pack(text[:half]) + pack(b"") + pack(text[half:])
    assert read(kind, write(tmp_path, parts)) == whole
    for more in (b"junk", pack(b"\n" * 9)[:-3]):
        with pytest.raises(TraceFormatError, match="data must be whole"):
            read(kind, write(tmp_path, parts + more))
