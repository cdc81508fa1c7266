"""How a point is timed in one visit: warmed up until it stands still, then sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.measurement import median

if TYPE_CHECKING:
    from calibrate.harness.device import Task

WARM_UP_SAMPLES = 5
"""Samples of one median of the warm-up, at most."""
WARM_UP_BUDGET_S = 0.05
"""Seconds that one median of the warm-up may take, where a sample takes less."""
WARM_UP_TOLERANCE = 1.02
"""Three successive medians must lie this close together."""
MAX_MEDIANS = 12
"""Medians after which a warm-up is given up, and the visit marked unsettled."""
MIN_SAMPLES = 5
BUDGET_S = 0.5
"""Seconds that the samples of one metric may take in a visit."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What one visit of a point gave: samples in seconds, by metric."""

    samples: dict[str, list[float]]
    settled: bool
    """Whether the warm-up ended by itself."""


def visit(task: Task, num_samples: int) -> Visit:
    """Warm a task up and sample each of its metrics.

    Slow calls get fewer samples, `MIN_SAMPLES` at least, so that a visit stays within
    seconds.
    """
    settled = warm_up(task)
    samples: dict[str, list[float]] = {}
    for metric in task.metrics:
        first = task.sample(metric, 1)[0]  # the first call after another is odd
        cost_s = first * task.repeats(metric)
        affordable = int(BUDGET_S / cost_s)
        count = max(min(MIN_SAMPLES, num_samples), min(num_samples, affordable))
        samples[metric] = task.sample(metric, count)
    return Visit(samples, settled)


def warm_up(task: Task) -> bool:
    """Run until three successive medians agree; return whether they ever did."""
    metric = task.metrics[0]
    cost_s = task.sample(metric, 1)[0] * task.repeats(metric)
    count = max(1, min(WARM_UP_SAMPLES, int(WARM_UP_BUDGET_S / cost_s)))
    medians: list[float] = []
    for _ in range(MAX_MEDIANS):
        medians.append(median(task.sample(metric, count)))
        last = medians[-3:]
        if len(last) == 3 and max(last) <= WARM_UP_TOLERANCE * min(last):
            return True
    return False
