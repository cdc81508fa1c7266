"""How far a plan has come: runs done of a total that holds, and answers on disk."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sim.studies.sweeps.job import Task

Answer = dict[str, Any] | str
"""The answer of a task, or the reason for which it was refused."""


class Expected(NamedTuple):
    """An estimate of the work of a phase."""

    num_questions: float
    runs_each: float
    """About as many runs as one answer takes the time of."""


class Course:
    """Progress over all phases, in runs, of the most that there may be.

    A phase may ask several times. One that asks less than expected counts as done when
    the next begins, and answers of one that asks more count less: so the total never
    moves, and the number of runs done never falls.

    Parameters
    ----------
    tell
        Told the phase, the runs done, and the total.
    """

    def __init__(self, tell: Callable[[str, int, int], None]) -> None:
        self._expected: Mapping[str, Expected] = {}
        self._tell = tell
        self._phase = ""
        self._share = 0.0  # of the phase
        self._num_asked = 0  # in it, this round and before
        self._before = 0.0

    def expect(self, phases: Mapping[str, Expected]) -> None:
        """Take estimates of the phases, in their order."""
        self._expected = phases

    @property
    def total(self) -> int:
        """Runs of all phases."""
        return max(1, round(added(map(self._runs, self._expected))))

    def _runs(self, phase: str) -> float:
        expected = self._expected.get(phase)
        return 0.0 if expected is None else expected.num_questions * expected.runs_each

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Take note of a round of questions of a phase, and of its answers."""
        if phase != self._phase:
            names = list(self._expected)
            at = names.index(phase) if phase in names else len(names)
            self._before = max(self._before, added(map(self._runs, names[:at])))
            self._phase, self._share, self._num_asked = phase, 0.0, total
        elif not done:
            self._num_asked += total
        expected = self._expected.get(phase, Expected(0.0, 0.0))
        questions = max(expected.num_questions, self._num_asked)
        answered = self._num_asked - total + done
        if questions:
            self._share = max(self._share, answered / questions)
        runs = self._before + self._runs(phase) * self._share
        self._tell(phase, min(round(runs), self.total), self.total)


class AnswerFile:
    """Answers by question, a line each, written as they come.

    A question is its task, the request, the traces and profiles behind that, and the
    version of kvsim: so a plan that was edited keeps the answers to its unchanged
    questions. A last line that was cut off is left out.

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
