from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.workloads.traces.samples import QWEN_BAILIAN, read, write
from workloads import RequestSpec, TraceFormatError
from workloads.traces import guess_kind

if TYPE_CHECKING:
    from pathlib import Path


def test_literal(tmp_path: Path) -> None:
    """Seconds, blocks of 16 tokens, and the chat that a request goes on from."""
    path = write(tmp_path, QWEN_BAILIAN)
    assert guess_kind(path) == "qwen_bailian"  # not mooncake, which counts ms
    expected = [
        RequestSpec(0, 0.0, ((2, 16), (4, 16), (6, 1)), 5, 1, session_id=7),
        RequestSpec(1, 1.5, ((2, 16),), 6, 3, session_id=4),
        RequestSpec(2, 60.614, ((2, 16), (4, 16), (18, 8)), 7, 5, session_id=7),
    ]
    assert read("qwen_bailian", path) == expected


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"parent_chat_id": 4, ', "", "keys must include parent_chat_id; got chat_id"),
        ("2.0", '"2.0"', "timestamp must be a finite number of seconds .*; got '2.0'"),
        (
            '"chat_id": 8',
            '"chat_id": 8.5',
            "chat_id must be a whole number .*; got 8.5",
        ),
        ('_id": 4', '_id": -2', "parent_chat_id must be a whole number .*; got -2"),
        ("[1]", "[1, 2]", "hash_ids must be one per 16 tokens, 1 for input_length 16"),
    ],
)
def test_bad_lines(before: str, after: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, QWEN_BAILIAN.replace(before, after))
    with pytest.raises(TraceFormatError, match=rf"trace\.txt:2: {problem}"):
        read("qwen_bailian", path)
