from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from tests.shared import shared
from tests.workloads.traces.samples import SAMPLES, SHAREGPT, VLLM_BENCH, write
from workloads import TRACE_READERS, TraceFormatError, WorkloadError
from workloads.traces import guess_kind

if TYPE_CHECKING:
    from pathlib import Path

# A table's columns have any names.
kinds = pytest.mark.parametrize("kind", sorted(TRACE_READERS.keys() - {"table"}))


@kinds
def test_every_format_is_told_by_its_content(kind: str, tmp_path: Path) -> None:
    text = SAMPLES[kind]
    assert guess_kind(write(tmp_path, text, "kvsim.csv")) == kind
    assert guess_kind(write(tmp_path, "\n" + text.replace("\n", "\r\n"))) == kind
    assert guess_kind(write(tmp_path, gzip.compress(text.encode()))) == kind
    assert guess_kind(write(tmp_path, b"\xef\xbb\xbf" + text.encode())) == kind


def test_json_over_several_lines_and_on_one(tmp_path: Path) -> None:
    for kind, text in (("vllm_bench", VLLM_BENCH), ("sharegpt", SHAREGPT)):
        for indent in (None, 2):
            content = json.dumps(json.loads(text), indent=indent)
            assert guess_kind(write(tmp_path, content)) == kind
    lines = "\n".join(map(json.dumps, json.loads(SHAREGPT)))
    assert guess_kind(write(tmp_path, lines)) == "sharegpt"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "got '', which looks like no known format"),
        (
            "time,prompt,output\n1,2,3\n",
            "got 'time,prompt,output', which looks like no",
        ),
        ("Timestamp,ContextTokens,GeneratedTokens\n", "like no known format"),
        ("{}", "like no known format"),
        ("[]", "like no known format"),
        ("[3]", "like no known format"),
        ('{"hash_ids": [', "like no known format"),
        (
            '{"input_length": 1, "output_length": 1, "hash_ids": [0], "messages": []}',
            "like mooncake and sharegpt",
        ),
    ],
)
def test_unsure(text: str, problem: str, tmp_path: Path) -> None:
    rule = rf"trace\.txt: a trace's format must be plain; .*{problem}.*; name its kind"
    with pytest.raises(WorkloadError, match=rule) as info:
        guess_kind(write(tmp_path, text))
    assert all(kind in str(info.value) for kind in TRACE_READERS)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="a trace must exist"):
        guess_kind(tmp_path / "nowhere.csv")
    with pytest.raises(TraceFormatError, match="UTF-8"):
        guess_kind(write(tmp_path, b"\x93NUMPY"))


def test_published_files() -> None:
    for name, kind in (
        ("azure_llm_2023_conv.csv", "azure"),
        ("mooncake_fast25_conversation.jsonl", "mooncake"),
        ("llmservingsim_sharegpt_llama31_300_sps10.jsonl.gz", "llmservingsim"),
    ):
        assert guess_kind(shared(f"traces/{name}")) == kind
