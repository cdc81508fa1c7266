"""Quiet steps that end early when something is handed to their engine."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import simpy

    from sim.engine.clock import Clock


class Stretch:
    """Quiet steps in progress; none of them is written down before it has ended.

    Parameters
    ----------
    env
        The clock.
    ends_s
        When each step ends, in order.
    begin_s
        When the first one begins, in seconds: now, or at the end of a step that is not
        seen.
    priority
        Of the steps of this engine among what happens at one instant.

    Attributes
    ----------
    end
        Happens at the end of the last step.
    """

    __slots__ = ("_begin_s", "_env", "_has_begun", "_priority", "end", "ends_s")

    def __init__(
        self, env: Clock, ends_s: list[float], begin_s: float, priority: float
    ) -> None:
        self._env = env
        self._begin_s = begin_s
        self._priority = priority
        self._has_begun = begin_s == env._now
        self.ends_s = ends_s
        self.end: simpy.Event = env.at(ends_s[-1], priority)

    def succeed(self) -> None:
        """Let it end with the step in progress, as its engine has something to do."""
        now_s = self._env._now
        had_its_turn = self._env.turn >= self._priority  # at this instant
        num_steps = 0
        if self._has_begun or now_s > self._begin_s or had_its_turn:
            passed = bisect_right if had_its_turn else bisect_left
            num_steps = passed(self.ends_s, now_s) + 1
        if num_steps < len(self.ends_s):
            self.ends_s = self.ends_s[:num_steps]
            end_s = self.ends_s[-1] if num_steps else self._begin_s
            self.end = self._env.sooner(self.end, end_s, self._priority)

    def end_of_step(self, time_s: float) -> float:
        """Return when the step ends that is in progress when something comes then."""
        if not self._has_begun and time_s <= self._begin_s:
            return self._begin_s
        return self.ends_s[min(bisect_left(self.ends_s, time_s), len(self.ends_s) - 1)]

    def num_begun(self) -> int:
        """Return how many steps have begun, when those of this instant have."""
        now_s = self._env._now
        if now_s < self._begin_s:
            return 0
        return min(bisect_right(self.ends_s, now_s) + 1, len(self.ends_s))
