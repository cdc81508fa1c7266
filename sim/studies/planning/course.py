"""How far a plan has come, of a total that holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Expected(NamedTuple):
    """An estimate of the work of a phase."""

    num_questions: float
    runs_each: float
    """About as many runs as one answer takes the time of."""


class Course:
    """Progress over all phases, in runs, as many as there may be.

    A phase may ask several times. One that asks less than was thought counts as done
    when the next begins, and one that asks more has its answers count less: so the
    total never moves, and what is done never falls.

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
