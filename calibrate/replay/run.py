"""The loop of a replay: which steps, for how long, and what becomes of each."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from calibrate.harness.device import DeviceFaultError, UnsupportedPointError
from calibrate.harness.outcome import Progress
from calibrate.replay.choose import chosen
from calibrate.replay.compare import Comparison, Row, compare, row_of
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from calibrate.replay.log import Schedule, Step
    from calibrate.replay.predict import Prediction
    from calibrate.replay.timing import Executor


@dataclass(frozen=True, slots=True)
class Plan:
    """Which steps are executed, and how."""

    max_steps: int | None = None
    """Of the schedule, from its beginning; None for all."""
    sample: int | None = None
    """Of those, evenly over the kinds; None for all."""
    repeats: int = 3
    time_limit_s: float | None = None
    """After which no further step is begun."""


@dataclass(slots=True)
class Replayed:
    """What came of a replay."""

    comparison: Comparison
    num_chosen: int
    stopped: str = ""
    """Why it ended before the last chosen step."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Steps that the device refused, and why."""


class Replay:
    """Executes chosen steps of a schedule, in order.

    Parameters
    ----------
    schedule
        As recorded.
    executor
        What runs them.
    prediction
        What prices them.
    plan
        Which.
    tell
        Is told how far it is.
    clock
        Seconds that pass for whoever waits.
    """

    def __init__(
        self,
        schedule: Schedule,
        executor: Executor,
        prediction: Prediction,
        plan: Plan,
        *,
        tell: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule = schedule
        self._executor = executor
        self._prediction = prediction
        self._plan = plan
        self._tell = tell
        self._clock = clock

    def run(self) -> Replayed:
        """Execute, until the last chosen step, the time limit or an interruption.

        Raises
        ------
        UserError
            When the schedule has no step, none was executed, or the device is lost.
        """
        begin_s = self._clock()
        kinds = [step.kind for step in self._steps()]
        if not kinds:
            raise UserError(f"'{self._schedule.path}' has no step to execute")
        places = chosen(kinds, self._plan.sample)
        rows: list[Row] = []
        skipped: dict[int, str] = {}
        stopped = ""
        try:
            for done, step in enumerate(self._picked(places)):
                if self._is_late(begin_s) and rows:
                    stopped = f"time limit of {self._plan.time_limit_s:g} s"
                    break
                try:
                    rows.append(self._row(step))
                except UnsupportedPointError as error:
                    skipped[step.number] = str(error)
                self._tell(Progress("replay", done + 1, len(places)))
        except KeyboardInterrupt:
            stopped = "interruption"
        if not rows:
            reason = next(iter(skipped.values()), stopped)
            raise UserError(f"no step was executed: {reason}; take --num-layers")
        comparison = compare(rows, Counter(kinds), self._prediction.knows_host)
        return Replayed(comparison, len(places), stopped, skipped)

    def _steps(self) -> Iterator[Step]:
        return islice(self._schedule.steps(), self._plan.max_steps)

    def _picked(self, places: list[int]) -> Iterator[Step]:
        wanted = set(places)
        for place, step in enumerate(self._steps()):
            if place in wanted:
                yield step

    def _is_late(self, begin_s: float) -> bool:
        limit_s = self._plan.time_limit_s
        return limit_s is not None and self._clock() - begin_s > limit_s

    def _row(self, step: Step) -> Row:
        try:
            timing = self._executor.time(step, self._plan.repeats)
        except DeviceFaultError as error:
            raise UserError(
                f"the device failed in step {step.number}: {error}; run again with "
                f"--max-steps {step.number}, or another --seed"
            ) from error
        shape = step.shape
        costs = self._prediction.whole(shape), self._prediction.device(shape)
        return row_of(step.number, step.start_s, shape, costs, timing)
