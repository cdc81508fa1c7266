"""Every step costs the same: for tests, theory and toy examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.costs.parts import above_zero, cost_columns, step_cost

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from sim.costs.base import BatchShape, StepCost


class ConstantCost:
    """A step of any shape takes `step_s` seconds, an empty one too.

    Parameters
    ----------
    step_s
        Seconds a step; finite and > 0.

    Raises
    ------
    ConfigError
        If `step_s` is anything else.
    """

    __slots__ = ("_cost", "step_s")

    def __init__(self, step_s: float) -> None:
        self.step_s = above_zero("step_s", step_s)
        # not named by any part of StepCost, hence host_s
        self._cost = step_cost(host_s=self.step_s)

    def step(self, shape: BatchShape) -> StepCost:
        """Return the same cost for every shape, all of it in `host_s`."""
        del shape
        return self._cost

    def batch_total(self, *shape: int) -> float:
        """Return `step_s`; as `StepPricer` says."""
        del shape
        return self.step_s

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        """Return a function that is always `step_s`; as `StepPricer.decode_total`."""
        del num_decodes
        step_s = self.step_s
        return lambda _: step_s

    def columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the same cost in each row; as `StepPricer.columns`."""
        return cost_columns(len(shapes), *self._cost.parts)

    def describe(self) -> dict[str, Any]:
        """Return the parameter and its source, JSON-ready."""
        return {
            "kind": "constant",
            "bounds": False,
            "parameters": {
                "step_s": {
                    "value": self.step_s,
                    "unit": "s/step",
                    "source": "configuration",
                }
            },
        }
