"""Mistakes of the user's that the command line answers in one line."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's: the message gives the rule, the value, the remedy."""


class ConfigError(UserError):
    """A configuration that cannot be used; the message names the path of the key."""


class OutputError(UserError):
    """A results directory that cannot be written."""


class ResultsError(UserError):
    """A results directory that cannot be read, or does not hold what is asked of it."""


class CapacityError(UserError):
    """A model, GPU and engine configuration that leaves no room for a KV cache."""


class CostError(UserError):
    """A cost model that gave a step no length, or an endless one."""


class SchedulerError(UserError):
    """A scheduler that was set up wrongly, or does not serve what it was given."""


class EngineDiedError(SchedulerError):
    """A real engine would end here; the message is its own.

    Attributes
    ----------
    at_s
        When, by the engine's own clock, in seconds; None until that is known.
    """

    at_s: float | None = None


class SwapSpaceError(UserError):
    """A preempted group that must be swapped out, and a CPU pool without room."""
