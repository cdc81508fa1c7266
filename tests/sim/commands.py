"""Helpers that tests of commands share."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from sim.cli.main import run as kvsim
from sim.results.output import claimed
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def trace_config(tmp_path: Path, text: str, **engine: Any) -> Path:
    (tmp_path / "trace.csv").write_text(text)
    data = minimal(**engine)
    data["workload"] = {"trace": {"kind": "azure", "path": str(tmp_path / "trace.csv")}}
    return write(tmp_path, data)


def _written(directory: Path) -> set[Path]:
    """Return all paths in a folder but those of ``__pycache__``."""
    return {path for path in directory.rglob("*") if "__pycache__" not in path.parts}


def refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], directory: Path
) -> str:
    """Run, expect a refusal in one line, and nothing new in `directory`."""
    capsys.readouterr()
    before = _written(directory)
    assert kvsim(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    assert _written(directory) == before
    return lines[0]


@contextmanager
def claimed_elsewhere(path: Path) -> Iterator[None]:
    """Let another thread write to `path`, as another process would."""
    begun, over = Event(), Event()

    def hold() -> None:
        with claimed(path):
            begun.set()
            over.wait()

    thread = Thread(target=hold)
    thread.start()
    try:
        assert begun.wait(10)
        yield
    finally:
        over.set()
        thread.join()
