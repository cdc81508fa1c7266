"""Answers that a plan has had, on disk: what it goes on from once it was stopped."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.studies.sweeps.job import Task

Answer = dict[str, Any] | str
"""What a task said, or why it was refused."""


class AnswerFile:
    """Answers by what was asked, a line each, written as they come.

    A question is its task, what it was given, the traces and profiles behind that, and
    the version of kvsim: so a plan that was edited keeps the answers that it still
    asks for. A last line that was cut off is left out.

    Parameters
    ----------
    path
        The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[str, Answer] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    key, answer = json.loads(line)
                except ValueError:
                    continue
                self._answers[key] = answer

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, task: Task, request: Mapping[str, Any]) -> Answer | None:
        """Return the answer to a question, or None."""
        return self._answers.get(_key(task, request))

    def keep(self, task: Task, request: Mapping[str, Any], answer: Answer) -> Answer:
        """Write an answer down; return it as it will be read."""
        key = _key(task, request)
        line = json.dumps([key, answer])
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        kept: Answer = json.loads(line)[1]
        self._answers[key] = kept
        return kept

    def remove(self) -> None:
        """Delete the file: the plan is complete."""
        self.path.unlink(missing_ok=True)


def _key(task: Task, request: Mapping[str, Any]) -> str:
    files = sorted(_files(request["run"]))
    asked = [task.__name__, version("kvsim"), request, files]
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]


def _files(value: Any) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files that a configuration names."""
    if isinstance(value, dict):
        return [found for each in value.values() for found in _files(each)]
    if not isinstance(value, str) or "/" not in value:
        return []
    # A class is path.py:Class, and a model may be the folder of its config.json.
    paths = Path(value), Path(value.rpartition(":")[0]), Path(value) / "config.json"
    stats = [(f"{path}", path.stat()) for path in paths if path.is_file()]
    return [(path, facts.st_size, facts.st_mtime_ns) for path, facts in stats]
