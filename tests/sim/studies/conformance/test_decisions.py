"""`kvsim decisions` as a user meets it."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.studies.conformance import DecisionDriver
from tests.sim.commands import files, refused
from tests.sim.studies.conformance.decision_files import (
    decide,
    request,
    workload,
    write_workload,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TWO = workload("0.11.2", [request("a", 9, 2), request("b", 8, 8)])
LINES = decide(TWO)


def written(lines: list[Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_workload(tmp_path / "two.workload.json", TWO)


def diff(
    directory: Path, first: list[Any], second: list[Any], *flags: str
) -> tuple[int, str, str]:
    a, b = directory / "a.jsonl", directory / "b.jsonl"
    a.write_text(written(first))
    b.write_text(written(second))
    return kvsim(["decisions", "--diff", str(a), str(b), *flags]), str(a), str(b)


# -- writing a log ----------------------------------------------------------------


def test_a_log_is_written_the_same_every_time(path: Path, tmp_path: Path) -> None:
    for name in ("first.jsonl.gz", "second.jsonl.gz", "plain.jsonl"):
        assert kvsim(["decisions", str(path), "--out", str(tmp_path / name)]) == 0
    logs = files(tmp_path)
    assert logs["first.jsonl.gz"] == logs["second.jsonl.gz"]
    plain = gzip.decompress(logs["first.jsonl.gz"])
    assert plain == logs["plain.jsonl"]
    assert [json.loads(row) for row in plain.splitlines()] == LINES


def test_without_out_the_log_goes_to_the_terminal(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvsim(["decisions", str(path), "--check"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(row) for row in captured.out.splitlines()] == LINES
    assert captured.err == ""


def test_what_is_said_about_a_log(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "log.jsonl.gz"
    command = ["decisions", str(path), "--out", str(out), "--overwrite"]
    assert kvsim(command) == 0
    said = capsys.readouterr().out
    assert said == (
        f"small: v1 as vllm 0.11.2, 2 requests, {len(LINES)} steps, 1 preemptions; "
        f"all requests done; log in {out}\n"
    )
    assert kvsim([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert kvsim([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "small",
        "reference": "vllm 0.11.2",
        "generation": "v1",
        "num_requests": 2,
        "num_steps": len(LINES),
        "num_preemptions": 1,
        "ending": "done",
        "log": str(out),
    }


@pytest.mark.parametrize(
    ("name", "overwrite", "rule"),
    [
        ("missing/log.jsonl.gz", False, "No such file or directory"),
        ("a_file/log.jsonl", False, "Not a directory"),
        ("a_file", False, "--overwrite"),
        ("a_directory", True, "directory"),
        ("two.workload.json", True, "is the workload itself"),
        ("x" * 300, False, "name too long"),
    ],
)
def test_nothing_is_written_where_a_log_cannot_be(  # noqa: PLR0917
    name: str,
    overwrite: bool,
    rule: str,
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "a_directory").mkdir()
    before = files(tmp_path)
    command = ["decisions", str(path), "--out", str(tmp_path / name)]
    line = refused([*command, *["--overwrite"] * overwrite], capsys, tmp_path)
    assert rule in line
    assert name in line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("fault", "status"), [(KeyboardInterrupt(), 130), (OSError("disk full"), 2)]
)
def test_an_interrupted_run_leaves_nothing(  # noqa: PLR0917
    fault: BaseException,
    status: int,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lines(_: object) -> Iterator[dict[str, Any]]:
        yield LINES[0]
        # the workload, what claims the log's name, and a log in the making
        assert len(files(tmp_path)) == 3
        raise fault

    monkeypatch.setattr(DecisionDriver, "lines", lines)
    assert kvsim(["decisions", str(path), "--out", str(tmp_path / "l.gz")]) == status
    assert list(files(tmp_path)) == ["two.workload.json"]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_older_log_outlives_a_run_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chunk by chunk a prompt outgrows the pool, and starts again for ever."""
    data = workload(
        "0.11.2",
        [request("big", 30, 1)],
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
    )
    path = write_workload(tmp_path / "w.json", data)
    out = tmp_path / "log.jsonl"
    out.write_text("mine")
    line = refused(
        ["decisions", str(path), "--out", str(out), "--overwrite"], capsys, tmp_path
    )
    assert "big for ever" in line
    assert "num_gpu_blocks" in line
    assert out.read_text() == "mine"


def test_an_engine_that_runs_out_of_blocks_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The window's null block takes the only block, which v0's swap-in overlooks."""
    data = workload(
        "0.7.3",
        [request("a", 1, 5)],
        num_gpu_blocks=1,
        sliding_window=16,
        preemption_mode="swap",
    )
    path = write_workload(tmp_path / "w.json", data)
    out = str(tmp_path / "log.jsonl")
    line = refused(["decisions", str(path), "--out", out], capsys, tmp_path)
    assert "step " in line
    assert "raise num_gpu_blocks" in line


def test_what_does_not_go_together(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--diff A B" in refused(["decisions"], capsys, tmp_path)
    both = ["decisions", str(path), "--diff", str(path), str(path)]
    assert "give it alone" in refused(both, capsys, tmp_path)


# -- showing where two logs part --------------------------------------------------


def test_equal_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, a, b = diff(tmp_path, LINES, LINES)
    assert (status, capsys.readouterr().out) == (
        0,
        f"equal: {a} and {b} take the same decisions\n",
    )
    assert diff(tmp_path, LINES, LINES, "--quiet")[0] == 0
    assert capsys.readouterr().out == ""
    assert diff(tmp_path, LINES, LINES, "--json")[0] == 0
    assert json.loads(capsys.readouterr().out) == {
        "equal": True,
        "first_difference": None,
    }


def test_absent_is_empty_and_the_order_of_fields_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [
        dict(reversed(line.items())) | {"copy": [], "stalled": False, "cached": {}}
        if "cached" not in line
        else line
        for line in LINES
    ]
    assert diff(tmp_path, LINES, other, "--quiet")[0] == 0


def test_the_first_difference_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads(json.dumps(LINES))
    other[2]["sched"][0][1:] = [5, "c", 4]
    other[2]["free"] = [99]
    status, _, _ = diff(tmp_path, LINES, other)
    said = capsys.readouterr().out
    assert status == 1
    for words in (
        "step 2 (line 3), field 'sched' (the batch: request, tokens, kind, computed",
        "expected (A, a.jsonl): [[b, 1, c, 8]]",
        "got      (B, b.jsonl): [[b, 5, c, 4]]",
        "entry 0: expected ['b', 1, 'c', 8], got ['b', 5, 'c', 4]",
        "before, after step 1 (equal in both):",
        "after the call of step 2 in A, a.jsonl:",
        "waiting: [b]",
        "after the call of step 2 in B, b.jsonl:",
        "free: [99]",
    ):
        assert words in said
    assert diff(tmp_path, LINES, other, "--quiet")[0] == 1
    assert capsys.readouterr().out == ""
    assert diff(tmp_path, LINES, other, "--json")[0] == 1
    found = json.loads(capsys.readouterr().out)["first_difference"]
    assert (found["line"], found["step"], found["field"]) == (3, 2, "sched")
    assert (found["before"], found["a"], found["b"]) == (LINES[1], LINES[2], other[2])


@pytest.mark.parametrize(("first", "second"), [(10, 3), (3, 10), (10, 0)])
def test_one_log_ends_before_the_other(
    first: int, second: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = min(first, len(LINES)), min(second, len(LINES))
    status, _, _ = diff(tmp_path, LINES[:first], LINES[:second])
    ended, other = ("A", "B") if first < second else ("B", "A")
    step = min(first, second)
    assert status == 1
    assert (
        f"line {step + 1}: {ended}, {ended.lower()}.jsonl has ended, {other}, "
        f"{other.lower()}.jsonl goes on with step {LINES[step]['t']}"
    ) in capsys.readouterr().out


PACKED = gzip.compress(written(LINES).encode(), mtime=0)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "No such file"),
        (PACKED[: len(PACKED) // 2], "ended before the end-of-stream"),
        (PACKED[:40] + b"\0" * 40 + PACKED[80:], "b.jsonl"),
        (b"\x1f\x8b nothing", "b.jsonl"),
        (b"\xff\xfe\x00", "not a log line"),
        (written(LINES[:1]).encode() + b"{", "line 2: not a log line"),
        (b"[1, 2]\n", "no object with a step 't'"),
        (b'{"t": "0"}\n', "no object with a step 't'"),
        (b"[" * 100_000, "not a log line"),
    ],
)
def test_what_is_no_log_is_refused(
    content: bytes | None,
    rule: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(written(LINES))
    if content is not None:
        b.write_bytes(content)
    line = refused(["decisions", "--diff", str(a), str(b)], capsys, tmp_path)
    assert rule in line
    assert str(b) in line
