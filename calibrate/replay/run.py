"""The loop of a replay: which steps, for how long, and the result of each."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from calibrate.harness.device import DeviceFaultError, UnsupportedPointError
from calibrate.harness.outcome import Progress
from calibrate.replay.compare import Comparison, Row, Timing, compare, row_of
from calibrate.replay.log import KINDS
from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from calibrate.replay.log import Schedule, Step
    from calibrate.replay.predict import Prediction


def shares(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """Return how many steps of each kind are taken, at most `most` together.

    Every kind gets the same; the unused share of a rare kind goes to the others, so
    that swaps, one step in thousands, are not lost among decodes.
    """
    taken: dict[str, int] = {}
    left = most
    kinds = sorted(counts, key=lambda kind: (counts[kind], KINDS.index(kind)))
    for place, kind in enumerate(kinds):
        taken[kind] = min(counts[kind], left // (len(kinds) - place))
        left -= taken[kind]
    return taken


def chosen(kinds: Sequence[str], most: int | None) -> list[int]:
    """Return the places of `most` steps, evenly spaced among those of a kind."""
    counts = Counter(kinds)
    if most is None or most >= len(kinds):
        return list(range(len(kinds)))
    taken = shares(counts, most)
    seen: Counter[str] = Counter()
    places = []
    for place, kind in enumerate(kinds):
        number, share = seen[kind], taken[kind]
        seen[kind] += 1
        # the next of `share` equal stretches begins here
        if (number + 1) * share // counts[kind] > number * share // counts[kind]:
            places.append(place)
    return places


class Executor(Protocol):
    """Whatever runs steps."""

    @property
    def variants(self) -> dict[str, str]:
        """Return the variants that steps run with, by operation."""

    @property
    def worst_graph_error(self) -> float:
        """Return how far the logits of graphs were from those without; 0 without."""

    def time(self, step: Step, repeats: int) -> Timing:
        """Return the medians of `repeats` executions, after one that does not count."""


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
    """The result of a replay."""

    comparison: Comparison
    num_chosen: int
    stopped: str = ""
    """Why it ended before the last chosen step."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Steps that the device refused, and why."""


class Replay:
    """Executes chosen steps of a schedule, in order.

    `tell` hears how far it is; `clock` gives seconds.
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
        """Execute, until the last chosen step, the time limit or an interruption."""
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
