"""How far a plan has come, of a total that holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REST = 0.6
"""Of a phase that asks again, how much of what is left one more round is taken for."""


class Course:
    """Progress over all phases, in runs, as many as there may be.

    A phase that asks less than was thought counts as done when the next begins, so the
    total never moves and what is done never falls.

    Parameters
    ----------
    tell
        Told the phase, the runs done, and the total.
    """

    def __init__(self, tell: Callable[[str, int, int], None]) -> None:
        self._expected: Mapping[str, float] = {}
        self._tell = tell
        self._phase = ""
        self._share = self._from = 0.0  # of the phase; of it, before this round
        self._before = 0.0

    def expect(self, runs: Mapping[str, float]) -> None:
        """Say about how many runs each phase takes, in their order."""
        self._expected = runs

    @property
    def total(self) -> int:
        """Runs of all phases."""
        return max(1, round(sum(self._expected.values())))

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Take note of a round of questions of a phase, and of its answers."""
        if phase != self._phase:
            names = list(self._expected)
            at = names.index(phase) if phase in names else len(names)
            before = sum(self._expected[name] for name in names[:at])
            self._before = max(self._before, before)
            self._phase, self._share, self._from = phase, 0.0, 0.0
        elif not done:
            self._from = self._share
        rest = 1.0 if not self._from else _REST
        share = done / total if total else 1.0
        self._share = self._from + (1 - self._from) * rest * share
        runs = self._before + self._expected.get(phase, 0.0) * self._share
        self._tell(phase, min(round(runs), self.total), self.total)
