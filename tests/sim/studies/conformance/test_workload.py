"""Reading decision workloads: lenient where the meaning is clear, else a refusal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.studies.conformance.stream_tokens import token
from sim.studies.conformance.workload import load_workload
from tests.sim.commands import refused
from tests.sim.studies.conformance.decision_files import (
    column,
    decide,
    request,
    workload,
    write_workload,
)

if TYPE_CHECKING:
    from pathlib import Path


def small(release: str = "0.33.0") -> dict[str, Any]:
    return workload(release, [request("a", 9, 3), request("b", 5, 2)])


PLAIN = decide(small())


def with_changes(changes: dict[str, Any]) -> dict[str, Any]:
    """Keys of the file, of its ``config.``, or of the first request (``a.``)."""
    data = small()
    for path, value in changes.items():
        where, _, key = path.rpartition(".")
        {"": data, "config": data["config"], "a": data["requests"][0]}[where][key] = (
            value
        )
    return data


@pytest.mark.parametrize(
    "changes",
    [
        {"reference": "vLLM 0.33.0"},
        {"reference": "0.33"},
        {"reference": " vllm v0.33.0+cpu "},
        {"reference": "vllm==0.33.0.post1"},
        {"schema": 1.0, "seed": None},
        {"notes": "by hand", "comment": ["more"], "generator": {"version": 3}},
        {"a.comment": "long", "a.note": "a"},
        {"a.n": None, "a.beam": None, "a.priority": None, "a.abort_step": None},
        {"a.beam_seed": None, "a.beam_pct": None, "a.branch_output_lens": None},
        {"a.n": 1, "a.beam": True, "a.beam_pct": 100},
        {"a.branch_output_lens": [3]},
        {"a.prompt": [[0, 0], [194.0, 9.0]], "a.arrival_step": 0.0},
        {"config.watermark": 0, "config.max_num_active_seqs": None},
        {"config.block_size": 4.0, "config.num_gpu_blocks": 6.0},
        {"config.num_cpu_blocks": None, "config.preemption_mode": None},
        {"config.enable_chunked_prefill": True},
        {"config.chunked_prefill": True, "config.scheduler_reserve_full_isl": None},
        {"a.priority": -(10**30)},
        {"a.abort_step": 1000},
    ],
)
def test_what_says_the_same_in_other_words(changes: dict[str, Any]) -> None:
    assert decide(with_changes(changes)) == PLAIN


def test_a_null_says_that_there_is_no_such_thing() -> None:
    one = [request("a", 3, 2, n=2)]
    nulls = dict.fromkeys(("sliding_window", "max_model_len", "max_paddings"))
    assert decide(workload("0.1.0", one, **nulls)) == decide(workload("0.1.0", one))


def test_the_order_of_keys_and_a_byte_order_mark_mean_nothing(tmp_path: Path) -> None:
    data = dict(reversed(small().items()))
    data["config"] = dict(reversed(data["config"].items()))
    assert decide(data) == PLAIN
    path = tmp_path / "w.json"
    path.write_text(json.dumps(data), encoding="utf-8-sig")
    assert load_workload(path).generation == "v1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reference": "vllm 0.34.0"}, ("reference", "'0.34.0'", "0.8 to 0.33 (v1)")),
        ({"reference": "vllm 0.1.2"}, ("reference", "'0.1.2'", "0.0 to 0.1.1")),
        ({"reference": "vllm 0.5.4"}, ("reference", "'0.5.4'")),
        ({"reference": "vllm"}, ("reference", "'vllm'")),
        ({"reference": 0.33}, ("reference", "string", "0.33")),
        ({"schema": 2}, ("schema", "1", "got 2")),
        ({"schema": "1"}, ("schema", "1", "got '1'")),
        ({"config": []}, ("config", "object")),
        ({"requests": None}, ("requests", "needed")),
        ({"watermark": 0.1}, ("'watermark'", "under 'config'")),
        ({"abort_step": 1}, ("'abort_step'", "in 'requests'")),
        ({"config.watermrk": None}, ("config.watermrk", "did you mean 'watermark'")),
        ({"config.num_cpu_blocks": 4}, ("config.num_cpu_blocks", "no such key")),
        (
            {"config.enable_chunked_prefill": True, "config.chunked_prefill": False},
            ("config.enable_chunked_prefill", "'chunked_prefill'"),
        ),
        ({"config.watermark": 1.0}, ("config.watermark", "less than 1", "1.0")),
        ({"config.watermark": float("nan")}, ("config.watermark", "finite", "nan")),
        ({"config.block_size": None}, ("config.block_size", "needed")),
        ({"config.block_size": 0}, ("config.block_size", "equal to 1", "got 0")),
        ({"config.block_size": 4.5}, ("config.block_size", "integer", "got 4.5")),
        ({"config.block_size": True}, ("config.block_size", "integer", "got True")),
        ({"config.block_size": "4"}, ("config.block_size", "integer", "got '4'")),
        ({"config.num_gpu_blocks": 10**30}, ("config.num_gpu_blocks", "4194304")),
        ({"config.num_gpu_blocks": 1}, ("config", "at least 2 blocks", "got 1")),
        ({"config.policy": "lifo"}, ("config.policy", "'priority'", "'lifo'")),
        ({"config.max_num_active_seqs": 9}, ("config", "max_num_seqs", "got 9")),
        (
            {"config.chunked_prefill": False, "config.max_num_batched_tokens": 32},
            ("config", "at least max_model_len", "got 32"),
        ),
        ({"a.id": "b"}, ("'b'", "stands twice")),
        ({"a.id": 3}, ("requests.0.id", "string", "got 3")),
        ({"a.prio": 1}, ("requests.0.prio", "did you mean 'priority'")),
        ({"a.arrival_step": 1}, ("arrival_step", "sort them")),
        ({"a.arrival_step": 10**400}, ("requests.0.arrival_step", "less than")),
        ({"a.abort_step": -1}, ("requests.0.abort_step", "got -1")),
        ({"a.prompt": []}, ("requests.0.prompt", "at least 1")),
        ({"a.prompt": [1, 9]}, ("requests.0.prompt.0", "array", "got 1")),
        ({"a.prompt": [[1, 0]]}, ("requests.0", "prompt of 'a'", "got 0")),
        ({"a.prompt": [[1, -1]]}, ("requests.0.prompt.0.1", "got -1")),
        ({"a.prompt": [[1, 10**12]]}, ("requests.0.prompt.0.1", "16777216")),
        ({"a.prompt": [[1, 2, 3]]}, ("requests.0.prompt.0", "2 items")),
        ({"a.output_len": 0}, ("requests.0.output_len", "got 0")),
        ({"a.n": 2}, ("'a' has n = 2", "one request a sample")),
        ({"a.branch_output_lens": [4]}, ("'a'", "branch_output_lens", "output_len")),
        ({"a.branch_output_lens": []}, ("'a'", "1 lengths", "got 0")),
        ({"a.beam_pct": 101}, ("requests.0.beam_pct", "got 101")),
        ({"a.out_seed": 1.5}, ("requests.0.out_seed", "got 1.5")),
    ],
)
def test_what_means_nothing_is_refused(
    changes: dict[str, Any],
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_workload(tmp_path / "w.json", with_changes(changes))
    out = str(tmp_path / "log.jsonl.gz")
    line = refused(["decisions", str(path), "--out", out], capsys, tmp_path)
    assert line.startswith(f"kvsim: {path}: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("release", "config", "words"),
    [
        ("0.1.0", {"num_cpu_blocks": None}, ("config.num_cpu_blocks", "needed")),
        ("0.1.0", {"sliding_window": 8}, ("config.sliding_window", "no such key")),
        ("0.1.0", {"max_model_len": 64}, ("config.max_model_len", "no such key")),
        ("0.2.7", {"max_model_len": None}, ("config.max_model_len", "needed")),
        ("0.2.7", {"sliding_window": 6}, ("sliding_window", "block_size 4", "got 6")),
        ("0.2.7", {"preemption_mode": "drop"}, ("preemption_mode", "'drop'")),
        (
            "0.7.3",
            {"sliding_window": 8, "enable_prefix_caching": True},
            ("prefix caching", "sliding window (8)"),
        ),
        ("0.7.3", {"max_num_partial_prefills": 2}, ("chunked prefill", "of 2")),
        ("0.7.3", {"delay_factor": float("inf")}, ("config.delay_factor", "inf")),
        ("0.11.2", {"watermark": 0.1}, ("watermark", "from 0.24 on", "0.11")),
        ("0.8.5", {"policy": "priority"}, ("before 0.11 only fcfs",)),
    ],
)
def test_engines_that_no_release_has_are_refused(
    release: str,
    config: dict[str, Any],
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = workload(release, [request("a", 3, 1)], **config)
    path = write_workload(tmp_path / "w.json", data)
    line = refused(["decisions", str(path)], capsys, tmp_path)
    assert line.startswith(f"kvsim: {path}: config")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON file"),
        ('{"schema": 1,', "not a JSON file"),
        ("[]", "should be an object"),
        ("[" * 100_000, "not a JSON file"),
        ('{"seed": ' + "1" * 5000 + "}", "not a JSON file"),
    ],
)
def test_what_is_no_workload_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_workload(tmp_path / "w.json", text)
    line = refused(["decisions", str(path)], capsys, tmp_path)
    assert words in line
    assert len(line) < 300


def test_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing.json")
    assert "No such file" in refused(["decisions", missing], capsys, tmp_path)
    assert "directory" in refused(["decisions", str(tmp_path)], capsys, tmp_path)
    (tmp_path / "w.json").write_bytes(b"\x1f\x8b\xff")
    path = str(tmp_path / "w.json")
    assert "not a JSON file" in refused(["decisions", path], capsys, tmp_path)


def test_a_key_that_is_missing_does_not_exist() -> None:
    """Paddings: 3 + 9 and 9 + 9 tokens; the whole prompt: 24 tokens, 20 slots."""
    two = [request("a", 3, 1), request("b", 9, 1)]
    assert decide(workload("0.2.7", two))[0]["sched"] == [["a", 3], ["b", 9]]
    assert decide(workload("0.2.7", two, max_paddings=5))[0]["sched"] == [["a", 3]]
    big = [request("a", 24, 1)]
    first = decide(workload("0.33.0", big, max_num_batched_tokens=8))[0]
    assert first["sched"] == [["a", 8, "n", 0]]
    reserved = decide(
        workload(
            "0.33.0", big, max_num_batched_tokens=8, scheduler_reserve_full_isl=True
        )
    )
    assert reserved[0]["sched"] == []
    assert column(reserved, "stalled") == [True]


def test_tokens_of_any_seed() -> None:
    """By the formula of the format, worked out by hand."""
    assert token(0, 0) == 10
    assert token(1, 0) == 10 + (1000003 + 31) % 49979 == 464
    assert token(2, 3) == 10 + (2000006 + 23757 + 31) % 49979
    assert 10 <= token(-(10**30), 5) < 49989
