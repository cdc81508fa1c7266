"""Questions to workers, in batches: answers in order, whoever ends first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.errors import ConfigError
from sim.studies.sweeps.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.studies.sweeps.job import Executor, Outcome, Task

Answer = dict[str, Any]


class StoppedError(Exception):
    """The plan was asked to end before it was complete."""


class Crew:
    """Puts requests to an executor and returns what they are answered with.

    Parameters
    ----------
    executor
        Where the work is done.
    on_progress
        Told the phase, and how many of how many requests of it are answered.
    """

    def __init__(
        self,
        executor: Executor,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._executor = executor
        self._on_progress = on_progress or (lambda *_: None)

    def ask(self, phase: str, task: Task, requests: Sequence[Answer]) -> list[Answer]:
        """Return the answer to each request, in their order.

        Raises
        ------
        ConfigError
            If one is refused: a mistake that shows only when a run begins.
        RuntimeError
            If one fails: a fault of ours, or of a class of the user's.
        StoppedError
            If the executor was stopped before all were answered.
        """
        answers = self.try_to(phase, task, requests)
        for answer in answers:
            if isinstance(answer, str):
                raise ConfigError(answer)
        return [answer for answer in answers if not isinstance(answer, str)]

    def try_to(
        self, phase: str, task: Task, requests: Sequence[Answer]
    ) -> list[Answer | str]:
        """Return the same, or the reason of each that is refused."""
        jobs = [Job(i, {}, request) for i, request in enumerate(requests)]
        answers: dict[int, Answer | str] = {}
        self._on_progress(phase, 0, len(jobs))
        for outcome in self._executor.run(jobs, task):
            answers[outcome.index] = _answer(outcome)
            self._on_progress(phase, len(answers), len(jobs))
        if len(answers) < len(jobs):
            raise StoppedError(phase)
        return [answers[i] for i in range(len(jobs))]


def _answer(outcome: Outcome) -> Answer | str:
    if outcome.status == "done":
        summary: Mapping[str, Any] = outcome.summary or {}
        return dict(summary)
    if outcome.status == "refused":
        return outcome.error or "refused"
    raise RuntimeError(f"a run of the plan {outcome.status}: {outcome.error}")
