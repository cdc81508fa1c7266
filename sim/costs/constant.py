"""Every step costs the same: for tests, theory and toy examples."""

from __future__ import annotations

from typing import Any

from sim.costs.checks import above_zero
from sim.costs.parts import Count, FormulaCost, Line, Seconds, SteadyDecodes


class ConstantCost(FormulaCost):
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

    __slots__ = ("step_s",)

    def __init__(self, step_s: float) -> None:
        self.step_s = above_zero("step_s", step_s)

    def counted(
        self, num_decodes: Count, num_prefills: Count, num_prefill_tokens: Count
    ) -> tuple[Seconds, Seconds, Seconds, Seconds, None]:
        # not named by any part of StepCost, hence host_s
        del num_decodes, num_prefills, num_prefill_tokens
        return 0.0, 0.0, 0.0, self.step_s, None

    def steady_decodes(self, num_decodes: int) -> SteadyDecodes:
        return self.along(num_decodes, [Line(0, 0.0, 0.0)])

    def describe(self) -> dict[str, Any]:
        value = {"value": self.step_s, "unit": "s/step", "source": "configuration"}
        return {"kind": "constant", "bounds": False, "parameters": {"step_s": value}}
