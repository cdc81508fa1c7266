"""Fits to whole measured steps: host time, and how far off the sum of kernels is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from scipy.optimize import lsq_linear

from sim.errors import UserError
from sim.scheduler.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FEWEST: Final = 6
"""Whole steps below which nothing is fitted to them."""
_FACTORS: Final = (0.5, 2.0)
"""Bounds of the correction: beyond them the tables are of something else."""
_MOST: Final = (0.1, 1e-3)
"""Bounds of host seconds a step and a request."""
_COVERED: Final = 0.9


@dataclass(frozen=True, slots=True)
class StepFit:
    """``factor x kernels + step_overhead_s + request_overhead_s x requests``."""

    factor: float
    step_overhead_s: float
    request_overhead_s: float
    num_steps: int
    before_percent: float
    """Median error of the kernels and the default host time alone."""
    after_percent: float
    """Median error of each step by a fit to the others."""
    interval_percent: float
    """Half-width that holds nine of ten of those errors."""

    def to_json(self) -> dict[str, Any]:
        """Return ``host`` and ``step_correction`` of a profile's `fit`."""
        interval = round(self.interval_percent, 3)
        return {
            "host": {
                "step_overhead_s": self.step_overhead_s,
                "request_overhead_s": self.request_overhead_s,
            },
            "step_correction": {
                "factor": self.factor,
                "num_steps": self.num_steps,
                "before_percent": round(self.before_percent, 3),
                "after_percent": round(self.after_percent, 3),
                "interval": [interval, interval],
            },
        }


def steps_of(steps: Sequence[Any], num_layers: int) -> list[Any]:
    """Return the steps of a stack of so many layers; those that do not say count."""
    return [
        step
        for step in steps
        if not isinstance(step, dict)
        or step.get("num_layers", num_layers) == num_layers
    ]


def fit_steps(
    steps: Sequence[Any],
    kernels_s: Callable[[BatchShape], float],
    default_s: Callable[[BatchShape], float],
) -> StepFit | None:
    """Fit host time and the correction of kernels to whole measured steps.

    None with fewer than `FEWEST` steps. `kernels_s` gives seconds that the GPU is busy
    with a step, not corrected; `default_s` those with the default host time, to say
    how much the fit gained. Steps are entries of a profile: ``shape``, the fields of
    `BatchShape` by name (those left out are 0), and ``p50_s``.
    """
    if len(steps) < FEWEST:
        return None
    shapes, time_s = zip(*map(_step, steps), strict=True)
    table = np.array(
        [
            [kernels_s(shape), 1.0, shape.num_decodes + shape.num_prefills]
            for shape in shapes
        ]
    )
    measured = np.array(time_s)
    before = np.array([default_s(shape) for shape in shapes]) / measured - 1.0
    errors = []
    for place in range(len(measured)):
        others = np.arange(len(measured)) != place
        found = _solved(table[others], measured[others])
        errors.append(float(table[place] @ found / measured[place] - 1.0))
    factor, step_s, request_s = _solved(table, measured).tolist()
    apart = np.sort(np.abs(errors))
    rank = min(len(apart), int(np.ceil((len(apart) + 1) * _COVERED))) - 1
    return StepFit(
        factor=float(f"{factor:.6g}"),
        step_overhead_s=float(f"{step_s:.6g}"),
        request_overhead_s=float(f"{request_s:.6g}"),
        num_steps=len(measured),
        before_percent=float(100.0 * np.median(np.abs(before))),
        after_percent=float(100.0 * np.median(apart)),
        interval_percent=float(100.0 * apart[rank]),
    )


def _step(entry: Any) -> tuple[BatchShape, float]:
    try:
        shape = {key: int(value) for key, value in entry["shape"].items()}
        # a name that is no field is a TypeError
        batch = BatchShape(**dict.fromkeys(BatchShape._fields, 0) | shape)
        return batch, float(entry["p50_s"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fields = ", ".join(BatchShape._fields[:3])
        raise UserError(
            f"a measured step must hold shape, with the fields of a batch ({fields}, "
            f"...), and p50_s; {error!r}: measure the profile again"
        ) from error


def _solved(table: Floats, measured: Floats) -> Floats:
    """Return the three parameters with the least squared relative errors."""
    weighted = table / measured[:, None]
    # columns of like size: seconds of kernels and of hosts differ by a thousand
    scale = np.abs(weighted).max(axis=0) + 1e-12
    lower = np.array([_FACTORS[0], 0.0, 0.0]) * scale
    upper = np.array([_FACTORS[1], *_MOST]) * scale
    found = lsq_linear(weighted / scale, np.ones(len(measured)), (lower, upper))
    solution: Floats = found.x / scale
    return solution
