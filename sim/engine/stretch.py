"""Quiet steps that end early when something is handed to their engine."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from sim.engine.clock import STEP_PRIORITY, At

if TYPE_CHECKING:
    import simpy


class Stretch:
    """Quiet steps in progress; none of them is written down before it has ended.

    Parameters
    ----------
    env
        The clock.
    ends_s
        When each step ends, in order.

    Attributes
    ----------
    end
        Happens at the end of the last step.
    """

    def __init__(self, env: simpy.Environment, ends_s: list[float]) -> None:
        self._env = env
        self.ends_s = ends_s
        self.end: simpy.Event = At(env, ends_s[-1], STEP_PRIORITY)

    def succeed(self) -> None:
        """Let it end with the step in progress, as its engine has something to do."""
        num_steps = bisect_left(self.ends_s, self._env.now) + 1
        if num_steps < len(self.ends_s):
            self.ends_s = self.ends_s[:num_steps]
            sooner = At(self._env, self.ends_s[-1], STEP_PRIORITY)
            # Whoever waits for the end waits for this one from now on.
            sooner.callbacks, self.end.callbacks = self.end.callbacks, []
            self.end = sooner
