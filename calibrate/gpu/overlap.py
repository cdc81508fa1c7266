"""A step and a transfer, alone and side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from calibrate.measurement import median

if TYPE_CHECKING:
    from collections.abc import Callable

    from calibrate.gpu.tasks import KernelTask
    from calibrate.gpu.timers import Timers

SAMPLES = 10


def overlap_times(
    timers: Timers, step: KernelTask, transfer: Callable[[], None]
) -> dict[str, list[float]]:
    """Return seconds of a call of the step and of the transfer, alone and together.

    While one is timed, so much of the other is enqueued that it never ends first. The
    step runs on the current stream, the transfer on its own.

    Parameters
    ----------
    timers
        The stopwatch.
    step
        A task whose leading metric is a replayed graph.
    transfer
        Enqueues one transfer on the current stream.
    """
    metric = step.metrics[0]
    step.sample(metric, 2)
    step_alone = step.sample(metric, SAMPLES)
    transfer_alone = [timers.transfer(transfer) for _ in range(SAMPLES)]
    step_s = median(step_alone) * step.repeats(metric)
    transfer_s = median(transfer_alone)
    transfers = 1 + math.ceil(3 * step_s / transfer_s)
    replays = 1 + math.ceil(3 * transfer_s / step_s)
    step_with, transfer_with = [], []
    for _ in range(SAMPLES):
        with timers.beside_transfers(transfer, transfers):
            step_with += step.sample(metric, 1)
        transfer_with.append(timers.transfer_beside(transfer, step.enqueue, replays))
    return {
        "step_alone": step_alone,
        "step_with": step_with,
        "transfer_alone": transfer_alone,
        "transfer_with": transfer_with,
    }
